// Turns a model's markdown into safe HTML: only elements of a short list, only links to
// http, https and mailto, and nothing that loads by itself.

import MarkdownIt from "/chat/vendor/markdown-it.esm.min.js";
import { element } from "/dashboard/format.js";

import { copyText } from "./clipboard.js";

const LINKED = /^(?:https?:\/\/|mailto:)/i;
// The longest block that is highlighted: for some texts the time grows with the square of the length.
const CODE_CHARS_MAX = 16_000;
const CODE_LINE_MAX = 1_000;
const COLOURED_CHARS_MAX = 60_000; // of code in a message
const TAGS = [
  ...["p", "br", "hr", "h1", "h2", "h3", "h4", "h5", "h6", "strong", "em", "s", "code", "pre"],
  ...["blockquote", "ul", "ol", "li", "a", "table", "thead", "tbody", "tr", "th", "td", "span"],
];
const SAFE = {
  ALLOWED_TAGS: TAGS,
  ALLOWED_ATTR: ["href", "title", "class", "start"],
  ALLOWED_URI_REGEXP: LINKED,
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};
const CLASS = /^(?:left|center|right|language-\S+|hljs-[\w-]+(?: [a-z]+_)*)$/; // as markdown-it and highlight.js write them
const REFERENCE = /^[ \t>*+\d.)-]*\[[^\]\n]+\]:/m; // a definition that a link far above may use

const purifier = window.DOMPurify;
purifier.addHook("uponSanitizeAttribute", (_, data) => {
  if (data.attrName === "class" && !CLASS.test(data.attrValue)) data.keepAttr = false;
});

const markdown = new MarkdownIt("default", { html: false, linkify: true, breaks: false, typographer: false });
markdown.linkify.set({ fuzzyLink: false, fuzzyEmail: false, fuzzyIP: false }); // so that main.py does not become a link
markdown.validateLink = (url) => LINKED.test(url.trim());
markdown.renderer.rules.image = (tokens, index) => {
  // An image becomes a link: loading it would send its address, with what that holds, to its server.
  const token = tokens[index];
  const escape = markdown.utils.escapeHtml;
  const name = escape(token.content || "without a name");
  return `<a href="${escape(token.attrGet("src") ?? "")}">image: ${name}</a>`;
};

// The alignment of a cell becomes a class, since the page's policy forbids style attributes.
for (const rule of ["th_open", "td_open"]) {
  markdown.renderer.rules[rule] = (tokens, index, options, _, renderer) => {
    const side = /text-align:(\w+)/.exec(tokens[index].attrGet("style") ?? "")?.[1];
    tokens[index].attrs = side ? [["class", side]] : null;
    return renderer.renderToken(tokens, index, options);
  };
}

function fragmentOf(tokens) {
  const fragment = purifier.sanitize(markdown.renderer.render(tokens, markdown.options, {}), SAFE);
  for (const link of fragment.querySelectorAll("a")) finishLink(link);
  for (const table of fragment.querySelectorAll("table")) {
    const scroll = element("div", { className: "table-scroll", tabIndex: 0 });
    scroll.setAttribute("role", "region");
    scroll.setAttribute("aria-label", "Table");
    table.replaceWith(scroll);
    scroll.append(table);
  }
  for (const code of fragment.querySelectorAll("pre > code")) finishCode(code);
  for (const block of fragment.children) block.dir = "auto";
  return fragment;
}

// Shows a link's target beside it, unless the link's text is the target.
function finishLink(link) {
  if (!LINKED.test(link.getAttribute("href") ?? "")) { // an empty address would be this page
    link.replaceWith(...link.childNodes);
    return;
  }
  link.target = "_blank";
  link.rel = "noopener noreferrer";
  link.title = link.href;
  if (link.textContent.trim() === link.getAttribute("href")) return;
  const where = link.protocol === "mailto:" ? link.href.slice(7) : link.host;
  link.after(element("span", { className: "host" }, ` (${where})`));
}

