// The dialog with one request: its cause in words, its figures, and its phases on a time axis.

import { fetchJson } from "./feed.js";
import { element, save, seconds, showFacts, size } from "./format.js";
import { LABEL } from "./phases.js";

export class Waterfall {
  constructor(dialog) {
    this.dialog = dialog;
    this.part = (name) => dialog.querySelector(`#story-${name}`);
    this.story = null;
    this.isAsking = false;
    this.part("close").addEventListener("click", () => dialog.close());
    this.part("copy").addEventListener("click", () => this.#copy());
    this.part("save").addEventListener("click", () => this.#save());
  }

  /**
   * Show a request in flight or ended. Throws an error with the reason if there is none.
   * id: the whole one, or as much of its beginning as names one request; tenant: null if it may be anybody's
   */
  async find(id, tenant = null) {
    this.show(await storyOf(id, tenant));
  }

  /** Show how far the request has come that is shown, if it was in flight. */
  async refresh() {
    if (!this.dialog.open || this.story.outcome !== null || this.isAsking) return;
    const shown = this.story;
    this.isAsking = true;
    try {
      const story = await storyOf(shown.request_id, shown.tenant);
      // Meanwhile another request may be shown, or none.
      if (this.dialog.open && this.story === shown) this.show(story);
    } catch (error) {
      if (this.story === shown) this.part("cause").textContent = `${shown.cause} (nothing newer: ${error.message})`;
    } finally {
      this.isAsking = false;
    }
  }

  show(story) {
    this.story = story;
    this.part("title").textContent = story.tenant ? `${story.tenant}/${story.request_id}` : story.request_id;
    this.part("cause").textContent = story.cause;
    showFacts(this.part("facts"), factsOf(story));
    this.part("spans").replaceChildren(...story.spans.map((span) => spanRow(span, story.duration_s)));
    this.part("events").replaceChildren(
      ...story.events.map((event) => element("li", "", `${seconds(event.at_s)}: ${event.text}`)),
    );
    this.part("copy").textContent = "Copy the id";
    if (!this.dialog.open) this.dialog.showModal();
  }

  async #copy() {
    try {
      await navigator.clipboard.writeText(this.story.request_id);
      this.part("copy").textContent = "Copied";
    } catch {
      // Without HTTPS a browser may have no clipboard: the title can be selected by hand.
      this.part("copy").textContent = "Select the title and copy it";
    }
  }

  #save() {
    save(JSON.stringify(this.story, null, 2), "request.json");
  }
}

async function storyOf(id, tenant) {
  const query = new URLSearchParams(tenant === null ? { id } : { id, tenant });
  const { stories } = await fetchJson(`ui/request.json?${query}`);
  // The samples of one call have a story each: the longest one is what the call waited for.
  return stories.reduce((longest, story) => (story.duration_s > longest.duration_s ? story : longest));
}

function factsOf(story) {
  const facts = [
    ["end", story.outcome || "in flight"],
    ["all", seconds(story.duration_s)],
    ["first token", seconds(story.ttft_s)],
    ["between tokens, median", seconds(story.itl_p50_s)],
    ["prompt", `${story.num_prompt_tokens} tokens, ${story.num_cached_tokens} cached`],
    ["output", `${story.num_output_tokens} tokens`],
    ["attempts", String(story.num_attempts)],
  ];
  if (story.num_transferred_bytes) {
    const sizes = `${size(story.num_transferred_bytes)} in ${seconds(story.transfer_s)}`;
    facts.push(["KV transfer", `${sizes}, ${seconds(story.exposed_transfer_s)} of it waited for`]);
  }
  if (story.num_preemptions) facts.push(["preemptions", String(story.num_preemptions)]);
  if (story.num_moves) facts.push(["migrations", String(story.num_moves)]);
  if (story.way) facts.push(["way", story.way.replaceAll("_", " ")]);
  if (story.error) facts.push(["error", story.error]);
  return facts;
}

function spanRow(span, duration) {
  const ended = span.ended_s === null ? duration : span.ended_s;
  const row = element("div", "span");
  const name = element("span");
  const key = element("i", "key");
  key.style.background = `var(--${span.phase})`;
  const attempt = span.attempt > 1 ? `, attempt ${span.attempt}` : "";
  const label = `${LABEL.get(span.phase) || span.phase}${span.engine_id ? `, ${span.engine_id}` : ""}${attempt}`;
  name.append(key, label);
  name.title = label;
  const track = element("div", "track"), bar = element("i");
  const whole = Math.max(duration, 1e-9);
  bar.style.background = `var(--${span.phase})`;
  bar.style.left = `${(100 * span.began_s) / whole}%`;
  bar.style.width = `${(100 * Math.max(0, ended - span.began_s)) / whole}%`;
  track.append(bar);
  row.append(name, track, element("span", "dim", `${seconds(ended - span.began_s)} from ${seconds(span.began_s)}`));
  return row;
}
