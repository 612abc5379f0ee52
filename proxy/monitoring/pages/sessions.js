// Shows sessions as cards, each with a line of words and its turns as bars. An open card shows the
// session's lines. Each turn in a line can be reached by keyboard and read without colour.

import { ago, count, counted, element, seconds, speed } from "./format.js";

const BAR_PX = 30;
const CARD_TURNS_MAX = 10; // bars of a closed card
const OPEN_MAX = 3; // up to so many sessions are all open, until somebody closes one
const LOSSES_MAX = 5; // losses of a session that are told in words
const SOURCES = { slot: "from a live slot", ram: "from RAM", ssd: "from SSD" };

export function lossText(loss) {
  const where = loss.message >= 0 ? ` (message ${loss.message + 1})` : "";
  return `${count(loss.lost)} tokens to: ${loss.cause}${loss.rule ? `, ${loss.rule}` : ""}${where}`;
}

function turnText(turn) {
  const source = SOURCES[turn.source] ? ` ${SOURCES[turn.source]}` : "";
  const parts = [
    `Turn ${turn.turn}: ${count(turn.prompt)} tokens`,
    `${count(turn.cached)} cached${source}, ${count(turn.prefilled)} prefilled`,
    `first token after ${seconds(turn.ttft_ms / 1000)}${paceText(turn)}`,
  ];
  if (turn.match && turn.match !== "none") parts.push(`match: ${turn.match === "lcp" ? "common prefix" : turn.match}`);
  if (turn.divergence) parts.push(`Lost ${lossText(turn.divergence)}`, turn.divergence.remedy ?? "");
  return parts.filter(Boolean).join("\n");
}

function paceText({ completion, finish_ms: finish, ttft_ms: first }) {
  if (!(finish > first) || !(completion > 16)) return "";
  return `, then ${speed((1000 * (completion - 1)) / (finish - first))} tokens/s`;
}

// The page's only tooltip. Escape hides it, and the bars' names have the same text.
class Tip {
  constructor(box) {
    this.box = box;
    addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.hide();
    });
  }

  show(at, text) {
    this.box.textContent = text;
    this.box.hidden = false;
    const place = at.getBoundingClientRect();
    const left = Math.min(place.left, document.documentElement.clientWidth - this.box.offsetWidth - 12);
    const above = place.top - this.box.offsetHeight - 6;
    this.box.style.left = `${Math.max(12, left) + scrollX}px`;
    this.box.style.top = `${(above > 0 ? above : place.bottom + 6) + scrollY}px`;
  }

  hide() {
    this.box.hidden = true;
  }
}

function bar(kind, px) {
  const made = element("span", { className: `bar ${kind}` });
  made.style.height = `${px}px`;
  return made;
}

// A turn's bars: a mark for lost tokens, a bar for prefilled tokens, a bar for cached tokens.
function turnBars(turn, promptMax) {
  const whole = Math.max(4, (BAR_PX * turn.prompt) / promptMax);
  const read = turn.prompt ? (whole * turn.prefilled) / turn.prompt : 0;
  const parts = [element("span", { className: "mark" }, turn.divergence ? "▲" : "")];
  if (turn.prefilled) parts.push(bar("read", Math.max(2, read)));
  if (turn.cached) parts.push(bar(turn.source, Math.max(2, whole - read)));
  return parts;
}

function turnButton(turn, promptMax, tip) {
  const text = turnText(turn);
  const button = element("button", { type: "button", tabIndex: -1 }, ...turnBars(turn, promptMax));
  button.setAttribute("aria-label", text.replaceAll("\n", ". "));
  button.dataset.key = turn.request_id;
  for (const name of ["focus", "mouseenter", "click"]) button.addEventListener(name, () => tip.show(button, text));
  for (const name of ["blur", "mouseleave"]) button.addEventListener(name, () => tip.hide());
  return button;
}

