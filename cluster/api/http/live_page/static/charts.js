// The curves of the last five minutes, drawn by uPlot.

const KEPT_S = 300;
const LEAST_S = 60;
const HEIGHT = 180;
const TIME = new Intl.DateTimeFormat("en-GB", { timeStyle: "medium" });

class Chart {
  constructor(root, title, lines) {
    this.root = root;
    this.title = title;
    this.lines = lines;
    this.data = [[], ...lines.map(() => [])];
    this.plot = null;
    new ResizeObserver(() => this.plot && this.plot.setSize({ width: this.#width(), height: HEIGHT })).observe(root);
  }

  add(at, values) {
    [at, ...values].forEach((value, index) => this.data[index].push(value));
    while (this.data[0][0] < at - KEPT_S) this.data.forEach((column) => column.shift());
  }

  draw() {
    if (this.plot === null) this.rebuild();
    this.plot.setData(this.data);
  }

  rebuild() {
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(name).trim();
    const axis = { stroke: colour("--dim"), grid: { stroke: colour("--line"), width: 1 }, ticks: { stroke: colour("--line") } };
    if (this.plot !== null) this.plot.destroy();
    const series = this.lines.map(([label, name]) => ({ label, stroke: colour(name), width: 2, spanGaps: false, points: { show: false } }));
    const range = () => {
      const last = this.data[0].at(-1) ?? Date.now() / 1000, known = last - (this.data[0][0] ?? last);
      return [last - Math.min(KEPT_S, Math.max(LEAST_S, known)), last];
    };
    const times = { ...axis, values: (plot, splits) => splits.map((at) => TIME.format(at * 1000)) };
    const scales = { x: { range }, y: { range: (plot, low, high) => [0, high > 0 ? high * 1.1 : 1] } };
    const options = { title: this.title, width: this.#width(), height: HEIGHT, scales, series: [{}, ...series], axes: [times, { ...axis, size: 56 }], legend: { live: false } };
    this.plot = new uPlot(options, this.data, this.root);
  }

  #width() {
    return Math.max(200, this.root.clientWidth);
  }
}

export class Charts {
  constructor(root) {
    const tokens = [["prompt", "--prefill"], ["output", "--decode"]];
    const times = [["median", "--prefill"], ["99 %", "--transfer_exposed"]];
    this.tokens = new Chart(root.querySelector("#chart-tokens"), "Tokens per second, all engines", tokens);
    this.ttft = new Chart(root.querySelector("#chart-ttft"), "Time to first token of the last minute, ms", times);
    this.all = [this.tokens, this.ttft];
  }

  update(snapshot) {
    const sum = (name) => {
      const known = snapshot.engines.map((engine) => engine[name]).filter((value) => value !== null);
      return known.length ? known.reduce((total, value) => total + value, 0) : null;
    };
    this.tokens.add(snapshot.now_s, [sum("prompt_tokens_per_s"), sum("output_tokens_per_s")]);
    const { ttft_p50_s: median, ttft_p99_s: high } = snapshot.figures;
    this.ttft.add(snapshot.now_s, [median, high].map((value) => (value === null ? null : value * 1000)));
  }

  recolour() {
    for (const chart of this.all) if (chart.plot !== null) chart.rebuild();
  }
}
