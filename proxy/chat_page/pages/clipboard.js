// Copies text, even if the page came over plain http, for which browsers have no clipboard API.

import { element } from "/dashboard/format.js";

export async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return copySelection(text);
  }
}

function copySelection(text) {
  const before = document.activeElement;
  const area = element("textarea", { value: text, className: "unseen", readOnly: true });
  document.body.append(area);
  area.select();
  const isCopied = document.execCommand("copy");
  area.remove();
  before?.focus();
  return isCopied;
}
