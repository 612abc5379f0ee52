// Puts untrusted names on one line, without characters that change the writing direction.

// eslint-disable-next-line no-control-regex
const CONTROLS = /[\u0000-\u001f\u007f-\u009f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g;

export function plainName(text, charsMax = 200) {
  return String(text).replace(CONTROLS, " ").replace(/\s+/g, " ").trim().slice(0, charsMax);
}
