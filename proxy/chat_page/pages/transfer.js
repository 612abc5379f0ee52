// Exports conversations as JSON, and imports such files, which are not trusted.

import { newId, ROOT } from "./conversation.js";
import { plainName } from "./plain_text.js";
import { readSettings } from "./settings.js";

const FORMAT = "hearth-chat";
const ROLES = ["user", "assistant", "tool"];
const IMAGE = /^data:image\/(?:png|jpeg|gif|webp);base64,[A-Za-z0-9+/]*={0,2}$/;
const FILE = /^data:[\w.+/;=-]*;base64,[A-Za-z0-9+/]*={0,2}$/;

export function exported(conversations) {
  return JSON.stringify({ format: FORMAT, version: 1, conversations }, null, 1);
}

// Returns the conversations of an exported text; throws an Error that says what is wrong.
export function imported(text) {
  let file;
  try {
    file = JSON.parse(text);
  } catch (error) {
    throw new Error(`The file is no JSON: ${error.message}`);
  }
  if (file?.format !== FORMAT || !Array.isArray(file.conversations)) {
    throw new Error(`The file holds no conversations of this page: "format" is not "${FORMAT}".`);
  }
  return file.conversations.filter(isRecord).map(conversation);
}

const isRecord = (value) => typeof value === "object" && value !== null && !Array.isArray(value);
const string = (value) => (typeof value === "string" ? value : "");
const time = (value) => (Number.isFinite(value) ? value : Date.now());
const array = (value) => (Array.isArray(value) ? value : []);

// Makes new ids, so that an import changes no existing conversation.
function conversation(row) {
  const given = isRecord(row.nodes) ? row.nodes : {};
  const ids = new Map([[ROOT, ROOT], ...Object.keys(given).map((id) => [id, newId()])]);
  const nodes = {};
  for (const [id, value] of Object.entries(given)) {
    if (isRecord(value) && ROLES.includes(value.role) && ids.has(value.parent)) {
      nodes[ids.get(id)] = { ...node(value), id: ids.get(id), parent: ids.get(value.parent) };
    }
  }
  const chosen = {};
  for (const [parent, child] of Object.entries(isRecord(row.chosen) ? row.chosen : {})) {
    if (nodes[ids.get(child)]?.parent === ids.get(parent)) chosen[ids.get(parent)] = ids.get(child);
  }
  return {
    id: newId(), title: plainName(string(row.title)), isNamed: row.isNamed === true, created: time(row.created),
    updated: time(row.updated), nodes: rooted(nodes), chosen, settings: readSettings(row.settings),
  };
}

// Drops messages that the root does not reach; a cycle would never end.
function rooted(nodes) {
  const kept = {};
  let parents = new Set([ROOT]);
  while (parents.size) {
    const level = Object.values(nodes).filter((each) => parents.has(each.parent));
    for (const each of level) kept[each.id] = each;
    parents = new Set(level.map((each) => each.id));
  }
  return kept;
}

function node(value) {
  const made = { role: value.role, content: string(value.content), created: time(value.created) };
  if (value.role === "user") return { ...made, attachments: array(value.attachments).filter(isRecord).flatMap(attachment) };
  if (value.role === "tool") return { ...made, callId: string(value.callId), name: string(value.name) };
  const { kv_cache: cache, speculation } = isRecord(value.usage) ? value.usage : {};
  return {
    ...made, thinking: string(value.thinking), model: string(value.model), servedBy: string(value.servedBy),
    calls: array(value.calls).filter(isRecord).map(({ id, name, text }) => ({ id: string(id), name: string(name), text: string(text) })),
    isRunning: false, isStopped: value.isStopped === true, finish: string(value.finish), prefill: null,
    error: isRecord(value.error) ? { message: string(value.error.message), status: 0, code: "" } : null,
    elapsed: figure(value.elapsed), firstAfter: figure(value.firstAfter),
    usage: isRecord(value.usage) ? usage(value.usage, cache, speculation) : null,
  };
}

const figure = (value) => (Number.isFinite(value) ? value : 0);

function usage(told, cache, speculation) {
  const made = { prompt_tokens: figure(told.prompt_tokens), completion_tokens: figure(told.completion_tokens) };
  if (isRecord(cache)) {
    const { divergence: loss } = cache;
    made.kv_cache = {
      prefix_length: figure(cache.prefix_length), prefilled: figure(cache.prefilled), ttft_ms: figure(cache.ttft_ms),
      source: string(cache.source),
      divergence: isRecord(loss) ? { cause: string(loss.cause), rule: string(loss.rule), lost: figure(loss.lost), message: figure(loss.message), remedy: string(loss.remedy) } : null,
    };
  }
  if (isRecord(speculation)) {
    made.speculation = Object.fromEntries(Object.entries(speculation).map(([name, value]) => [name, figure(value)]));
  }
  return made;
}

function attachment({ kind, name, size, data }) {
  const pattern = kind === "image" ? IMAGE : kind === "file" ? FILE : null;
  if (!pattern?.test(string(data))) return [];
  return [{ kind, name: plainName(string(name), 120), size: figure(size), data }];
}
