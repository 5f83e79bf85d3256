// Spreads the drawing of a snapshot over animation frames, so that each has little of it. A page that nobody sees has no
// frames, and so draws nothing.

const BUDGET_MS = 3;

export class Frames {
  constructor() {
    this.waiting = new Map();
    this.isAsked = false;
    this.spent = 0;
  }

  /** Count what script did between two frames as if it were done in the next one. */
  count(milliseconds) {
    this.spent += milliseconds;
  }

  /** Draw a part of the page in one of the next frames, in place of a drawing of that part that still waits. */
  ask(part, draw) {
    this.waiting.set(part, draw);
    if (!this.isAsked) this.#askForFrame();
  }

  #askForFrame() {
    this.isAsked = true;
    requestAnimationFrame(() => this.#drawSome());
  }

  #drawSome() {
    const end = performance.now() + BUDGET_MS - this.spent;
    this.spent = 0;
    this.isAsked = false;
    for (const [part, draw] of this.waiting) {
      if (performance.now() >= end) break;
      this.waiting.delete(part);
      draw();
    }
    if (this.waiting.size > 0 && !this.isAsked) this.#askForFrame();
  }
}
