// The live page: follows the stream of snapshots and lets each part draw them.

import { Charts } from "./charts.js";
import { Engines } from "./engines.js";
import { fetchAsOperator, follow } from "./feed.js";
import { Frames } from "./frames.js";
import { ago, element, rate, save, seconds, setText, showFacts } from "./format.js";
import { Lanes } from "./lanes.js";
import { PHASES } from "./phases.js";
import { Requests } from "./requests.js";
import { Waterfall } from "./waterfall.js";

const NUM_SLOWEST = 8;
const HALF_INTERVAL_MS = 500;
const byId = (id) => document.getElementById(id);

const requests = new Requests();
const waterfall = new Waterfall(byId("story"));
const frames = new Frames();
const lanes = new Lanes(byId("lanes"), requests, {
  open: openItem,
  select: showSelected,
  more: () => frames.ask("lanes", drawLanes),
});
const engines = new Engines(document);
const charts = new Charts(document);
let lastNumber = null;
let numMissed = 0;
let redrawing = 0;

function takeSnapshot(text) {
  const began = performance.now();
  showSnapshot(JSON.parse(text));
  frames.count(performance.now() - began);
}

/** Keep what is new in a snapshot, and draw its parts in the next frames. */
function showSnapshot(snapshot) {
  if (!snapshot.is_first && lastNumber !== null) numMissed += Math.max(0, snapshot.number - lastNumber - 1);
  lastNumber = snapshot.number;
  charts.update(snapshot);
  requests.update(snapshot);
  frames.ask("head", () => showHead(snapshot));
  frames.ask("engines", () => engines.update(snapshot));
  charts.all.forEach((chart, index) => frames.ask(`chart ${index}`, () => chart.draw()));
  frames.ask("lanes", drawLanes);
  frames.ask("requests", () => {
    showRest(snapshot);
    showSlowest();
  });
  frames.ask("decisions", () => showDecisions(snapshot));
  waterfall.refresh();
  // For those who test the page: the last snapshot of which all is drawn.
  frames.ask("end", () => (document.documentElement.dataset.snapshot = String(snapshot.number)));
  moveLanesBefore(snapshot.now_s);
}

function drawLanes() {
  lanes.fit();
  lanes.draw();
}

function showHead(snapshot) {
  byId("main").hidden = !byId("login").hidden;
  setText(byId("model"), snapshot.model);
  const missed = numMissed ? `, ${numMissed} snapshots missed` : "";
  setText(byId("source"), `${snapshot.ingress || "ingress"}, raypd ${snapshot.version}${missed}`);
  showHealth(snapshot);
}

/** Draw the lanes once more before the next snapshot comes, so that they move twice a second. now: of the last one */
function moveLanesBefore(now) {
  clearTimeout(redrawing);
  redrawing = setTimeout(() => {
    requests.now = now + HALF_INTERVAL_MS / 1000;
    frames.ask("lanes", drawLanes);
  }, HALF_INTERVAL_MS);
}

function showHealth(snapshot) {
  byId("health").dataset.kind = snapshot.bottleneck.kind;
  setText(byId("health"), snapshot.bottleneck.text);
  const troubles = [];
  if (snapshot.controller_error) troubles.push(`The controller does not answer: ${snapshot.controller_error}`);
  if (snapshot.update) troubles.push(`Update: ${snapshot.update}`);
  showList(byId("troubles"), troubles);
  const figures = snapshot.figures;
  const failed = figures.num_requests ? ` (${((100 * figures.num_failed) / figures.num_requests).toFixed(1)} %)` : "";
  showFacts(byId("figures"), [
    ["in flight", String(snapshot.in_flight.length + snapshot.num_in_flight_left_out)],
    ["requests/s", rate(figures.requests_per_s)],
    ["output tokens/s", rate(figures.output_tokens_per_s)],
    ["first token, median", seconds(figures.ttft_p50_s)],
    ["first token, 99 %", seconds(figures.ttft_p99_s)],
    ["failed in the last minute", `${figures.num_failed}${failed}`],
  ]);
}

function showRest(snapshot) {
  const parts = [];
  if (requests.numNotDrawn) parts.push(`${requests.numNotDrawn} requests are not drawn`);
  if (snapshot.num_stories_left_out) parts.push(`${snapshot.num_stories_left_out} of the newest were too many to send`);
  if (snapshot.num_in_flight_left_out) parts.push(`${snapshot.num_in_flight_left_out} more are in flight`);
  setText(byId("lanes-rest"), parts.join("; "));
}

