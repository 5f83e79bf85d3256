// Keeps the requests of the last minute, and gives each a lane: those of one lane do not overlap.

export const WINDOW_S = 60;
const MAX_LANES = 120;
const MAX_KEPT = 15000;

export class Requests {
  constructor() {
    // Those that have ended, by key, in the order of their ends, and those in flight.
    this.items = new Map();
    this.live = new Map();
    this.now = 0;
    this.numEnded = 0;
    this.numFresh = 0;
    this.numEndedNotDrawn = 0;
    this.laneEnds = [];
  }

  /** Take a snapshot. A request is named by its tenant and id, and by its arrival, since ids may come again. */
  update(snapshot) {
    this.now = snapshot.now_s;
    if (snapshot.is_first) this.#beginAfresh();
    for (const story of snapshot.stories) this.#putEnded(fromStory(story));
    const live = snapshot.in_flight.map((request) => fromLive(request, this.now));
    this.#putLive(live.filter((item) => !this.items.has(item.key)));
    for (const [key, item] of this.items) {
      if (item.end >= this.now - WINDOW_S && this.items.size <= MAX_KEPT) break;
      this.items.delete(key);
      if (item.lane < 0) this.numEndedNotDrawn -= 1;
    }
    // A lane whose last request is gone has none at all; without empty lanes the others are taller.
    while (this.laneEnds.length && this.laneEnds.at(-1) < this.now - WINDOW_S) this.laneEnds.pop();
  }

  get numLanes() {
    return this.laneEnds.length;
  }

  get numNotDrawn() {
    let number = this.numEndedNotDrawn;
    for (const item of this.live.values()) if (item.lane < 0) number += 1;
    return number;
  }

  /** Return the request of a key; undefined if it is gone. */
  find(key) {
    return this.items.get(key) || this.live.get(key);
  }

  /** Return the requests that have ended or are in flight, by their arrival. */
  all() {
    return [...this.items.values(), ...this.live.values()].sort((a, b) => a.start - b.start);
  }

  /** Return the requests that took longest, the longest first. To sort thousands with each snapshot would take longer. */
  slowest(most) {
    const found = [], took = (item) => item.end - item.start;
    for (const item of this.items.values()) {
      if (found.length === most && took(item) <= took(found.at(-1))) continue;
      const at = found.findIndex((other) => took(other) < took(item));
      found.splice(at < 0 ? found.length : at, 0, item);
      if (found.length > most) found.pop();
    }
    return found;
  }

  #beginAfresh() {
    this.items.clear();
    this.live.clear();
    this.laneEnds = [];
    this.numFresh += 1;
    this.numEndedNotDrawn = 0;
  }

  #putEnded(item) {
    if (this.items.has(item.key)) return;
    const known = this.live.get(item.key);
    item.lane = known ? known.lane : this.#laneFor(item);
    item.number = this.numEnded += 1;
    if (item.lane < 0) this.numEndedNotDrawn += 1;
    else this.laneEnds[item.lane] = Math.max(item.end, known ? 0 : this.laneEnds[item.lane]);
    this.items.set(item.key, item);
    this.live.delete(item.key);
  }

  #putLive(items) {
    const known = this.live;
    this.live = new Map(items.map((item) => [item.key, item]));
    for (const [key, item] of known) if (item.lane >= 0 && !this.live.has(key)) this.laneEnds[item.lane] = this.now;
    for (const item of items) {
      item.lane = known.has(item.key) ? known.get(item.key).lane : this.#laneFor(item);
      if (item.lane >= 0) this.laneEnds[item.lane] = Infinity;
    }
  }

  #laneFor(item) {
    const free = this.laneEnds.findIndex((end) => end <= item.start);
    if (free >= 0) return free;
    if (this.laneEnds.length >= MAX_LANES) return -1;
    this.laneEnds.push(0);
    return this.laneEnds.length - 1;
  }
}

function keyOf(tenant, id, arrival) {
  return JSON.stringify([tenant, id, arrival.toFixed(2)]);
}

function fromStory(story) {
  const start = story.arrived_at_ns / 1e9;
  return { key: keyOf(story.tenant, story.request_id, start), start, end: start + story.duration_s, story, live: null, lane: -1, number: 0 };
}

function fromLive(request, now) {
  const start = request.arrived_at_s;
  return { key: keyOf(request.tenant, request.request_id, start), start, end: now, story: null, live: request, lane: -1, number: 0 };
}