// Makes each line one stop of the Tab key. Arrows, Home and End go along the turns of the line.
function rove(list) {
  const buttons = [...list.querySelectorAll("button")];
  const last = buttons.length - 1;
  if (last >= 0) buttons[last].tabIndex = 0;
  const go = { ArrowLeft: (at) => at - 1, ArrowRight: (at) => at + 1, Home: () => 0, End: () => last };
  list.addEventListener("keydown", (event) => {
    const at = buttons.indexOf(document.activeElement);
    if (!(event.key in go) || at < 0) return;
    event.preventDefault();
    const next = buttons[Math.min(last, Math.max(0, go[event.key](at)))];
    buttons.forEach((button) => (button.tabIndex = button === next ? 0 : -1));
    next.focus();
  });
}

function lineItem(line, session, promptMax, tip) {
  const name = `Line ${line.line}${line.isElsewhere ? ` of worker ${line.worker}` : ""}`;
  const agent = line.agent ? `, agent ${line.agent}` : "";
  const parent = line.parent !== null ? ` of line ${line.parent} at message ${line.branch_message + 1}` : "";
  const head = `${name} · ${line.kind}${parent}${agent} · ${counted(line.turns, "turn", "turns")} · ${count(line.tokens)} tokens`;
  const turns = element("ul", { className: "turns" });
  turns.setAttribute("aria-label", `${name}, turns; arrow keys go along them`);
  turns.append(...line.requests.map((turn) => element("li", {}, turnButton(turn, promptMax, tip))));
  rove(turns);
  const words = element("div", { className: "words" });
  if (line.title && line.title !== session.title) words.append(element("p", { className: "line-title", dir: "auto", title: line.title }, line.title));
  words.append(element("p", { className: "line-head" }, head));
  return element("li", {}, words, turns);
}

function lossItem([line, turn]) {
  const remedy = turn.divergence.remedy ? `. ${turn.divergence.remedy}` : "";
  return element("li", {}, element("b", {}, `Line ${line.line}, turn ${turn.turn}`), ` lost ${lossText(turn.divergence)}${remedy}`);
}

// Workers may report the same turns, as a starting worker reads the records of others. A line is
// left out if other lines have all of its turns. Lines name their worker if several remain.
function distinct(lines) {
  const told = new Set();
  const kept = lines
    .toSorted((a, b) => b.requests.length - a.requests.length)
    .filter(({ requests }) => {
      const isNew = !requests.length || requests.some((turn) => !told.has(turn.request_id));
      for (const turn of requests) told.add(turn.request_id);
      return isNew;
    });
  const isElsewhere = new Set(kept.map((line) => line.worker)).size > 1;
  return kept.map((line) => ({ ...line, isElsewhere }));
}

// Lines in the order of the tree, each line before its branches.
function inOrder(lines) {
  const id = (line, number) => `${line.worker}/${number}`;
  const known = new Set(lines.map((line) => id(line, line.line)));
  const under = new Map();
  for (const line of lines.toSorted((a, b) => a.worker - b.worker || a.line - b.line)) {
    const parent = line.parent !== null && known.has(id(line, line.parent)) ? id(line, line.parent) : "";
    under.set(parent, [...(under.get(parent) ?? []), line]);
  }
  const walk = (parent) => (under.get(parent) ?? []).flatMap((line) => [line, ...walk(id(line, line.line))]);
  return walk("");
}

function nameOf(session) {
  return session.title || session.session;
}

// The last turns of all lines, sorted by their ends, for the card.
function lastTurns(lines) {
  const turns = lines.flatMap((line) => line.requests);
  return turns.toSorted((a, b) => (a.at < b.at ? -1 : a.at > b.at ? 1 : 0)).slice(-CARD_TURNS_MAX);
}

