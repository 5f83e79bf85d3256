// Keeps the ended requests of the last minute drawn, and moves them to the left as time goes by. A request that has ended
// does not change, so each one is drawn once.

import { RANK } from "./phases.js";
import { WINDOW_S } from "./requests.js";

const MAX_DRAWN_AT_ONCE = 500;
const MARGIN = 4;

export class Strip {
  constructor() {
    this.canvas = document.createElement("canvas");
    this.context = this.canvas.getContext("2d");
    this.shape = "";
    this.now = 0;
    this.lastNumber = 0;
    this.waiting = [];
  }

  /**
   * Draw what has ended since the last call, the newest first; return whether some of it has to wait for another call.
   * view: width, height, laneHeight and tall (of a bar) in pixels of the screen; theme, and its colours by phase
   */
  update(requests, view) {
    const perSecond = view.width / WINDOW_S, step = Math.floor((requests.now - this.now) * perSecond);
    const shape = [view.width, view.height, view.laneHeight, view.theme, requests.numFresh].join();
    if (shape !== this.shape || step < 0 || step >= view.width) {
      this.#begin(view, shape, requests.now);
    } else if (step > 0) {
      this.#move(step);
      this.now += step / perSecond;
    }
    for (const item of requests.items.values()) if (item.number > this.lastNumber && item.lane >= 0) this.waiting.push(item);
    this.lastNumber = requests.numEnded;
    this.#draw(this.waiting.splice(-MAX_DRAWN_AT_ONCE), view, perSecond);
    return this.waiting.length > 0;
  }

  #begin(view, shape, now) {
    // The margin has what ends within the pixel that is now.
    this.canvas.width = view.width + MARGIN;
    this.canvas.height = view.height;
    this.shape = shape;
    this.now = now;
    this.lastNumber = 0;
    this.waiting = [];
  }

  #move(step) {
    this.context.globalCompositeOperation = "copy";
    this.context.drawImage(this.canvas, -step, 0);
    this.context.globalCompositeOperation = "source-over";
  }

  #draw(items, view, perSecond) {
    // All rectangles of one phase are one path: a canvas draws few paths faster than many rectangles.
    const paths = new Map();
    for (const item of items) {
      const top = item.lane * view.laneHeight;
      if (top + view.laneHeight > view.height) continue;
      for (const span of item.story.spans) {
        const left = view.width - (this.now - item.start - span.began_s) * perSecond;
        const end = span.ended_s === null ? item.end : item.start + span.ended_s;
        const right = view.width - (this.now - end) * perSecond;
        if (right < 0) continue;
        if (!paths.has(span.phase)) paths.set(span.phase, new Path2D());
        paths.get(span.phase).rect(left, top, Math.max(1, right - left), view.tall);
      }
    }
    for (const [phase] of RANK) {
      if (!paths.has(phase)) continue;
      this.context.fillStyle = view.colours.get(phase);
      this.context.fill(paths.get(phase));
    }
  }
}
