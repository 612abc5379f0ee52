// Writes numbers as people read them, and makes elements whose text is never markup.

const WHOLE = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const UNITS = ["B", "KB", "MB", "GB", "TB"];

export const NONE = "–";

export function count(value) {
  return value === null || value === undefined ? NONE : WHOLE.format(value);
}

export function percent(share) {
  return share === null || share === undefined ? NONE : `${(100 * share).toFixed(1)} %`;
}

export function ratio(value) {
  return value === null || value === undefined ? NONE : value.toFixed(2);
}

export function counted(value, one, many) {
  return `${count(value)} ${value === 1 ? one : many}`;
}

// Tokens per second, with a decimal for slow answers.
export function speed(value) {
  return value === null || value === undefined || value >= 10 ? count(value) : value.toFixed(1);
}

export function clock(at) {
  return new Date(at * 1000).toTimeString().slice(0, 8);
}

export function bytes(value) {
  if (value === null || value === undefined) return NONE;
  let power = 0;
  while (value >= 1024 && power < UNITS.length - 1) {
    value /= 1024;
    power += 1;
  }
  return `${value >= 100 || power === 0 ? value.toFixed(0) : value.toFixed(1)} ${UNITS[power]}`;
}

export function seconds(value) {
  if (value === null || value === undefined) return NONE;
  if (value < 0.9995) return `${WHOLE.format(value * 1000)} ms`;
  if (value < 60) return `${value.toFixed(1)} s`;
  if (value < 3600) return `${Math.floor(value / 60)} min ${Math.floor(value % 60)} s`;
  return `${Math.floor(value / 3600)} h ${Math.floor((value % 3600) / 60)} min`;
}

// How long ago something was, as roughly as people say it.
export function ago(value) {
  if (value < 10) return "just now";
  if (value < 60) return `${WHOLE.format(value)} s ago`;
  if (value < 3600) return `${Math.floor(value / 60)} min ago`;
  return value < 86400 ? `${Math.floor(value / 3600)} h ago` : `${Math.floor(value / 86400)} d ago`;
}

// A time that is short enough for an axis.
export function secondsTick(value) {
  return value < 60 ? seconds(value) : `${WHOLE.format(value)} s`;
}

// For an even count, this is the mean of the middle two, as on the server.
export function median(values) {
  const sorted = values.filter((value) => value !== null).sort((a, b) => a - b);
  const middle = Math.floor(sorted.length / 2);
  if (!sorted.length) return null;
  return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}

export function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  Object.assign(made, properties);
  made.append(...children);
  return made;
}

// Calls `draw` only if `value` has changed, so that unchanged text stays readable.
export function whenChanged(draw) {
  let before = null;
  return (value) => {
    const now = JSON.stringify(value);
    if (now !== before) draw(value);
    before = now;
  };
}

// Names may be long and in any script. The title has the whole text.
function cell(text, isText) {
  return isText ? element("td", { className: "text", dir: "auto", title: text }, text) : element("td", {}, text);
}

// Returns a function that fills a table's body with rows of text.
export function tableBody(id, textColumns) {
  const body = document.getElementById(id);
  return whenChanged((rows) => {
    body.replaceChildren(
      ...rows.map((cells) =>
        element("tr", {}, ...cells.map((text, column) =>
          cell(text, textColumns.includes(column)))),
      ),
    );
  });
}