function cardHead(session, lines, promptMax) {
  const turns = lines.reduce((sum, line) => sum + line.turns, 0);
  const title = element("h3", { dir: "auto", title: nameOf(session) }, nameOf(session));
  const used = element("span", { className: "used" });
  const parts = [
    session.client ?? "",
    session.lost ? element("b", { className: "lost" }, `▲ ${count(session.lost)} lost`) : "",
    used,
    lines.length > 1 ? counted(lines.length, "line", "lines") : "",
    counted(turns, "turn", "turns"),
    session.decode_speed ? `${speed(session.decode_speed)} tok/s` : "",
  ];
  const told = parts.filter(Boolean).flatMap((part) => [" · ", part]).slice(1);
  const about = element("p", { className: "about" }, ...told);
  const bars = element("span", { className: "bars" }, ...lastTurns(lines).map((turn) => element("span", {}, ...turnBars(turn, promptMax))));
  bars.setAttribute("aria-hidden", "true");
  return [element("div", { className: "words" }, title, about), bars, used];
}

function cardBody(session, lines, promptMax, tip) {
  if (!lines.length) return [element("p", { className: "line-head" }, "Its first turn has not ended yet.")];
  const begun = session.begun_at ? ` · begun ${new Date(session.begun_at * 1000).toLocaleString([], { dateStyle: "medium", timeStyle: "short" })}` : "";
  const model = session.model ? ` · model ${session.model}` : "";
  const about = element("p", { className: "line-head ids" }, element("code", {}, session.session), `${model}${begun}`);
  const list = element("ul", { className: "lines" }, ...inOrder(lines).map((line) => lineItem(line, session, promptMax, tip)));
  const losses = lines.flatMap((line) => line.requests.filter((turn) => turn.divergence).map((turn) => [line, turn])).slice(-LOSSES_MAX);
  return losses.length ? [about, list, element("ul", { className: "losses" }, ...losses.map(lossItem))] : [about, list];
}

// A session's card. Lines are drawn when the card is opened, as most cards never are.
function card(session, tip, isOpen) {
  const lines = distinct(session.lines);
  const promptMax = Math.max(1, ...lines.flatMap((line) => line.requests.map((turn) => turn.prompt)));
  const [words, bars, used] = cardHead(session, lines, promptMax);
  const made = element("details", { className: "tree" }, element("summary", {}, words, bars));
  const fill = () => {
    if (made.open && made.childElementCount === 1) made.append(...cardBody(session, lines, promptMax, tip));
  };
  made.addEventListener("toggle", fill);
  made.open = isOpen;
  fill();
  return { made, used, usedAt: session.used_at };
}

export class Sessions {
  constructor(place, tip) {
    this.place = place;
    this.tip = new Tip(tip);
    this.drawn = new Map(); // session -> { told, made, used, usedAt }
    this.empty = place.firstElementChild;
  }

  get count() {
    return this.drawn.size;
  }

  // A session's title, or its id if the title is unknown.
  name(session) {
    const drawn = this.drawn.get(session);
    return drawn ? drawn.made.querySelector("h3").textContent : session;
  }

  // Takes the sessions that changed, and shows the sessions in `order`. Only differences are drawn
  // anew; the focus and the open cards stay.
  show(changed, order = changed.map((each) => each.session)) {
    const focused = this.place.contains(document.activeElement) ? document.activeElement.dataset.key : null;
    for (const session of changed) {
      const told = JSON.stringify(session);
      const before = this.drawn.get(session.session);
      const isOpen = before ? before.made.open : order.length <= OPEN_MAX;
      if (before?.told !== told) this.drawn.set(session.session, { told, ...card(session, this.tip, isOpen) });
    }
    this.drawn = new Map(order.map((name) => [name, this.drawn.get(name)]));
    const cards = [...this.drawn.values()].map(({ made }) => made);
    this.place.replaceChildren(...(cards.length ? cards : [this.empty]));
    const again = [...this.place.querySelectorAll("button")].find((each) => each.dataset.key === focused);
    if (focused && again) again.focus();
    else this.tip.hide();
    this.age(this.running ?? new Set());
  }

  // Shows when each session was last used; `running` are the sessions that are being answered.
  age(running) {
    this.running = running;
    for (const [session, { made, used, usedAt }] of this.drawn) {
      const isRunning = running.has(session);
      made.classList.toggle("runs", isRunning);
      used.textContent = isRunning ? "runs now" : usedAt ? ago(Date.now() / 1000 - usedAt) : "new";
    }
  }
}
