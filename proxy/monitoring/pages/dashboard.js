// Holds the page's only connection, and shows all that is plain text: sums, tables, workers.

import { Charts } from "./charts.js";
import { ago, bytes, clock, count, counted, element, NONE, percent, ratio, seconds, speed, tableBody, whenChanged } from "./format.js";
import { lossText, Sessions } from "./sessions.js";

const REQUESTS_MAX = 200; // as many as the server remembers
const FULL = 0.8; // share of the budget or of the memory limit
const NOW_MAX = 8; // rows of running and waiting requests
const LOSSES_MAX = 3; // last losses, which are told in words
const CAUSES_MAX = 3; // largest causes of losses
const EVICTIONS_MAX = 12; // entries evicted last

// How a prompt relates to the kept KV, the best match first.
const MATCHES = {
  exact: ["Exact", "the whole prompt was read before"],
  prefix: ["Prefix", "goes on behind what was kept"],
  supersequence: ["Supersequence", "the beginning of something kept"],
  lcp: ["Common prefix", "begins alike, then differs"],
  miss: ["Miss", "nothing of it was kept"],
  none: ["None", "it ended before it had a slot"],
};
const PARTS = {
  extent: ["piece", "pieces"],
  snapshot: ["snapshot", "snapshots"],
  window: ["window", "windows"],
  copy: ["copy of live KV", "copies of live KV"],
};

const byId = (id) => document.getElementById(id);
const charts = new Charts(byId("charts"));
const sessions = new Sessions(byId("trees"), byId("tip"));
const fillRequests = tableBody("request-rows", [1, 5, 6, 11, 12, 13]);
const fillEntries = tableBody("entry-rows", [2]);
let requests = [];

function put(id, value, text) {
  byId(id).textContent = text;
  byId(id).dataset.value = value ?? "";
}

let lastTotals = {}; // the latest sums

function showTotals(totals) {
  lastTotals = totals;
  showDecode([]);
  put("hit", totals.hit_rate, percent(totals.hit_rate));
  byId("hit-note").textContent = `of ${count(totals.prompt_tokens)} prompt tokens were cached`;
  put("match", totals.match_share, percent(totals.match_share));
  byId("match-note").textContent = `of each prompt was cached; ${count(totals.match_tokens)} tokens`;
  put("saved", totals.cached_tokens, count(totals.cached_tokens));
  byId("saved-note").textContent = `${count(totals.prefilled_tokens)} were read`;
  put("seconds", totals.saved_s, totals.saved_s ? seconds(totals.saved_s) : "");
  byId("seconds-note").textContent = totals.speed ? `at ${count(totals.speed)} tokens/s` : "";
  put("lost", totals.lost_tokens, count(totals.lost_tokens));
  byId("lost-note").textContent = lostText(Object.entries(totals.lost_by_cause ?? {}));
  put("forwards", totals.forwards_per_token, ratio(totals.forwards_per_token));
  byId("drafts-note").textContent = acceptedText(totals.accepted_prediction_tokens, totals.rejected_prediction_tokens);
  put("count", totals.requests, count(totals.requests));
  byId("count-note").textContent = `${count(totals.completion_tokens)} tokens written here`;
  showClouds(totals.cloud ?? {});
  put("left", totals.disconnects, `${counted(totals.disconnects, "client", "clients")} left early`);
  showMatches(totals.matches ?? {});
}

function lostText(causes) {
  if (!causes.length) return "nothing was read again";
  const rest = causes.length > CAUSES_MAX ? " and others" : "";
  return `to: ${causes.slice(0, CAUSES_MAX).map(([cause, tokens]) => `${cause} ${count(tokens)}`).join(", ")}${rest}`;
}

// Shows the speed of the answers being written, or else the median of past answers.
function showDecode(answers) {
  const paced = answers.filter((row) => row.tokens_per_s !== null);
  const now = paced.reduce((total, row) => total + row.tokens_per_s, 0);
  const value = paced.length ? now : lastTotals.decode_speed;
  put("decode", value, value ? `${speed(value)} tok/s` : NONE);
  const middle = lastTotals.decode_speed ? `median ${speed(lastTotals.decode_speed)} of an answer` : "";
  const running = paced.length ? `now, of ${counted(paced.length, "answer", "answers")}` : "";
  byId("decode-note").textContent = [running, middle].filter(Boolean).join("; ") || "no answer of 16 tokens yet";
}

