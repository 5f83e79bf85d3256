// Keeps the requests of the last minute, and gives each a lane: those of one lane do not overlap.

export const WINDOW_S = 60;
const MAX_LANES = 120;
const MAX_KEPT = 8000;

export class Requests {
  constructor() {
    this.items = new Map();
    this.now = 0;
    this.numNotDrawn = 0;
    this.laneEnds = [];
  }

  /** Take a snapshot. A request is named by its tenant and id, and by its arrival, since ids may come again. */
  update(snapshot) {
    this.now = snapshot.now_s;
    if (snapshot.is_first) {
      this.items.clear();
      this.laneEnds = [];
    }
    for (const story of snapshot.stories) this.#put(fromStory(story));
    const live = new Set();
    for (const request of snapshot.in_flight) {
      const item = fromLive(request, this.now);
      live.add(item.key);
      this.#put(item);
    }
    for (const [key, item] of this.items) {
      const isGone = item.story === null && !live.has(key);
      if (isGone || item.end < this.now - WINDOW_S) this.#drop(key, item);
    }
    for (const [key, item] of this.items) {
      if (this.items.size <= MAX_KEPT) break;
      this.#drop(key, item);
    }
    // A lane whose last request is gone has none at all; without empty lanes the others are taller.
    while (this.laneEnds.length && this.laneEnds.at(-1) < this.now - WINDOW_S) this.laneEnds.pop();
    this.numNotDrawn = 0;
    for (const item of this.items.values()) if (item.lane < 0) this.numNotDrawn += 1;
  }

  get numLanes() {
    return this.laneEnds.length;
  }

  /** Return the requests that have ended, by their arrival. */
  ended() {
    return [...this.items.values()].filter((item) => item.story !== null).sort((a, b) => a.start - b.start);
  }

  /** Return the requests that took longest, the longest first. To sort thousands with each snapshot would take longer. */
  slowest(most) {
    const found = [], took = (item) => item.end - item.start;
    for (const item of this.items.values()) {
      if (item.story === null || (found.length === most && took(item) <= took(found.at(-1)))) continue;
      const at = found.findIndex((other) => took(other) < took(item));
      found.splice(at < 0 ? found.length : at, 0, item);
      if (found.length > most) found.pop();
    }
    return found;
  }

  #put(item) {
    const known = this.items.get(item.key);
    item.lane = known ? known.lane : this.#laneFor(item);
    if (item.lane >= 0) this.laneEnds[item.lane] = item.story === null ? Infinity : Math.max(item.end, known ? 0 : this.laneEnds[item.lane] || 0);
    this.items.set(item.key, item);
  }

  #laneFor(item) {
    const free = this.laneEnds.findIndex((end) => end <= item.start);
    if (free >= 0) return free;
    if (this.laneEnds.length >= MAX_LANES) return -1;
    this.laneEnds.push(0);
    return this.laneEnds.length - 1;
  }

  #drop(key, item) {
    this.items.delete(key);
    if (item.lane >= 0 && this.laneEnds[item.lane] === Infinity && item.story === null) this.laneEnds[item.lane] = this.now;
  }
}

function keyOf(tenant, id, arrival) {
  return JSON.stringify([tenant, id, arrival.toFixed(2)]);
}

function fromStory(story) {
  const start = story.arrived_at_ns / 1e9;
  return { key: keyOf(story.tenant, story.request_id, start), start, end: start + story.duration_s, story, live: null, lane: -1 };
}

function fromLive(request, now) {
  const start = request.arrived_at_s;
  return { key: keyOf(request.tenant, request.request_id, start), start, end: now, story: null, live: request, lane: -1 };
}
