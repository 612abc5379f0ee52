// Draws the charts with uPlot, each with a caption that says the same in words.

import { bytes, clock, count, element, median, NONE, seconds, secondsTick, speed } from "./format.js";

const HEIGHT = 150;
const SHOWN_MAX = 60; // requests shown in a chart
const SAMPLES_MAX = 600; // samples of memory that are kept, one per second

const SOURCES = ["slot", "ram", "ssd"];
const WHOLE_STEPS = [1, 2, 5].flatMap((step) => Array.from({ length: 9 }, (_, power) => step * 10 ** power)).sort((a, b) => a - b);
const BYTE_STEPS = Array.from({ length: 50 }, (_, power) => 2 ** power);

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const last = (values) => values[values.length - 1] ?? null;

const cachedAt = (plot, at) => plot.data.slice(2).reduce((sum, column) => sum + (column[at] ?? 0), 0);

// The charts. `data` makes uPlot's columns and `says` the caption, from requests or samples.
const CHARTS = [
  {
    title: "Time to first token",
    of: "requests",
    unit: seconds,
    tick: secondsTick,
    series: [{ label: "first token", colour: "accent", points: true }],
    data: (rows) => [rows.map((row) => (row.ttft_ms === null ? null : row.ttft_ms / 1000))],
    says: ([ttft]) => `last ${seconds(last(ttft))}, median ${seconds(median(ttft))}`,
  },
  {
    title: "Prefill speed",
    of: "requests",
    unit: count,
    steps: WHOLE_STEPS,
    series: [{ label: "tokens a second", colour: "read", points: true }],
    data: (rows) => [rows.map((row) => row.speed)],
    says: ([speed]) => {
      const middle = median(speed);
      return middle === null ? "no prompt read yet" : `median ${count(middle)} tok/s`;
    },
  },
  {
    title: "Decode speed",
    of: "requests",
    unit: speed,
    steps: WHOLE_STEPS,
    series: [{ label: "tokens a second", colour: "slot", points: true }],
    data: (rows) => [rows.map((row) => row.decode_speed ?? null)],
    says: ([decoded]) => {
      const middle = median(decoded);
      return middle === null ? "no long answer yet" : `median ${speed(middle)} tok/s`;
    },
  },
  {
    title: "Cached and prefilled tokens",
    of: "requests",
    unit: count,
    steps: WHOLE_STEPS,
    // A bar of the whole prompt is drawn behind the bar of its cached part, so both look stacked.
    series: [
      { label: "prefilled", colour: "read", bars: true, value: (plot, at) => plot.data[1][at] - cachedAt(plot, at) },
      { label: "slot", colour: "slot", bars: true },
      { label: "RAM", colour: "ram", bars: true },
      { label: "SSD", colour: "ssd", bars: true },
    ],
    data: (rows) => [
      rows.map((row) => row.cached + row.prefilled),
      ...SOURCES.map((source) => rows.map((row) => (row.source === source ? row.cached : null))),
    ],
    says: (_, rows) => `last ${count(last(rows).cached)} + ${count(last(rows).prefilled)}`,
  },
  {
    title: "Memory of kept KV and live slots",
    of: "samples",
    unit: bytes,
    series: [
      { label: "budget", colour: "soft", dash: [6, 4] },
      { label: "kept", colour: "ram", fill: true },
      { label: "live slots", colour: "slot" },
    ],
    steps: BYTE_STEPS,
    data: (samples) => ["budget", "used", "live"].map((name) => samples.map((each) => each[name])),
    says: ([budget, used, live]) => `${bytes(last(used))} of ${bytes(last(budget))} kept, ${bytes(last(live))} live`,
  },
  {
    title: "Time in the image encoder",
    of: "requests",
    needs: (rows) => rows.some((row) => row.images),
    unit: seconds,
    tick: secondsTick,
    series: [{ label: "encoder", colour: "ssd", bars: true }],
    data: (rows) => [rows.map((row) => (row.images ? row.image_ms / 1000 : null))],
    says: ([taken]) => {
      const told = taken.filter((each) => each !== null);
      return `last ${seconds(last(told))}, median ${seconds(median(told))}`;
    },
  },
];

class Chart {
  constructor(form) {
    this.form = form;
    this.text = element("span");
    this.plot = element("div", { className: "plot" });
    this.plot.setAttribute("role", "img");
    const caption = element("figcaption", {}, element("b", {}, form.title), this.text);
    this.figure = element("figure", { hidden: Boolean(form.needs) }, caption, this.plot);
    this.figure.setAttribute("aria-label", form.title);
    this.columns = null;
    this.drawn = null;
  }