const showLosses = whenChanged((rows) => {
  byId("losses").hidden = !rows.length;
  byId("loss-rows").replaceChildren(...rows.map(([at, name, loss]) =>
    element("li", {}, `${clock(at)} · `, element("b", { dir: "auto" }, name), ` lost ${lossText(loss)}. ${loss.remedy ?? ""}`)));
});

function tellLosses() {
  const lossy = requests.filter((row) => row.divergence).slice(-LOSSES_MAX).toReversed();
  showLosses(lossy.map((row) => [row.at ?? 0, sessions.name(row.session), row.divergence]));
}

// Shows the requests that other servers answered, which no other figure counts.
function showClouds({ requests: number = 0, prompt_tokens: prompt, completion_tokens: written, cost }) {
  byId("cloud").hidden = !number;
  const dollars = cost ? `, $${cost.toFixed(cost < 1 ? 4 : 2)}` : "";
  byId("cloud").textContent = `${count(number)} answered elsewhere: ${count(prompt)} tokens read, ${count(written)} written${dollars}`;
}

const showMatches = whenChanged((matches) => {
  const all = Object.values(matches).reduce((sum, each) => sum + each, 0);
  const found = ["exact", "prefix", "supersequence", "lcp"].reduce((sum, name) => sum + (matches[name] ?? 0), 0);
  byId("matches-note").textContent = all ? `${count(found)} of ${count(all)} prompts found something` : "nothing yet";
  byId("matches").replaceChildren(
    ...Object.entries(MATCHES)
      .filter(([name]) => name !== "none" || matches.none)
      .map(([name, [title, words]]) => matchRow(name, title, words, matches[name] ?? 0, all)),
  );
});

function matchRow(name, title, words, number, all) {
  const fill = element("span", { className: name === "miss" || name === "none" ? "fill missed" : "fill" });
  fill.style.width = `${all ? (100 * number) / all : 0}%`;
  const told = element("dd", { className: "number" }, count(number));
  told.dataset.match = name;
  told.dataset.value = number;
  const share = element("dd", { className: "share", ariaHidden: "true" }, fill);
  return element("div", {}, element("dt", {}, element("b", {}, title), ` ${words}`), share, told);
}

function showRequests(rows) {
  requests = rows.slice(-REQUESTS_MAX);
  charts.requests(requests.filter((row) => !row.cloud));
  byId("request-table").classList.toggle("sees", requests.some((row) => row.images));
  byId("request-table").classList.toggle("many", new Set(requests.map(servedText)).size > 1);
  tellLosses();
  fillRequests(
    requests.toReversed().map((row) => [
      count(row.number),
      sessions.name(row.session),
      count(row.prompt),
      count(row.cached),
      row.cloud ? NONE : count(row.prefilled),
      row.cloud ? "" : row.source,
      row.cloud ? "" : MATCHES[row.match]?.[0] ?? "",
      milliseconds(row.image_ms),
      milliseconds(row.ttft_ms),
      count(row.speed),
      speed(row.decode_speed),
      row.ended,
      row.divergence ? lossText(row.divergence) : "",
      servedText(row),
    ]),
  );
}

// Names the server that answered, and the server that failed to answer before, with the reason.
function servedText(row) {
  return row.fallback ? `${row.served_by} (after ${row.fallback})` : row.served_by || NONE;
}

function milliseconds(value) {
  return value === null || value === undefined ? NONE : seconds(value / 1000);
}

