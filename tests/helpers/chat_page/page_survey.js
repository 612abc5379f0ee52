// Looks for whatever a hostile text may have made of itself in a page: `survey(ids)` tells all that
// is not on the short lists below, `ids` being those that the page had before.
window.survey = (ids) => {
  const OWN = new Set([
    ...["html", "head", "meta", "title", "link", "script", "body", "header", "main", "nav", "aside", "footer"],
    ...["section", "article", "div", "span", "p", "h1", "h2", "h3", "h4", "h5", "h6", "a", "button", "form"],
    ...["label", "input", "textarea", "select", "option", "optgroup", "dialog", "details", "summary", "progress"],
    ...["ul", "ol", "li", "dl", "dt", "dd", "pre", "code", "strong", "em", "b", "s", "br", "hr", "blockquote"],
    ...["table", "caption", "thead", "tbody", "tr", "th", "td", "img", "svg", "path", "kbd", "small", "time"],
    ...["output", "fieldset", "legend", "figure", "figcaption", "circle", "rect", "line", "polyline"],
  ]);
  const WRITTEN = new Set([
    ...["p", "br", "hr", "h1", "h2", "h3", "h4", "h5", "h6", "strong", "em", "s", "code", "pre", "blockquote"],
    ...["ul", "ol", "li", "a", "table", "thead", "tbody", "tr", "th", "td", "span", "div", "button", "img"],
    ...["details", "summary", "svg", "path", "dl", "dt", "dd", "progress", "label", "textarea", "form", "h2"],
    ...["article", "section", "header", "footer", "small", "time", "output", "circle", "rect", "line"],
  ]);
  const LOADS = ["src", "srcset", "poster", "data", "background", "action", "formaction", "ping", "srcdoc", "xlink:href", "manifest"];
  const PICTURE = /^(blob:|data:image\/(png|jpeg|gif|webp);base64,)/;
  const found = [];
  const known = new Set(ids);
  const seen = new Map();
  const walk = (root, isWritten) => {
    for (const each of root.querySelectorAll("*")) {
      const tell = (what) => found.push(`${what}: ${each.outerHTML.slice(0, 160)}`);
      const tag = each.localName;
      const isMessage = isWritten || each.closest("#messages") !== null && each.id !== "messages";
      if (!(isMessage ? WRITTEN : OWN).has(tag)) tell("element");
      for (const { name, value } of each.attributes) {
        if (name.startsWith("on")) tell(`handler ${name}`);
        if (name === "style" && /url|expression|position|import/i.test(value)) tell("style");
        if (name === "id" && isMessage && !known.has(value) && !/^[a-z]+-[0-9a-f-]+$/.test(value)) tell("id");
        if (name === "name" && isMessage) tell("name");
        if (name === "href" && tag !== "a" && tag !== "link") tell("href");
        if (LOADS.includes(name) && !(tag === "img" && PICTURE.test(value)) && !(tag === "script" && value.startsWith("/"))) tell(`loads ${name}`);
      }
      if (tag === "a" && each.hasAttribute("href")) {
        if (!["http:", "https:", "mailto:"].includes(each.protocol)) tell("address");
        const isOut = each.origin !== location.origin;
        if (isOut && !(each.target === "_blank" && /noopener/.test(each.rel) && /noreferrer/.test(each.rel))) tell("opener");
        if (isMessage && !isOut) tell("own address");
      }
      if (tag === "link" && new URL(each.href).origin !== location.origin) tell("link");
      if (each.id) seen.set(each.id, (seen.get(each.id) ?? 0) + 1);
      if (each.shadowRoot) walk(each.shadowRoot, isMessage);
      if (each.content instanceof DocumentFragment) walk(each.content, isMessage);
    }
  };
  walk(document, false);
  for (const [id, count] of seen) if (count > 1) found.push(`twice: id ${id}`);
  const frames = window.length;
  if (frames) found.push(`frames: ${frames}`);
  return found;
};