  show(rows, xs) {
    if (this.form.needs) this.figure.hidden = !this.form.needs(rows);
    const columns = this.form.data(rows);
    const said = rows.length ? this.form.says(columns, rows) : "nothing yet";
    this.columns = [xs, ...columns];
    this.text.textContent = said;
    this.figure.dataset.last = JSON.stringify(columns.map(last));
    this.plot.setAttribute("aria-label", `${this.form.title}: ${said}`);
    if (this.drawn) this.drawn.setData(this.columns);
    else this.draw();
  }

  draw() {
    if (this.figure.hidden || !this.columns || !this.plot.clientWidth) return;
    this.drawn?.destroy();
    this.drawn = new uPlot(this.options(), this.columns, this.plot);
    this.drawn.root.ariaHidden = "true"; // screen readers read the figure's name and the table
  }

  resize() {
    if (!this.drawn) this.draw();
    else if (this.drawn.width !== this.plot.clientWidth) {
      this.drawn.setSize({ width: this.plot.clientWidth, height: HEIGHT });
    }
  }

  options() {
    const { unit, tick = unit, of, series, steps } = this.form;
    const axis = { stroke: colour("soft"), grid: { stroke: colour("grid"), width: 1 }, ticks: { show: false } };
    const isTime = of === "samples";
    return {
      width: this.plot.clientWidth,
      height: HEIGHT,
      padding: [8, isTime ? 28 : 8, 0, 0], // half of a time's label reaches beyond the last sample
      cursor: { y: false, drag: { x: false, y: false } },
      scales: {
        x: { time: isTime, range: isTime ? undefined : (_, low, high) => [low - 0.6, high + 0.6] },
        y: { range: (_, low, high) => [0, high > 0 ? high * 1.08 : 1] },
      },
      axes: [
        isTime
          ? { ...axis, size: 26, space: 80, values: (_, ticks) => ticks.map(clock) }
          : { ...axis, size: 26, space: 40, incrs: [1, 2, 5, 10, 20, 50] },
        { ...axis, size: 62, space: 24, incrs: steps, values: (_, ticks) => ticks.map(tick) },
      ],
      series: [
        { label: isTime ? "at" : "request", value: (_, x) => (x === null ? NONE : isTime ? clock(x) : count(x)) },
        ...series.map((each) => seriesOptions(each, unit)),
      ],
    };
  }
}

function seriesOptions(each, unit) {
  const ink = colour(each.colour);
  const value = each.value
    ? (plot, _, column, at) => (at === null || at === undefined ? NONE : unit(each.value(plot, at)))
    : (_, y) => (y === null || y === undefined ? NONE : unit(y));
  const base = { label: each.label, stroke: ink, width: 1.5, dash: each.dash, value, points: { show: false } };
  if (each.bars) return { ...base, width: 0, fill: ink, paths: uPlot.paths.bars({ size: [0.8, 18] }) };
  if (each.points) return { ...base, spanGaps: true, points: { show: true, size: 6, fill: ink } };
  return each.fill ? { ...base, fill: `${ink}33` } : base;
}

export class Charts {
  constructor(place) {
    this.samples = [];
    this.charts = CHARTS.map((form) => new Chart(form));
    place.append(...this.charts.map((chart) => chart.figure));
    const sizes = new ResizeObserver(() => this.charts.forEach((chart) => chart.resize()));
    sizes.observe(place);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () =>
      this.charts.forEach((chart) => chart.draw()));
  }

  requests(rows) {
    const shown = rows.slice(-SHOWN_MAX);
    this.of("requests", shown, shown.map((row) => row.number));
  }

  // Adds a sample of what the workers hold now, summed over all workers.
  sample(workers) {
    const caches = workers.map((worker) => worker.cache).filter(Boolean);
    if (!caches.length) return;
    const sum = (read) => caches.reduce((total, cache) => total + (read(cache) ?? 0), 0);
    this.samples.push({
      at: Date.now() / 1000,
      used: sum((cache) => cache.bytes),
      budget: sum((cache) => cache.budget_bytes),
      live: sum((cache) => cache.slots_bytes),
    });
    this.samples.splice(0, this.samples.length - SAMPLES_MAX);
    this.of("samples", this.samples, this.samples.map((each) => each.at));
  }

  of(kind, rows, xs) {
    for (const chart of this.charts) if (chart.form.of === kind) chart.show(rows, xs);
  }
}