// Shows which requests run and which wait.
const showNow = whenChanged(({ workers, prefills, queue, answers }) => {
  const loads = workers.filter((worker) => worker.loading);
  const sum = (name) => workers.reduce((total, worker) => total + (worker[name] ?? 0), 0);
  // Heartbeats are up to a second old, so newer reports of running requests may count more.
  const running = Math.max(sum("running"), answers.length + prefills.length);
  const waiting = sum("waiting");
  byId("now").textContent = running + waiting
    ? `${count(running)} running, ${count(waiting)} waiting for a slot.`
    : "Nothing runs, nobody waits.";
  showDecode(answers);
  if (answers.length) byId("now").append(` ${counted(answers.length, "answer is", "answers are")} written.`);
  byId("now").dataset.answers = answers.length;
  const rows = [...loads.map(loadItem), ...answers.map(answerItem), ...prefills.map(prefillItem), ...queue.map(queueItem)];
  const more = rows.length - NOW_MAX;
  if (more > 0) rows.splice(NOW_MAX, more, element("li", {}, `and ${count(more)} more`));
  byId("now-rows").hidden = !rows.length;
  byId("now-rows").replaceChildren(...rows);
});

// Shows who asked and when, under a name that people know or else the request's id.
function nowItem(row, text, ...before) {
  const name = row.title || (row.session ? sessions.name(row.session) : `Request ${row.request_id.slice(0, 12)}`);
  const who = element("b", { dir: "auto", title: name }, name);
  const client = row.client ? ` · ${row.client}` : "";
  return element("li", {}, who, ...before, element("span", {}, ` ${text}${client} · asked ${ago(row.age_s)}`));
}

function answerItem(row) {
  const pace = row.tokens_per_s === null ? "" : `, ${speed(row.tokens_per_s)} tokens/s`;
  return nowItem(row, `writes its answer: ${counted(row.completion_tokens, "token", "tokens")}${pace}`);
}

function progressBar(done, whole, name) {
  const progress = element("progress", { max: Math.max(1, whole), value: done });
  progress.setAttribute("aria-label", name);
  return progress;
}

function prefillItem(row) {
  const { done_tokens: done, prompt_tokens: prompt } = row;
  const text = `reads its prompt: ${count(done)} of ${count(prompt)} tokens, ${count(row.cached_tokens)} cached`;
  return nowItem(row, text, progressBar(done, prompt, `Prompt of request ${row.request_id.slice(0, 12)}, tokens read`));
}

function queueItem(row) {
  return nowItem(row, `waits for a slot, place ${count(row.position)}`);
}

function loadItem({ id, loading }) {
  const { step, s, held_bytes: held, of_bytes: whole } = loading;
  const text = ` loads: ${step}${whole ? `, ${bytes(held)} of ${bytes(whole)}` : ""}, ${seconds(s)}`;
  const parts = whole ? [progressBar(held, whole, `Load of worker ${id}, bytes`)] : [];
  return element("li", {}, element("b", {}, `Worker ${id}`), ...parts, element("span", {}, text));
}

function runningText(worker) {
  const most = worker.cache?.running_max;
  return most ? `${count(worker.running)} of ${count(most)}` : count(worker.running);
}

