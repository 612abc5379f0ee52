// The page's one connection, and everything that is plain text: sums, tables, workers.

import { Charts } from "./charts.js";
import { bytes, count, element, NONE, percent, seconds, tableBody, whenChanged } from "./format.js";
import { lossText, Sessions } from "./sessions.js";

const REQUESTS_MAX = 200; // as many as the server tells
const FULL = 0.8; // of the budget, or of the memory limit
const NOW_MAX = 8; // rows of what runs and who waits

const byId = (id) => document.getElementById(id);
const charts = new Charts(byId("charts"));
const sessions = new Sessions(byId("trees"), byId("tip"));
const fillRequests = tableBody("request-rows", [1, 5, 8, 9]);
const fillEntries = tableBody("entry-rows", []);
let requests = [];

function put(id, value, text) {
  byId(id).textContent = text;
  byId(id).dataset.value = value ?? "";
}

function showTotals(totals) {
  put("hit", totals.hit_rate, percent(totals.hit_rate));
  put("saved", totals.cached_tokens, count(totals.cached_tokens));
  byId("saved-note").textContent = `not read twice; ${count(totals.prefilled_tokens)} prefilled`;
  put("seconds", totals.saved_s, seconds(totals.saved_s));
  byId("seconds-note").textContent = totals.speed
    ? `at ${count(totals.speed)} tokens/s, as measured here`
    : "once a prompt was read";
  put("count", totals.requests, count(totals.requests));
  byId("count-note").textContent = `${count(totals.completion_tokens)} tokens written`;
}

function showRequests(rows) {
  requests = rows.slice(-REQUESTS_MAX);
  charts.requests(requests);
  fillRequests(
    requests.toReversed().map((row) => [
      count(row.number),
      row.session,
      count(row.prompt),
      count(row.cached),
      count(row.prefilled),
      row.source,
      row.ttft_ms === null ? NONE : seconds(row.ttft_ms / 1000),
      count(row.speed),
      row.ended,
      row.divergence ? lossText(row.divergence) : "",
    ]),
  );
}

// What runs and who waits: the part of the page for those who wait now.
const showNow = whenChanged(({ workers, prefills, queue }) => {
  const sum = (name) => workers.reduce((total, worker) => total + (worker[name] ?? 0), 0);
  const [running, waiting] = [sum("running"), sum("waiting")];
  byId("now").textContent = running + waiting
    ? `${count(running)} running, ${count(waiting)} waiting for a slot.`
    : "Nothing runs, nobody waits.";
  const rows = [...prefills.map(prefillItem), ...queue.map(queueItem)];
  const more = rows.length - NOW_MAX;
  if (more > 0) rows.splice(NOW_MAX, more, element("li", {}, `and ${count(more)} more`));
  byId("now-rows").hidden = !rows.length;
  byId("now-rows").replaceChildren(...rows);
});

function requestText(row) {
  return `request ${row.request_id.slice(0, 12)} on worker ${row.worker}, asked ${seconds(row.age_s)} ago`;
}

function prefillItem(row) {
  const { done_tokens: done, prompt_tokens: prompt } = row;
  const text = `Reading its prompt: ${count(done)} of ${count(prompt)} tokens, ${count(row.cached_tokens)} cached · ${requestText(row)}`;
  const progress = element("progress", { max: Math.max(1, prompt), value: done });
  progress.setAttribute("aria-label", `Prompt of request ${row.request_id.slice(0, 12)}, tokens read`);
  return element("li", {}, progress, element("span", {}, text));
}

function queueItem(row) {
  return element("li", {}, element("span", {}, `Waits for a slot, place ${count(row.position)} · ${requestText(row)}`));
}