function showSelected(item) {
  if (item.story === null) {
    const { request_id: id, phase, engine } = item.live;
    setText(byId("lanes-selected"), `${id}: in flight, ${phase} at ${engine || "no engine yet"}, ${seconds(requests.now - item.start)}`);
  } else {
    setText(byId("lanes-selected"), `${item.story.request_id}: ${seconds(item.story.duration_s)}, ${item.story.cause}`);
  }
}

/** Show the waterfall of a lane: of a request in flight so far as it has come. */
function openItem(item) {
  if (item.story !== null) waterfall.show(item.story);
  else find(item.live.request_id, item.live.tenant, byId("lanes-selected"));
}

/** Show the waterfall of a request by its id or the beginning of it; problem: the element that says why there is none */
async function find(id, tenant, problem) {
  try {
    await waterfall.find(id, tenant);
    if (problem === byId("find-problem")) setText(problem, "");
  } catch (error) {
    setText(problem, error.message);
  }
}

function showSlowest() {
  const list = byId("slowest"), items = requests.slowest(NUM_SLOWEST);
  while (list.children.length > items.length) list.lastChild.remove();
  items.forEach((item, index) => {
    if (!list.children[index]) list.append(slowestRow());
    const button = list.children[index].firstChild;
    button.story = item.story;
    const texts = [item.story.request_id, seconds(item.story.duration_s), seconds(item.story.ttft_s), item.story.cause];
    texts.forEach((text, at) => setText(button.children[at], text));
  });
}

function slowestRow() {
  const row = element("li"), button = element("button");
  button.type = "button";
  button.append(element("span"), element("span"), element("span"), element("span"));
  button.addEventListener("click", () => waterfall.show(button.story));
  row.append(button);
  return row;
}

function showDecisions(snapshot) {
  const { plan } = snapshot;
  setText(byId("plan"), plan === null ? "" : `Planner (${plan.mode}), ${ago(plan.at_s, snapshot.now_s)}: ${plan.action}. ${plan.reason} ${plan.steps}`);
  const newest = [...snapshot.decisions].reverse();
  showList(byId("decisions"), newest.map((one) => `${ago(one.at_s, snapshot.now_s)}: ${one.text}`));
}

function showList(list, texts) {
  while (list.children.length > texts.length) list.lastChild.remove();
  texts.forEach((text, index) => setText(list.children[index] || list.appendChild(element("li")), text));
}

function showLegend() {
  for (const [name, label] of PHASES) {
    const entry = element("li"), key = element("i");
    key.style.background = `var(--${name})`;
    entry.append(key, label);
    byId("legend").append(entry);
  }
}

function showState(state, reason) {
  byId("connection").dataset.state = state;
  setText(byId("connection"), reason ? `${state}: ${reason}` : state);
}

/** Ask for a token; resolves when the form is sent. */
function askForToken(status, reason) {
  showState("lost", status === 401 ? "a token is needed" : "refused");
  byId("main").hidden = true;
  byId("login").hidden = false;
  setText(byId("login-reason"), reason);
  byId("token").focus();
  return new Promise((resolve) => {
    byId("login").addEventListener(
      "submit",
      (event) => {
        event.preventDefault();
        byId("login").hidden = true;
        resolve(byId("token").value);
        byId("token").value = "";
      },
      { once: true },
    );
  });
}

function setTheme(isDark) {
  document.documentElement.dataset.theme = isDark ? "dark" : "light";
  byId("theme").setAttribute("aria-pressed", String(isDark));
  lanes.recolour();
  charts.recolour();
}

/** Save the last requests of this ingress for Perfetto; the button says what went wrong, if anything did. */
async function saveTrace() {
  const button = byId("trace");
  try {
    const answer = await fetchAsOperator("ui/trace.json");
    if (!answer.ok) throw new Error(`HTTP ${answer.status}`);
    save(await answer.blob(), "requests-perfetto.json");
    setText(button, "Saved: open it at ui.perfetto.dev");
  } catch (error) {
    setText(button, `Not saved: ${error.message}`);
  }
}

byId("trace").addEventListener("click", saveTrace);
byId("find").addEventListener("submit", (event) => {
  event.preventDefault();
  find(byId("find-id").value.trim(), null, byId("find-problem"));
});
const prefersDark = matchMedia("(prefers-color-scheme: dark)");
prefersDark.addEventListener("change", (event) => setTheme(event.matches));
byId("theme").addEventListener("click", () => setTheme(document.documentElement.dataset.theme !== "dark"));
setTheme(prefersDark.matches);
showLegend();
follow("ui/events", { snapshot: takeSnapshot, state: showState, refused: askForToken });