function workerCard(worker) {
  const { cache } = worker;
  const state = element("span", { className: `state ${stateClass(worker.state)}` }, worker.state);
  const rows = [
    ["Model", worker.model ?? NONE],
    ["Running, waiting", `${runningText(worker)}, ${count(worker.waiting)}`],
    ["Memory", ofLimit(worker.active_bytes, cache?.memory_limit_bytes)],
    ["Restarts", count(worker.restarts)],
  ];
  const card = element("article", {}, element("h3", {}, `Worker ${worker.id}`, state));
  if (cache?.budget_bytes) {
    rows.push(
      ["Cache", `${bytes(cache.bytes)} of ${bytes(cache.budget_bytes)}`],
      ["Live slots", `${count(cache.busy_slots)} busy, ${count(cache.slots_max)} at most, ${bytes(cache.slots_bytes)}`],
      ["Made way", evictedText(cache.evicted)],
      ["Exact mode", cache.exact ? "on" : "off"],
      ["Read in idle time", idleText(cache.idle)],
      ["Live KV", formatText(cache.quantisation?.live)],
      ["Kept KV", `${formatText(cache.quantisation?.stored)}${ignoredText(cache.quantisation)}`],
    );
  }
  if (cache?.speculation) rows.push(["Drafts", draftsText(cache.speculation)], ["Accepted", sourcesText(cache.speculation)]);
  if (cache?.trunks?.rows) rows.push(["Shared beginnings", trunksText(cache.trunks)]);
  if (cache?.disk) rows.push(["Written to disk today", writtenText(cache.disk)]);
  if (cache?.vision) rows.push(["Images encoded", `${count(cache.vision.encoder_calls)} in ${seconds(cache.vision.encoder_s)}`]);
  const terms = rows.flatMap(([term, text]) => [element("dt", {}, term), element("dd", {}, text)]);
  card.append(element("dl", {}, ...terms));
  if (cache?.budget_bytes) card.append(...budgetMeter(worker.id, cache));
  if (cache && worker.active_bytes > FULL * cache.memory_limit_bytes) {
    const text = "Memory is over 80 % of its limit: prompts wait for room, or are refused (MEMORY_LIMIT_MB).";
    card.append(element("p", { className: "warning" }, text));
  }
  if (cache?.pressure?.severity) {
    const waits = cache.pressure.level === "critical" ? ", and new prompts wait" : "";
    const text = `The system is short of memory (${cache.pressure.level}): kept KV is given back${waits}.`;
    card.append(element("p", { className: "warning" }, text));
  }
  if (worker.problem) card.append(element("p", { className: "warning" }, worker.problem));
  return card;
}

const sum = (numbers) => Object.values(numbers ?? {}).reduce((total, each) => total + each, 0);

function evictedText(evicted) {
  return `${counted(sum(evicted?.count), "part", "parts")}, ${bytes(sum(evicted?.bytes))}`;
}

// Each directory has one budget, so workers with the same directory report the same figures.
function writtenText(disk) {
  const budget = disk.write_bytes_per_day;
  const left = budget ? ` of ${bytes(budget)}, ${bytes(disk.write_bytes_left)} left` : "; no limit";
  return `${bytes(disk.bytes_written_today)}${left}`;
}

function idleText(idle) {
  if (!idle) return NONE;
  const again = idle.again ? `, ${count(idle.again)} of them once more` : "";
  const why = idle.mode === "auto" && !idle.on_mains ? "; on battery, nothing now" : "";
  return `${counted(idle.ahead + idle.again, "token", "tokens")}${again} (${idle.mode}${why})`;
}

function acceptedText(accepted, rejected) {
  const drafted = (accepted ?? 0) + (rejected ?? 0);
  return drafted ? `${count(accepted)} of ${count(drafted)} drafted tokens accepted` : "nothing was drafted";
}

function draftsText({ mode, state, reason, forwards, tokens, speedup_estimate: speedup }) {
  if (state !== "on") return `off (${mode}${reason ? `: ${reason}` : ""})`;
  const rate = forwards && tokens ? `, ${ratio(forwards / tokens)} forwards a token` : "";
  const gain = speedup ? `, about ${ratio(speedup)} times as fast` : "";
  return `on (${mode})${rate}${gain}`;
}

function sourcesText({ by_source: sources }) {
  const told = Object.entries(sources ?? {}).filter(([, { drafted }]) => drafted);
  return told.map(([source, { drafted, accepted }]) => `${source} ${count(accepted)} of ${count(drafted)}`).join(", ") || NONE;
}

function trunksText({ count: trunks, rows, spared_bytes: spared }) {
  return `${count(rows)} answers on ${count(trunks)}, ${bytes(spared)} spared`;
}

function formatText(form) {
  if (!form) return "as it was computed";
  const groups = form.group_size ? `, groups of ${form.group_size}` : "";
  return `${form.bits} bits (${form.scheme}${groups}) from ${count(form.from_tokens)} tokens on`;
}

function ignoredText(quantisation) {
  return Object.entries(quantisation?.ignored ?? {}).map(([name, why]) => `; ${name} is ignored: ${why}`).join("");
}

