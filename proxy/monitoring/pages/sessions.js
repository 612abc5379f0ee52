// Sessions as trees of lines, each turn a bar that can be reached and read without colour.

import { count, element, seconds } from "./format.js";

const BAR_PX = 50;
const LOSSES_MAX = 3; // told in words under a line
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
    `first token after ${seconds(turn.ttft_ms / 1000)}`,
  ];
  if (turn.match && turn.match !== "none") parts.push(`match: ${turn.match === "lcp" ? "common prefix" : turn.match}`);
  if (turn.divergence) parts.push(`Lost ${lossText(turn.divergence)}`, turn.divergence.remedy ?? "");
  return parts.filter(Boolean).join("\n");
}

// The one tooltip of the page. Escape hides it; the bars' names say all that it says.
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

function turnButton(turn, promptMax, tip) {
  const whole = Math.max(6, (BAR_PX * turn.prompt) / promptMax);
  const read = turn.prompt ? (whole * turn.prefilled) / turn.prompt : 0;
  const parts = [element("span", { className: "mark" }, turn.divergence ? "▲" : "")];
  if (turn.prefilled) parts.push(bar("read", Math.max(2, read)));
  if (turn.cached) parts.push(bar(turn.source, Math.max(2, whole - read)));
  const text = turnText(turn);
  const button = element("button", { type: "button", tabIndex: -1 }, ...parts);
  button.setAttribute("aria-label", text.replaceAll("\n", ". "));
  button.dataset.key = turn.request_id;
  for (const name of ["focus", "mouseenter", "click"]) button.addEventListener(name, () => tip.show(button, text));
  for (const name of ["blur", "mouseleave"]) button.addEventListener(name, () => tip.hide());
  return button;
}

// One stop of the Tab key for each line; arrows, Home and End go along its turns.
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

function lineItem(line, children, promptMax, tip) {
  const name = `Line ${line.line}${line.isElsewhere ? ` of worker ${line.worker}` : ""}`;
  const agent = line.agent ? `, agent ${line.agent}` : "";
  const parent = line.parent !== null ? ` of line ${line.parent} at message ${line.branch_message + 1}` : "";
  const head = `${name} · ${line.kind}${parent}${agent} · ${count(line.turns)} ${line.turns === 1 ? "turn" : "turns"} · ${count(line.tokens)} tokens`;
  const turns = element("ul", { className: "turns" });
  turns.setAttribute("aria-label", `${name}, turns; arrow keys go along them`);
  turns.append(...line.requests.map((turn) => element("li", {}, turnButton(turn, promptMax, tip))));
  rove(turns);
  const item = element("li", {}, element("p", { className: "line-head" }, head), turns);
  const losses = line.requests.filter((turn) => turn.divergence).slice(-LOSSES_MAX);
  if (losses.length) item.append(element("ul", { className: "losses" }, ...losses.map(lossItem)));
  if (children.length) item.append(element("ul", { className: "lines" }, ...children));
  return item;
}

function lossItem(turn) {
  const remedy = turn.divergence.remedy ? `. ${turn.divergence.remedy}` : "";
  return element("li", {}, element("b", {}, `Turn ${turn.turn}`), ` lost ${lossText(turn.divergence)}${remedy}`);
}

// A worker that starts reads what others wrote down: lines all of whose turns another one tells
// are left out. Where several workers are left, each line says which one has it.
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

function tree(session, tip) {
  const id = (line, number) => `${line.worker}/${number}`;
  const lines = distinct(session.lines);
  const known = new Set(lines.map((line) => id(line, line.line)));
  const under = new Map();
  for (const line of lines.toSorted((a, b) => a.worker - b.worker || a.line - b.line)) {
    const parent = line.parent !== null && known.has(id(line, line.parent)) ? id(line, line.parent) : "";
    under.set(parent, [...(under.get(parent) ?? []), line]);
  }
  const promptMax = Math.max(1, ...lines.flatMap((line) => line.requests.map((turn) => turn.prompt)));
  const items = (parent) => (under.get(parent) ?? []).map((line) =>
    lineItem(line, items(id(line, line.line)), promptMax, tip));
  const title = element("h3", { dir: "auto" }, session.session);
  const body = lines.length
    ? element("ul", { className: "lines" }, ...items(""))
    : element("p", { className: "line-head" }, "Its first turn has not ended yet.");
  return element("article", { className: "tree" }, title, body);
}

export class Sessions {
  constructor(place, tip) {
    this.place = place;
    this.tip = new Tip(tip);
    this.drawn = new Map(); // session -> [what was told, its element]
    this.empty = place.firstElementChild;
  }

  get count() {
    return this.drawn.size;
  }

  // Takes the sessions that changed, and shows those of `order`. Draws anew only what differs, and
  // leaves the focus where it was.
  show(changed, order = changed.map((each) => each.session)) {
    const focused = this.place.contains(document.activeElement) ? document.activeElement.dataset.key : null;
    for (const session of changed) {
      const told = JSON.stringify(session);
      if (this.drawn.get(session.session)?.[0] !== told)
        this.drawn.set(session.session, [told, tree(session, this.tip)]);
    }
    const drawn = new Map(order.map((name) => [name, this.drawn.get(name)]));
    this.drawn = drawn;
    const articles = [...drawn.values()].map(([, article]) => article);
    this.place.replaceChildren(...(articles.length ? articles : [this.empty]));
    const again = [...this.place.querySelectorAll("button")].find((each) => each.dataset.key === focused);
    if (focused && again) again.focus();
    else this.tip.hide();
  }
}
