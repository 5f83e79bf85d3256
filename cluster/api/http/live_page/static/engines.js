// Shows the engines, prefill on the left and decode on the right, and the links between them.

import { byteRate, element, rate, seconds, setText } from "./format.js";

const WARN = 0.8;
const FULL = 0.95;

export class Engines {
  constructor(root) {
    this.columns = { prefill: root.querySelector("#prefill"), decode: root.querySelector("#decode") };
    this.links = root.querySelector("#links");
    this.rest = root.querySelector("#engines-rest");
    this.cards = new Map();
  }

  update(snapshot) {
    const named = new Set(snapshot.bottleneck.where);
    const shown = new Set();
    for (const engine of snapshot.engines) {
      const key = `${engine.engine_id}#${engine.incarnation}`;
      shown.add(key);
      if (!this.cards.has(key)) this.cards.set(key, makeCard());
      const card = this.cards.get(key);
      const column = engine.role === "prefill" || engine.role === "encode" ? this.columns.prefill : this.columns.decode;
      if (card.root.parentNode !== column) column.append(card.root);
      fillCard(card, engine, named.has(engine.engine_id));
    }
    for (const [key, card] of this.cards) {
      if (shown.has(key)) continue;
      card.root.remove();
      this.cards.delete(key);
    }
    this.#showLinks(snapshot.links);
    const left = [[snapshot.num_engines_left_out, "engines"], [snapshot.num_links_left_out, "links"]];
    setText(this.rest, left.filter(([number]) => number).map(([number, name]) => `${number} more ${name}`).join(", "));
  }

  #showLinks(links) {
    const isEmpty = this.links.firstChild?.tagName === "P";
    if (links.length === 0) {
      if (!isEmpty) this.links.replaceChildren(element("p", "dim", "no link is open"));
      return;
    }
    if (isEmpty) this.links.replaceChildren();
    const most = Math.max(1, ...links.map((link) => link.bytes_per_s || 0));
    while (this.links.children.length > links.length) this.links.lastChild.remove();
    links.forEach((link, index) => {
      const row = this.links.children[index] || this.links.appendChild(makeLink());
      row.dataset.state = link.state === "open" ? "good" : "bad";
      setText(row.children[0], `${link.producer_id} → ${link.consumer_id}`);
      const bar = row.children[1];
      bar.firstChild.style.width = `${(100 * (link.bytes_per_s || 0)) / most}%`;
      setText(bar.lastChild, byteRate(link.bytes_per_s));
      const transfers = `${link.num_active_transfers} under way`;
      setText(row.children[2], link.state === "open" ? transfers : `${link.state}, ${transfers} ${link.last_error}`);
    });
  }
}

function makeBar() {
  const bar = element("div", "bar");
  bar.append(element("i"), element("b"));
  return bar;
}

function makeLink() {
  const row = element("div", "link");
  row.append(element("div"), makeBar(), element("div", "counts"));
  return row;
}

function makeCard() {
  const root = element("article", "engine");
  const card = { root, name: element("span"), state: element("span", "state"), bar: makeBar() };
  card.counts = element("div", "counts");
  card.rates = element("div", "counts");
  card.error = element("div", "error");
  const head = element("div", "name");
  head.append(card.name, " ", card.state);
  root.append(head, card.bar, card.counts, card.rates, card.error);
  return card;
}

function fillCard(card, engine, isNamed) {
  card.root.dataset.named = String(isNamed);
  setText(card.name, engine.engine_id);
  const role = engine.role === "both" || engine.role === "encode" ? `${engine.role}, ` : "";
  setText(card.state, `${role}${engine.state}${engine.node ? `, ${engine.node}` : ""}`);
  setText(card.error, engine.last_error);
  card.bar.hidden = !engine.has_stats;
  if (!engine.has_stats) return;
  card.bar.dataset.level = engine.kv_used >= FULL ? "bad" : engine.kv_used >= WARN ? "warn" : "good";
  card.bar.firstChild.style.width = `${100 * engine.kv_used}%`;
  setText(card.bar.lastChild, `KV ${(100 * engine.kv_used).toFixed(0)} %`);
  const kv = engine.num_waiting_for_kv ? `, ${engine.num_waiting_for_kv} waiting for KV` : "";
  const held = engine.num_held ? `, ${engine.num_held} held` : "";
  setText(card.counts, `${engine.num_running} running, ${engine.num_waiting} waiting${kv}${held}`);
  const tokens = `${rate(engine.prompt_tokens_per_s)} prompt tok/s, ${rate(engine.output_tokens_per_s)} output tok/s`;
  setText(card.rates, `step ${seconds(engine.step_s)}, ${tokens}`);
}
