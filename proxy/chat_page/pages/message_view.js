// Shows one message and updates it while the answer comes.

import { count, element } from "/dashboard/format.js";

import { shown } from "./attachments.js";
import { needsResults, ROUNDS_MAX } from "./answering.js";
import { cacheLine, lossLine } from "./cache_line.js";
import { copyText } from "./clipboard.js";
import { branches } from "./conversation.js";
import { icon } from "./icons.js";
import { MarkdownView } from "./markdown.js";
import { plainName } from "./plain_text.js";

const NAMES = { user: "You", assistant: "Answer", tool: "Tool result" };
const ROUNDS_NOTE = `The page runs ${ROUNDS_MAX} rounds of its tools without you. Send a message to go on.`;
const REST = 4; // pause before the next drawing, in times of the last drawing's length
const SLOW_MS = 8;

export class MessageView {
  // `actions`: edit(node, text), again(node), branch(node, step), results(node, texts), isBusy(), which
  // tells the user why no request is possible now.
  constructor(conversation, node, actions) {
    this.conversation = conversation;
    this.node = node;
    this.actions = actions;
    this.root = element("article", { className: "message", tabIndex: -1 });
    this.root.dataset.role = node.role;
    this.root.dataset.id = node.id;
    this.root.setAttribute("aria-label", NAMES[node.role]);
    this.body = element("div", { className: "body" });
    this.foot = element("div", { className: "foot" });
    this.drawing = 0; // of requestAnimationFrame
    this.restsUntil = 0;
    this.#build();
    this.draw();
  }

  #build() {
    if (this.node.role === "assistant") this.#buildAnswer();
    else if (this.node.role === "tool") this.#buildResult();
    else this.root.append(this.#attachments(), this.body, this.foot);
    this.root.prepend(element("h2", { className: "unseen" }, NAMES[this.node.role]));
  }