function workerCard(worker) {
  const { cache } = worker;
  const state = element("span", { className: `state ${stateClass(worker.state)}` }, worker.state);
  const rows = [
    ["Model", worker.model ?? NONE],
    ["Running, waiting", `${count(worker.running)}, ${count(worker.waiting)}`],
    ["Memory of the model runtime", ofLimit(worker.active_bytes, cache?.memory_limit_bytes)],
    ["Restarts", count(worker.restarts)],
  ];
  const card = element("article", {}, element("h3", {}, `Worker ${worker.id}`, state));
  if (cache?.budget_bytes) {
    rows.push(
      ["Cache", `${bytes(cache.bytes)} of ${bytes(cache.budget_bytes)}`],
      ["Live slots", `${count(cache.busy_slots)} busy of ${count(cache.slots_max)}, ${bytes(cache.slots_bytes)}`],
      ["Pieces, snapshots", `${count(cache.extents)}, ${count(cache.snapshots)}`],
    );
  }
  const terms = rows.flatMap(([term, text]) => [element("dt", {}, term), element("dd", {}, text)]);
  card.append(element("dl", {}, ...terms));
  if (cache?.budget_bytes) card.append(...budgetMeter(worker.id, cache));
  if (cache && worker.active_bytes > FULL * cache.memory_limit_bytes) {
    const text = "Memory is over 80 % of its limit: prompts wait for room, or are refused (MEMORY_LIMIT_MB).";
    card.append(element("p", { className: "warning" }, text));
  }
  if (worker.problem) card.append(element("p", { className: "warning" }, worker.problem));
  return card;
}

function ofLimit(value, limit) {
  return limit ? `${bytes(value)} of ${bytes(limit)}` : bytes(value);
}

function stateClass(state) {
  if (state === "ready") return "ready";
  return ["dead", "restarting", "unreachable"].includes(state) ? "bad" : "";
}

function budgetMeter(id, cache) {
  const share = cache.bytes / cache.budget_bytes;
  const meter = element("meter", { min: 0, max: 1, high: FULL, optimum: 0, value: share });
  meter.setAttribute("aria-label", `Cache of worker ${id}, share of its budget`);
  const text = `${percent(share)} of the budget is in use. A cache fills up; then what is worth least makes way (CACHE_RAM_BUDGET_MB).`;
  return share > FULL ? [meter, element("p", { className: "warning" }, text)] : [meter];
}

const showWorkers = whenChanged((workers) => byId("workers").replaceChildren(...workers.map(workerCard)));
const sayStatus = whenChanged(([text, isBad, again]) => {
  byId("status").replaceChildren(text, ...(again ? [" ", element("a", { href: "/dashboard" }, again)] : []));
  byId("status").className = isBad ? "bad" : "";
});

function showRest(sessionCount) {
  const rest = sessionCount - sessions.count;
  byId("trees-note").hidden = rest <= 0 || !sessions.count;
  byId("trees-note").textContent = `and ${count(rest)} sessions used before these (GET /v1/sessions lists them)`;
}

function showState({ workers, entries, held, prefills = [], queue = [], sessions: sessionCount = 0 }) {
  showNow({ workers: workers.map(({ running, waiting }) => ({ running, waiting })), prefills, queue });
  showRest(sessionCount);
  charts.sample(workers);
  showWorkers(workers.map((worker) => ({ ...worker, heartbeat_age_s: null, steps: null, wait_s: null })));
  const ready = workers.filter((worker) => worker.state === "ready").length;
  const models = [...new Set(workers.map((worker) => worker.model).filter(Boolean))].join(", ");
  sayStatus([`Live · ${models} · ${ready} of ${workers.length} workers ready`, false]);
  byId("entries-scroll").hidden = !entries.length;
  byId("entries-note").textContent = entries.length
    ? `${count(entries.length)} of ${count(held ?? entries.length)}, the last used first.`
    : "None.";
  fillEntries(
    entries.map((entry) => [
      count(entry.worker),
      count(entry.line),
      count(entry.tokens),
      count(entry.own_tokens),
      bytes(entry.bytes),
      count(entry.hits),
      count(entry.turns),
      seconds(Math.round(entry.idle_s ?? 0)),
    ]),
  );
}

function connect() {
  const stream = new EventSource("/dashboard/events");
  const on = (kind, take) => stream.addEventListener(kind, (event) => take(JSON.parse(event.data)));
  on("snapshot", (told) => {
    showTotals(told.totals);
    showRequests(told.requests);
    sessions.show(told.sessions);
    showState(told.state);
  });
  on("requests", (told) => {
    showTotals(told.totals);
    showRequests([...requests, ...told.requests]);
  });
  on("state", (told) => showState(told.state));
  on("sessions", (told) => sessions.show(told.sessions, told.order));
  stream.addEventListener("error", () => {
    const isOver = stream.readyState === EventSource.CLOSED;
    const text = isOver
      ? "The stream has ended: your sign-in is over, or too many pages are open."
      : "The connection is lost; trying again …";
    sayStatus([text, true, isOver ? "Load this page again" : ""]);
  });
}

connect();
