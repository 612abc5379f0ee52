// Shows the list of conversations, with search, rename, delete with undo, and arrow keys.

import { element } from "/dashboard/format.js";

import { icon } from "./icons.js";
import { plainName } from "./plain_text.js";
import * as store from "./store.js";

const SHOWN_MAX = 200; // conversations in the list; a search finds all
const byId = (id) => document.getElementById(id);

export class Sidebar {
  // `actions`: open(id), renamed(id, title), remove(id).
  constructor(actions) {
    this.actions = actions;
    this.current = null;
    this.list = byId("conversations");
    byId("search").addEventListener("input", () => this.refresh());
    byId("search").addEventListener("keydown", (event) => {
      if (event.key === "ArrowDown") this.#focus(0, event);
    });
    this.list.addEventListener("keydown", (event) => this.#key(event));
  }

  select(id) {
    this.current = id;
    for (const row of this.list.children) this.#mark(row);
  }

  #mark(row) {
    const open = row.querySelector(".open");
    if (row.dataset.id === this.current) open?.setAttribute("aria-current", "page");
    else open?.removeAttribute("aria-current");
  }

  async refresh() {
    const words = byId("search").value.trim().toLowerCase().split(/\s+/).filter(Boolean);
    const heads = await store.heads();
    if (this.list.querySelector("input")) return; // the user is renaming a conversation
    const found = heads.filter((head) => words.every((word) => head.words.includes(word)));
    this.#draw(found.slice(0, SHOWN_MAX));
    byId("no-conversations").hidden = found.length > 0;
    byId("no-conversations").textContent = words.length ? "Nothing found." : "Conversations stay in this browser.";
  }

  // Keeps unchanged rows, which may be amid a click, and the focus.
  #draw(heads) {
    const drawn = JSON.stringify(heads.map(({ id, title }) => [id, title]));
    if (drawn === this.drawn && this.list.childElementCount === heads.length) return;
    this.drawn = drawn;
    const held = document.activeElement;
    const row = held?.closest?.("#conversations li");
    const at = [...this.list.children].indexOf(row);
    this.list.replaceChildren(...heads.map((head) => this.#row(head)));
    if (!row) return;
    const same = this.list.querySelector(`[data-id="${CSS.escape(row.dataset.id)}"]`);
    if (same) same.getElementsByClassName(held.className)[0]?.focus();
    else this.#focus(Math.min(at, heads.length - 1));
  }

  #row({ id, title }) {
    const name = plainName(title) || "New chat";
    const open = element("button", { type: "button", className: "open", title: name }, element("span", { dir: "auto" }, name));
    open.addEventListener("click", () => this.actions.open(id));
    const rename = this.#button("edit", "rename", `Rename ${name}`, () => this.#rename(id, name));
    const remove = this.#button("trash", "delete", `Delete ${name}`, () => this.actions.remove(id));
    const row = element("li", {}, open, rename, remove);
    row.dataset.id = id;
    this.#mark(row);
    return row;
  }

  #button(drawing, className, label, action) {
    const button = element("button", { type: "button", className: `small ${className}` }, icon(drawing));
    button.setAttribute("aria-label", label);
    button.title = label.split(" ")[0];
    button.addEventListener("click", action);
    return button;
  }

  #rename(id, name) {
    const row = this.list.querySelector(`[data-id="${CSS.escape(id)}"]`);
    const input = element("input", { type: "text", value: name, maxLength: 200, className: "rename-text" });
    input.setAttribute("aria-label", "Name of the conversation");
    let isDone = false;
    const end = async (isKept) => {
      if (isDone) return;
      isDone = true;
      const title = plainName(input.value);
      input.remove();
      if (isKept && title) await this.actions.renamed(id, title);
      await this.refresh();
      this.list.querySelector(`[data-id="${CSS.escape(id)}"] .open`)?.focus();
    };
    input.addEventListener("keydown", (event) => {
      event.stopPropagation();
      if (event.key === "Enter") end(true);
      if (event.key === "Escape") end(false);
    });
    input.addEventListener("blur", () => end(true));
    this.drawn = ""; // forces a redraw
    row.replaceChildren(input);
    input.select();
  }

  #key(event) {
    const rows = [...this.list.querySelectorAll(".open")];
    const at = rows.indexOf(document.activeElement);
    if (at < 0) return;
    const id = rows[at].parentElement.dataset.id;
    const steps = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: rows.length - 1 };
    if (event.key in steps) this.#focus(steps[event.key], event);
    else if (event.key === "F2") this.#rename(id, rows[at].textContent);
    else if (event.key === "Delete") this.actions.remove(id);
  }

  #focus(index, event = null) {
    event?.preventDefault();
    if (index < 0) byId("search").focus();
    else this.list.querySelectorAll(".open")[index]?.focus();
  }
}