  #buildAnswer() {
    this.thought = document.createTextNode("");
    this.thinking = element(
      "details", { className: "thinking", hidden: true },
      element("summary", {}, "Thinking"), element("div", { className: "thought", dir: "auto" }, this.thought),
    );
    this.thinking.firstChild.addEventListener("click", () => (this.isChosen = true));
    this.waiting = element("div", { className: "waiting", hidden: true });
    this.calls = element("div", { className: "calls" });
    this.end = element("div", { className: "end" });
    this.markdown = new MarkdownView(this.body);
    this.root.append(this.thinking, this.waiting, this.body, this.calls, this.end, this.foot);
  }

  #buildResult() {
    const name = plainName(this.node.name, 80) || "tool";
    this.root.append(element(
      "details", { className: "tool-result" },
      element("summary", {}, "Result of ", element("code", { dir: "auto" }, name), element("span", { className: "peek", dir: "auto" }, plainName(this.node.content, 80))),
      element("pre", { dir: "auto", tabIndex: 0 }, this.node.content),
    ));
  }

  #attachments() {
    const list = element("ul", { className: "files" });
    for (const file of this.node.attachments ?? []) list.append(element("li", {}, shown(file)));
    list.hidden = !list.childElementCount;
    return list;
  }

  // Draws at the next frame, or later if drawing is slow, so that typing and scrolling stay smooth.
  changed() {
    if (!this.node.isRunning) {
      cancelAnimationFrame(this.drawing);
      this.drawing = 0;
      this.draw();
    } else if (!this.drawing) {
      this.drawing = requestAnimationFrame(() => this.#frame());
    }
  }

  #frame() {
    const began = performance.now();
    if (began < this.restsUntil) {
      this.drawing = requestAnimationFrame(() => this.#frame());
      return;
    }
    this.drawing = 0;
    this.draw();
    const took = performance.now() - began;
    this.restsUntil = took > SLOW_MS ? began + (1 + REST) * took : 0;
    this.actions.drawn();
  }

  draw() {
    if (this.node.role === "assistant") this.#drawAnswer();
    if (this.node.role === "user" && !this.editing) this.#drawQuestion();
    if (!this.node.isRunning && !this.editing) this.#drawFoot();
  }

  #drawQuestion() {
    this.body.dir = "auto";
    this.body.textContent = this.node.content;
    this.body.hidden = !this.node.content;
  }

  #drawAnswer() {
    const { node } = this;
    this.root.setAttribute("aria-busy", String(node.isRunning));
    this.#drawThinking();
    this.#drawWaiting();
    if (node.isRunning) this.markdown.update(node.content);
    else if (this.markdown.settled < node.content.length || this.markdown.tail.length) this.markdown.finish(node.content);
    this.#drawCalls();
    if (!node.isRunning) this.#drawEnd();
  }

  #drawThinking() {
    const { node } = this;
    this.thinking.hidden = !node.thinking;
    if (node.thinking.length > this.thought.length) this.thought.appendData(node.thinking.slice(this.thought.length));
    const isThinking = node.isRunning && !node.content && !node.calls.length;
    if (!this.isChosen) this.thinking.open = isThinking && Boolean(node.thinking);
    this.thinking.firstChild.textContent = isThinking ? "Thinking …" : "Thought";
    if (isThinking) this.thinking.lastChild.scrollTop = this.thinking.lastChild.scrollHeight;
  }

  #drawWaiting() {
    const { node } = this;
    this.waiting.hidden = !(node.isRunning && node.firstAfter === null);
    if (this.waiting.hidden) return;
    const { done_tokens: done, prompt_tokens: whole } = node.prefill ?? {};
    if (!(whole > 0)) {
      if (!this.waiting.firstChild) this.waiting.append(element("span", { className: "dots" }, "Waiting for the model"));
      return;
    }
    if (!this.bar) {
      this.bar = element("progress", {});
      this.bar.setAttribute("aria-label", "How far the prompt is read");
      this.read = element("span", { className: "note" });
      this.waiting.replaceChildren(this.bar, this.read);
    }
    [this.bar.max, this.bar.value] = [whole, done];
    this.read.textContent = `reads ${count(done)} of ${count(whole)} tokens`;
  }

  #drawCalls() {
    this.node.calls.forEach((call, index) => {
      const known = this.calls.children[index];
      const box = known ?? element(
        "details", { className: "tool-call", open: true },
        element("summary", {}, "Calls ", element("code", { dir: "auto" })), element("pre", { dir: "auto", tabIndex: 0 }),
      );
      if (!known) this.calls.append(box);
      box.querySelector("code").textContent = plainName(call.name, 80);
      const text = this.node.isRunning ? call.text : pretty(call.text);
      if (box.lastChild.textContent !== text) box.lastChild.textContent = text;
    });
  }

  #drawEnd() {
    const { node } = this;
    if (this.form?.isConnected && needsResults(this.conversation, node)) return; // the user is writing in the form
    this.end.replaceChildren();
    if (node.error) this.end.append(this.#failure(node.error.message));
    if (node.isStopped) this.end.append(element("p", { className: "note stopped" }, "Stopped."));
    if (node.isAtRoundsMax) this.end.append(element("p", { className: "note" }, ROUNDS_NOTE));
    if (node.finish === "length") this.end.append(element("p", { className: "note" }, "It ended at the most tokens that an answer may have."));
    if (needsResults(this.conversation, node)) this.end.append(this.#resultForm());
    const line = cacheLine(node);
    if (line) this.end.append(element("p", { className: "cache-line" }, line));
    const loss = lossLine(node.usage);
    if (loss) this.end.append(element("p", { className: "cache-loss" }, loss));
  }

  #failure(text) {
    const again = element("button", { type: "button", className: "retry" }, "Try again");
    again.addEventListener("click", () => this.actions.again(this.node));
    return element("div", { className: "error" }, element("p", { dir: "auto" }, text), again);
  }

  // Asks the user for the results of tool calls that the page cannot run.
  #resultForm() {
    const form = (this.form = element("form", { className: "results" }));
    const areas = this.node.calls.map((call, index) => {
      const area = element("textarea", { id: `result-${this.node.id}-${index}`, className: "result-text", rows: 3, required: true });
      form.append(element("label", { htmlFor: area.id }, "Result of ", element("code", { dir: "auto" }, plainName(call.name, 80))), area);
      return area;
    });
    form.append(element("button", { type: "submit", className: "send-results" }, "Give the result"));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.actions.results(this.node, areas.map((area) => area.value));
    });
    return form;
  }

  #drawFoot() {
    if (this.node.role === "tool") return;
    const buttons = [this.#branchNav()];
    if (this.node.content) {
      const copy = this.#button("copy", "copy", "Copy", async () => {
        this.actions.tell((await copyText(this.node.content)) ? "Copied." : "The browser did not let this be copied.");
      });
      buttons.push(copy);
    }
    if (this.node.role === "user") buttons.push(this.#button("edit", "edit", "Edit", () => this.edit()));
    else buttons.push(this.#button("again", "regenerate", "Answer again", () => this.actions.again(this.node)));
    const model = plainName((this.node.servedBy || this.node.model || "").replace(/^hearth\//, ""), 60);
    if (this.node.role === "assistant") buttons.push(element("span", { className: "note by", dir: "auto" }, model));
    const held = this.foot.contains(document.activeElement) ? document.activeElement.className : "";
    this.foot.replaceChildren(...buttons.filter(Boolean));
    if (held) this.foot.getElementsByClassName(held)[0]?.focus();
  }

  #branchNav() {
    const { all, index } = branches(this.conversation, this.node);
    if (all.length < 2) return null;
    const nav = element("span", { className: "branch" });
    nav.setAttribute("role", "group");
    nav.setAttribute("aria-label", "Branches");
    const previous = this.#button("left", "branch-previous", "Branch before", () => this.actions.branch(this.node, -1));
    const next = this.#button("right", "branch-next", "Next branch", () => this.actions.branch(this.node, 1));
    previous.disabled = index === 0;
    next.disabled = index === all.length - 1;
    nav.append(previous, element("span", { className: "branch-number" }, `${index + 1}/${all.length}`), next);
    return nav;
  }

  #button(drawing, className, label, action) {
    const button = element("button", { type: "button", className: `small ${className}`, title: label }, icon(drawing));
    button.setAttribute("aria-label", label);
    button.addEventListener("click", action);
    return button;
  }

  edit() {
    this.editing = true;
    const area = element("textarea", { className: "edit-text", value: this.node.content, rows: 3 });
    area.setAttribute("aria-label", "The message, to be changed");
    const send = element("button", { type: "submit", className: "edit-send primary" }, "Send");
    const cancel = element("button", { type: "button", className: "edit-cancel" }, "Cancel");
    const form = element("form", { className: "edit-form" }, area, element("div", { className: "buttons" }, cancel, send));
    const end = () => {
      this.editing = false;
      form.replaceWith(this.body);
      this.draw();
      this.root.querySelector(".edit").focus();
    };
    cancel.addEventListener("click", end);
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      const text = area.value.trim();
      if (text && this.actions.isBusy()) return; // the typed text stays
      end();
      if (text) this.actions.edit(this.node, text);
    });
    area.addEventListener("keydown", (event) => {
      if (event.key === "Escape") {
        event.stopPropagation();
        end();
      } else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        form.requestSubmit();
      }
    });
    this.body.replaceWith(form);
    this.foot.replaceChildren();
    area.focus();
    area.setSelectionRange(area.value.length, area.value.length);
  }
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}