function evictionItem(row) {
  const parts = Object.entries(row.parts).map(([kind, number]) => counted(number, ...(PARTS[kind] ?? [kind, kind])));
  const lost = row.tokens ? `, ${count(row.tokens)} tokens` : "";
  const text = `${clock(row.at)} · entry ${count(row.line)} of worker ${row.worker} gave up ${bytes(row.bytes)}: ${parts.join(", ")}${lost}`;
  return element("li", {}, text);
}

const showEvictions = whenChanged((rows) => {
  byId("evictions").hidden = !rows.length;
  byId("eviction-rows").replaceChildren(...rows.map(evictionItem));
});

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

// Shows how many sessions are left out, and the sessions of each client.
function showRest(clients) {
  const all = Object.values(clients).reduce((total, each) => total + each, 0);
  const rest = all - sessions.count;
  byId("trees-note").hidden = rest <= 0 || !sessions.count;
  const named = Object.entries(clients).map(([client, number]) => `${count(number)} of ${client || "unnamed clients"}`);
  byId("trees-note").textContent = `and ${counted(rest, "session", "sessions")} used before these (hearth why lists them). All ${count(all)}: ${named.join(", ")}.`;
}

function showMemory(workers) {
  const sum = (read) => workers.reduce((total, worker) => total + (read(worker) ?? 0), 0);
  const limit = sum((worker) => worker.cache?.memory_limit_bytes);
  const used = sum((worker) => worker.active_bytes);
  const budget = sum((worker) => worker.cache?.budget_bytes);
  put("memory", used, bytes(used));
  const kept = budget ? `; kept KV ${bytes(sum((worker) => worker.cache?.bytes))} of ${bytes(budget)}` : "";
  byId("memory-note").textContent = `${limit ? `of ${bytes(limit)}` : "in use"}${kept}`;
}

function showState({ workers, entries, held, answers = [], prefills = [], queue = [], sessions: clients = {} }) {
  const loads = workers.map(({ id, running, waiting, loading }) => ({ id, running, waiting, loading }));
  showNow({ workers: loads, prefills, queue, answers });
  showRest(clients);
  sessions.age(new Set([...answers, ...prefills].map((row) => row.session)));
  tellLosses();
  showMemory(workers);
  charts.sample(workers);
  showWorkers(workers.map((worker) => ({ ...worker, heartbeat_age_s: null, steps: null, wait_s: null, loading: null })));
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
      entry.model ?? NONE,
      count(entry.tokens),
      percent(entry.context_share),
      bytes(entry.bytes),
      entry.slot_bytes ? bytes(entry.slot_bytes) : NONE,
      count(entry.images),
      count(entry.hits),
      count(entry.turns),
      seconds(Math.round(entry.age_s ?? 0)),
      seconds(Math.round(entry.idle_s ?? 0)),
    ]),
  );
  const evictions = workers.flatMap((worker) =>
    (worker.cache?.evicted?.last ?? []).map((row) => ({ ...row, worker: worker.id })));
  showEvictions(evictions.toSorted((a, b) => b.at - a.at).slice(0, EVICTIONS_MAX));
}

function connect() {
  const stream = new EventSource("/dashboard/events");
  const on = (kind, take) => stream.addEventListener(kind, (event) => take(JSON.parse(event.data)));
  on("snapshot", (told) => {
    sessions.show(told.sessions);
    showTotals(told.totals);
    showRequests(told.requests);
    showState(told.state);
  });
  on("requests", (told) => {
    showTotals(told.totals);
    showRequests([...requests, ...told.requests]);
  });
  on("state", (told) => showState(told.state));
  on("sessions", (told) => {
    sessions.show(told.sessions, told.order);
    showRequests(requests); // their sessions have names now
  });
  stream.addEventListener("error", () => {
    const isOver = stream.readyState === EventSource.CLOSED;
    const text = isOver
      ? "The stream has ended: your sign-in is over, or too many pages are open."
      : "The connection is lost; trying again …";
    sayStatus([text, true, isOver ? "Load this page again" : ""]);
  });
}

connect();
