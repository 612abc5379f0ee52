// Edits a conversation's settings, from which new conversations start, and chooses the model.

import { counted, element } from "/dashboard/format.js";

import { plainName } from "./plain_text.js";
import { pasted } from "./tools.js";

const KEPT = "hearth-chat-settings";
const HERE = "hearth"; // the owner of models that this server runs itself
const THINKING = ["auto", "on", "off"];
const byId = (id) => document.getElementById(id);

const text = (value) => (typeof value === "string" ? value : "");
const number = (value, least, most) => (typeof value === "number" && value >= least && value <= most ? value : null);

// Returns settings from any source, each checked for a valid value.
export function readSettings(given) {
  return {
    model: text(given?.model),
    system: text(given?.system),
    temperature: number(given?.temperature, 0, 2),
    maxTokens: number(given?.maxTokens, 1, 10_000_000),
    thinking: THINKING.includes(given?.thinking) ? given.thinking : "auto",
    hasTools: given?.hasTools === true,
    toolText: text(given?.toolText),
  };
}

export function lastSettings() {
  try {
    return readSettings(JSON.parse(localStorage.getItem(KEPT)));
  } catch {
    return readSettings(null);
  }
}

export function keepSettings(settings) {
  try {
    localStorage.setItem(KEPT, JSON.stringify(settings));
  } catch {
    // Too long for the browser's storage: they stay with this conversation alone.
  }
}

export class SettingsForm {
  // Calls `changed(settings)` with the user's choice when the dialog closes.
  constructor(changed) {
    this.dialog = byId("settings");
    byId("settings-form").addEventListener("submit", (event) => {
      event.preventDefault();
      const wrong = toolProblem();
      byId("tools-wrong").textContent = wrong;
      if (wrong) {
        byId("tool-text").focus();
        return;
      }
      changed(this.#read());
      this.dialog.close();
    });
    byId("settings-cancel").addEventListener("click", () => this.dialog.close());
  }

  open(settings) {
    byId("system").value = settings.system;
    byId("temperature").value = settings.temperature ?? "";
    byId("max-tokens").value = settings.maxTokens ?? "";
    byId("thinking").value = settings.thinking;
    byId("has-tools").checked = settings.hasTools;
    byId("tool-text").value = settings.toolText;
    byId("tools-wrong").textContent = "";
    this.dialog.showModal();
  }

  #read() {
    const numeric = (id) => (byId(id).value === "" ? null : Number(byId(id).value));
    return {
      system: byId("system").value,
      temperature: numeric("temperature"),
      maxTokens: numeric("max-tokens"),
      thinking: byId("thinking").value,
      hasTools: byId("has-tools").checked,
      toolText: byId("tool-text").value,
    };
  }
}

function toolProblem() {
  try {
    pasted(byId("tool-text").value);
    return "";
  } catch (error) {
    return error.message;
  }
}

export class ModelChooser {
  constructor(changed) {
    this.select = byId("model");
    this.rows = [];
    this.select.addEventListener("change", () => changed(this.select.value));
  }

  // Shows the models that can chat; models of other servers are in groups of their own.
  show(rows, chosen) {
    this.rows = rows.filter(talks);
    const groups = Map.groupBy ? Map.groupBy(this.rows, (row) => row.owned_by) : groupBy(this.rows);
    const options = [...groups].map(([owner, models]) => {
      const label = owner === HERE ? "On this server" : plainName(owner);
      return element("optgroup", { label }, ...models.map((row) => element("option", { value: row.id }, plainName(row.id))));
    });
    this.select.replaceChildren(...options);
    this.choose(chosen);
  }

  choose(name) {
    const isKnown = this.rows.some((row) => row.id === name);
    this.select.value = isKnown ? name : (this.rows[0]?.id ?? "");
  }

  get value() {
    return this.select.value;
  }

  // Returns whether an answer may bring more facts about the models.
  get isUnknown() {
    const row = this.#row();
    return !row || (row.owned_by === HERE && !row.architecture);
  }

  // Returns the text about the model for an empty conversation; "" if nothing is known.
  about() {
    const row = this.#row();
    const context = row?.context_length ? `${plainName(row.id, 60)}: ${counted(row.context_length, "token", "tokens")} of context.` : "";
    return [context, plainName(row?.description ?? "", 400)].filter(Boolean).join(" ");
  }

  #row() {
    return this.rows.find((each) => each.id === this.value);
  }

  // Returns why the model takes no images; "" if it does, or if that is unknown.
  imageReason() {
    const row = this.#row();
    const name = plainName(this.value, 60);
    if (!row || (row.owned_by !== HERE && !row.architecture)) return "";
    if (!row.architecture) return `${name} is not loaded yet, so it is not known whether it takes images. Send a message first.`;
    return row.architecture.input_modalities.includes("image") ? "" : `${name} takes text only.`;
  }
}

function talks(row) {
  return !row.architecture?.output_modalities || row.architecture.output_modalities.includes("text");
}

function groupBy(rows) {
  const groups = new Map();
  for (const row of rows) groups.set(row.owned_by, [...(groups.get(row.owned_by) ?? []), row]);
  return groups;
}
