// Draws the requests of the last minute as lanes of coloured phases on a canvas, and finds the request at a point.

import { phaseColours, RANK } from "./phases.js";
import { WINDOW_S } from "./requests.js";
import { Strip } from "./strip.js";

const MAX_LANE_HEIGHT = 16;
const MIN_LANE_HEIGHT = 3;
const LANE_GAP = 2;
// The height of lanes follows their number in steps, since with another height all of them are drawn again.
const LANES_STEP = 10;
const AXIS_HEIGHT = 18;
const MIN_HEIGHT = 130;
const MAX_HEIGHT = 380;
// Of a request in flight that no engine has got, no phase is sent.
const AT_THE_INGRESS = [["admission", 0, null]];

export class Lanes {
  /** on.select(item): a request is selected by a key; on.open(item): it is to be shown; on.more(): draw() has more to draw */
  constructor(canvas, requests, on) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d");
    this.requests = requests;
    this.on = on;
    this.selected = null;
    this.strip = new Strip();
    this.width = this.height = 0;
    this.laneHeight = MAX_LANE_HEIGHT;
    this.theme = 0;
    this.#readColours();
    canvas.addEventListener("click", (event) => this.#click(event));
    canvas.addEventListener("keydown", (event) => this.#key(event));
    new ResizeObserver(() => this.#resize()).observe(canvas);
  }

  recolour() {
    this.theme += 1;
    this.#readColours();
    this.draw();
  }

  /** Make the canvas as high as its lanes need. */
  fit() {
    const wanted = this.#numLanes() * MAX_LANE_HEIGHT + AXIS_HEIGHT;
    const height = `${Math.min(MAX_HEIGHT, Math.max(MIN_HEIGHT, wanted))}px`;
    if (this.canvas.style.height !== height) this.canvas.style.height = height;
  }

  draw() {
    const { canvas, context, width, height } = this, ratio = window.devicePixelRatio || 1;
    if (width === 0) return;
    if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
    }
    const room = height - AXIS_HEIGHT;
    this.laneHeight = Math.min(MAX_LANE_HEIGHT, Math.max(MIN_LANE_HEIGHT, Math.floor(room / Math.max(1, this.#numLanes()))));
    const view = {
      width: canvas.width,
      height: Math.round(room * ratio),
      laneHeight: this.laneHeight * ratio,
      tall: this.#tall() * ratio,
      theme: this.theme,
      colours: this.colours,
    };
    const hasMore = this.strip.update(this.requests, view);
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, height);
    this.#axis(width, room);
    context.drawImage(this.strip.canvas, 0, 0, view.width, view.height, 0, 0, width, view.height / ratio);
    for (const item of this.requests.live.values()) this.#drawLive(item, width, room);
    this.#frameSelected(context, width);
    if (hasMore) this.on.more();
  }

  #resize() {
    this.width = this.canvas.clientWidth;
    this.height = this.canvas.clientHeight;
    this.draw();
  }

  #readColours() {
    const style = getComputedStyle(document.documentElement);
    this.colours = phaseColours();
    [this.dim, this.line, this.text] = ["--dim", "--line", "--text"].map((name) => style.getPropertyValue(name));
  }

  #numLanes() {
    return Math.ceil(this.requests.numLanes / LANES_STEP) * LANES_STEP;
  }

  #tall() {
    return Math.max(2, this.laneHeight - LANE_GAP);
  }

  #axis(width, room) {
    const { context } = this;
    context.fillStyle = this.dim;
    context.strokeStyle = this.line;
    context.lineWidth = 1;
    context.font = "11px system-ui, sans-serif";
    for (let back = 0; back <= WINDOW_S; back += 10) {
      const x = width - (back / WINDOW_S) * width;
      context.beginPath();
      context.moveTo(x, 0);
      context.lineTo(x, room);
      context.stroke();
      context.textAlign = back === 0 ? "right" : back === WINDOW_S ? "left" : "center";
      context.fillText(back === 0 ? "now" : `-${back} s`, x, room + AXIS_HEIGHT - 5);
    }
  }

  #drawLive(item, width, room) {
    const top = item.lane * this.laneHeight;
    if (item.lane < 0 || top + this.laneHeight > room) return;
    const spans = item.live.spans.length > 0 ? item.live.spans : AT_THE_INGRESS;
    const ranked = [...spans].sort((one, other) => RANK.get(one[0]) - RANK.get(other[0]));
    for (const [phase, began, ended] of ranked) {
      const left = Math.max(0, this.#x(item.start + began, width));
      const right = ended === null ? width : this.#x(item.start + ended, width);
      if (right < left) continue;
      this.context.fillStyle = this.colours.get(phase);
      this.context.fillRect(left, top, Math.max(1, right - left), this.#tall());
    }
  }

  #frameSelected(context, width) {
    if (this.selected === null) return;
    const item = this.requests.find(this.selected);
    if (!item || item.lane < 0) return;
    context.strokeStyle = this.text;
    context.lineWidth = 2;
    const left = Math.max(0, this.#x(item.start, width));
    context.strokeRect(left - 1, item.lane * this.laneHeight - 1, Math.max(3, this.#x(item.end, width) - left + 2), this.laneHeight);
  }

  #x(at, width) {
    return width - ((this.requests.now - at) / WINDOW_S) * width;
  }

  /** Return the request at a point of the canvas; null if there is none. */
  itemAt(x, y) {
    const lane = Math.floor(y / this.laneHeight), { width } = this;
    for (const items of [this.requests.live, this.requests.items]) {
      for (const item of items.values()) {
        if (item.lane === lane && this.#x(item.start, width) - 2 <= x && x <= this.#x(item.end, width) + 2) return item;
      }
    }
    return null;
  }

  #click(event) {
    const item = this.itemAt(event.offsetX, event.offsetY);
    if (item === null) return;
    this.#select(item);
    this.on.open(item);
  }

  #key(event) {
    const items = this.requests.all();
    const at = items.findIndex((item) => item.key === this.selected);
    const steps = { ArrowLeft: -1, ArrowUp: -1, ArrowRight: 1, ArrowDown: 1 };
    if (event.key in steps && items.length > 0) {
      const next = at < 0 ? items.length - 1 : Math.min(items.length - 1, Math.max(0, at + steps[event.key]));
      this.#select(items[next]);
    } else if (event.key === "Enter" && at >= 0) {
      this.on.open(items[at]);
    } else {
      return;
    }
    event.preventDefault();
  }

  #select(item) {
    this.selected = item.key;
    this.on.select(item);
    this.draw();
  }
}