function finishCode(code) {
  const pre = code.parentElement;
  const language = /language-(\S+)/.exec(code.className)?.[1] ?? "";
  const copy = element("button", { type: "button", className: "copy-code" }, "Copy");
  copy.addEventListener("click", async () => {
    copy.textContent = (await copyText(code.textContent)) ? "Copied" : "Not copied";
    setTimeout(() => (copy.textContent = "Copy"), 2000);
  });
  copy.setAttribute("aria-label", language ? `Copy this ${language}` : "Copy this code");
  pre.tabIndex = 0;
  pre.setAttribute("role", "region");
  pre.setAttribute("aria-label", language ? `Code, ${language}` : "Code");
  const bar = element("div", { className: "code-bar" }, element("span", { className: "language" }, language || "text"), copy);
  const block = element("div", { className: "code-block" });
  pre.replaceWith(block);
  block.append(bar, pre);
  code.dataset.language = language;
}

let highlighter = null;

// Highlights a block of code once the highlighter is loaded and the browser is idle.
async function colour(code) {
  const { language } = code.dataset;
  if (!language) return;
  highlighter ??= import("/chat/vendor/highlight.min.js");
  const { default: hljs } = await highlighter;
  if (!hljs.getLanguage(language)) return;
  const { value } = hljs.highlight(code.textContent, { language, ignoreIllegals: true });
  code.replaceChildren(purifier.sanitize(value, { ...SAFE, ALLOWED_TAGS: ["span"], ALLOWED_ATTR: ["class"] }));
}

function isShort(text) {
  return text.length <= CODE_CHARS_MAX && text.split("\n").every((line) => line.length <= CODE_LINE_MAX);
}

// Shows a growing text: finished blocks stay, only the last one is rendered again.
export class MarkdownView {
  constructor(root) {
    this.root = root;
    this.coloured = 0; // characters of highlighted code
    this.settled = 0; // characters of the finished blocks
    this.tail = [];
  }

  update(written) {
    const text = withLineFeeds(written);
    const rest = text.slice(this.settled);
    const tokens = markdown.parse(rest, {});
    const start = lastBlockStart(rest, tokens);
    if (start > 0) {
      this.#put(markdown.parse(rest.slice(0, start), {}), true);
      this.settled += start;
    }
    this.#put(start > 0 ? markdown.parse(rest.slice(start), {}) : tokens, false);
  }

  finish(written) {
    const text = withLineFeeds(written);
    if (REFERENCE.test(text)) this.reset(); // rare: links to the definition may be anywhere above
    this.#put(markdown.parse(text.slice(this.settled), {}), true);
    this.settled = text.length;
  }

  reset() {
    this.root.replaceChildren();
    this.tail = [];
    [this.settled, this.coloured] = [0, 0];
  }

  #put(tokens, isWhole) {
    const fragment = fragmentOf(tokens);
    const nodes = [...fragment.childNodes];
    for (const node of this.tail) node.remove();
    this.root.append(fragment);
    this.tail = isWhole ? [] : nodes;
    if (isWhole) this.#colour(nodes);
  }

  #colour(nodes) {
    const idle = window.requestIdleCallback ?? ((action) => setTimeout(action, 50));
    for (const code of nodes.flatMap((node) => [...(node.querySelectorAll?.("pre > code") ?? [])])) {
      const { length } = code.textContent;
      if (!isShort(code.textContent) || this.coloured + length > COLOURED_CHARS_MAX) continue;
      this.coloured += length;
      idle(() => colour(code));
    }
  }
}

// Returns the text with line feeds alone as line breaks, as markdown-it counts them.
function withLineFeeds(text) {
  return text.includes("\r") ? text.replace(/\r\n?/g, "\n") : text;
}

// Returns the offset in `text` where the last block of its `tokens` begins. A first line is certain
// only at its end, unless an empty line precedes it: after "- a", "---" may go on as text of the list.
function lastBlockStart(text, tokens) {
  const tops = tokens.filter((token) => token.level === 0 && token.nesting >= 0 && token.map);
  let line = tops.length > 1 ? tops.at(-1).map[0] : 0;
  let at = 0;
  for (; line > 0; line -= 1) at = text.indexOf("\n", at) + 1;
  return text.endsWith("\n\n", at) || text.includes("\n", at) ? at : 0;
}
