// Shows the messages of a conversation, and scrolls along while the end is visible.

import { shownPath } from "./conversation.js";
import { MessageView } from "./message_view.js";

const NEAR_PX = 80;

export class MessageList {
  constructor(root, scroller, actions) {
    this.root = root;
    this.scroller = scroller;
    this.actions = { ...actions, drawn: () => this.#follow() };
    this.views = new Map(); // node's id -> its view
    this.conversation = null;
    this.isFollowing = true;
    scroller.addEventListener("scroll", () => this.#look(), { passive: true });
    const resized = new ResizeObserver(() => this.#follow());
    for (const each of [root, scroller]) resized.observe(each);
    this.toEnd = document.getElementById("to-end");
    this.toEnd.addEventListener("click", () => this.showEnd());
  }

  show(conversation) {
    if (conversation !== this.conversation) this.views.clear();
    this.conversation = conversation;
    const path = shownPath(conversation);
    const views = path.map((node) => this.#view(node));
    this.views = new Map(views.map((view) => [view.node.id, view]));
    const roots = views.map((view) => view.root);
    const hadFocus = this.root.contains(document.activeElement);
    if (!sameNodes(roots, [...this.root.children])) this.root.replaceChildren(...roots);
    for (const view of views) view.draw();
    // The focused button may have been removed with its message.
    if (hadFocus && !this.root.contains(document.activeElement)) roots.at(-1)?.focus({ preventScroll: true });
    this.#follow();
    return path;
  }

  #view(node) {
    const view = this.views.get(node.id);
    return view?.node === node ? view : new MessageView(this.conversation, node, this.actions);
  }

  changed(node) {
    const view = this.views.get(node.id);
    if (view) view.changed();
    else this.show(this.conversation);
    if (!node.isRunning) this.#follow();
  }

  last(role) {
    return [...this.views.values()].filter((view) => view.node.role === role).at(-1);
  }

  showEnd() {
    this.isFollowing = true;
    this.#follow();
  }

  #follow() {
    if (this.isFollowing) this.scroller.scrollTop = this.scroller.scrollHeight;
    else this.#look();
  }

  #look() {
    const { scrollHeight, scrollTop, clientHeight } = this.scroller;
    this.isFollowing = scrollHeight - scrollTop - clientHeight < NEAR_PX;
    this.toEnd.hidden = this.isFollowing;
  }
}

function sameNodes(a, b) {
  return a.length === b.length && a.every((node, index) => node === b[index]);
}
