// Draws the requests of the last minute as lanes of coloured phases on a canvas, and finds the request at a point.

import { RANK, phaseColours } from "./phases.js";
import { WINDOW_S } from "./requests.js";

const MAX_LANE_HEIGHT = 16;
const MIN_LANE_HEIGHT = 3;
const AXIS_HEIGHT = 18;
const MIN_HEIGHT = 130;
const MAX_HEIGHT = 380;
const LIVE_PHASES = { admitted: "admission", prefill: "prefill", decode: "decode" };

export class Lanes {
  /** on.select(item): a request is selected by a key; on.open(item): it is to be shown */
  constructor(canvas, requests, on) {
    this.canvas = canvas;
    this.requests = requests;
    this.on = on;
    this.selected = null;
    this.lastDrawMs = 0;
    this.colours = phaseColours();
    canvas.addEventListener("click", (event) => this.#click(event));
    canvas.addEventListener("keydown", (event) => this.#key(event));
    new ResizeObserver(() => this.draw()).observe(canvas);
  }

  recolour() {
    this.colours = phaseColours();
    this.draw();
  }

  /** Make the canvas as high as its lanes need. */
  fit() {
    const wanted = this.requests.numLanes * MAX_LANE_HEIGHT + AXIS_HEIGHT;
    this.canvas.style.height = `${Math.min(MAX_HEIGHT, Math.max(MIN_HEIGHT, wanted))}px`;
  }

  draw() {
    const began = performance.now();
    const { canvas, requests } = this;
    const width = canvas.clientWidth, height = canvas.clientHeight, ratio = window.devicePixelRatio || 1;
    if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
    }
    const context = canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, height);
    this.laneHeight = Math.min(MAX_LANE_HEIGHT, Math.max(MIN_LANE_HEIGHT, Math.floor((height - AXIS_HEIGHT) / Math.max(1, requests.numLanes))));
    this.#axis(context, width, height);
    // All rectangles of one phase are one path: a canvas draws few paths faster than many rectangles.
    const paths = new Map();
    for (const item of requests.items.values()) if (item.lane >= 0) this.#addPaths(paths, item, width, height);
    for (const [phase] of RANK) {
      if (!paths.has(phase)) continue;
      context.fillStyle = this.colours.get(phase);
      context.fill(paths.get(phase));
    }
    this.#frameSelected(context, width);
    this.lastDrawMs = performance.now() - began;
  }

  #axis(context, width, height) {
    const style = getComputedStyle(document.documentElement);
    context.fillStyle = style.getPropertyValue("--dim");
    context.strokeStyle = style.getPropertyValue("--line");
    context.font = "11px system-ui, sans-serif";
    for (let back = 0; back <= WINDOW_S; back += 10) {
      const x = width - (back / WINDOW_S) * width;
      context.beginPath();
      context.moveTo(x, 0);
      context.lineTo(x, height - AXIS_HEIGHT);
      context.stroke();
      context.textAlign = back === 0 ? "right" : back === WINDOW_S ? "left" : "center";
      context.fillText(back === 0 ? "now" : `-${back} s`, x, height - 5);
    }
  }

  #addPaths(paths, item, width, height) {
    const y = item.lane * this.laneHeight;
    if (y + this.laneHeight > height - AXIS_HEIGHT) return;
    const tall = Math.max(2, this.laneHeight - 2);
    const add = (phase, began, ended) => {
      const left = Math.max(0, this.#x(began, width)), right = this.#x(ended, width);
      if (right < 0) return;
      if (!paths.has(phase)) paths.set(phase, new Path2D());
      paths.get(phase).rect(left, y, Math.max(1, right - left), tall);
    };
    if (item.story === null) {
      add(LIVE_PHASES[item.live.phase] || "unreported", item.start, this.requests.now);
      return;
    }
    for (const span of item.story.spans) {
      add(span.phase, item.start + span.began_s, span.ended_s === null ? item.end : item.start + span.ended_s);
    }
  }

  #frameSelected(context, width) {
    if (this.selected === null) return;
    const item = this.requests.items.get(this.selected);
    if (!item || item.lane < 0) return;
    context.strokeStyle = getComputedStyle(document.documentElement).getPropertyValue("--text");
    context.lineWidth = 2;
    const left = Math.max(0, this.#x(item.start, width));
    context.strokeRect(left - 1, item.lane * this.laneHeight - 1, Math.max(3, this.#x(item.end, width) - left + 2), this.laneHeight);
  }

  #x(at, width) {
    return width - ((this.requests.now - at) / WINDOW_S) * width;
  }

  /** Return the request at a point of the canvas; null if there is none. */
  itemAt(x, y) {
    const lane = Math.floor(y / this.laneHeight), width = this.canvas.clientWidth;
    for (const item of this.requests.items.values()) {
      if (item.lane === lane && this.#x(item.start, width) - 2 <= x && x <= this.#x(item.end, width) + 2) return item;
    }
    return null;
  }

  #click(event) {
    const item = this.itemAt(event.offsetX, event.offsetY);
    if (item === null) return;
    this.#select(item);
    if (item.story !== null) this.on.open(item);
  }

  #key(event) {
    const items = this.requests.ended();
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
