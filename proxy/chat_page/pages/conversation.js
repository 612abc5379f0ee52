// Keeps a conversation as a tree of messages: an edit or another answer begins a new branch.
// `chosen` maps a message's id to the id of the message that is shown after it.

export const ROOT = "root";
const TITLE_CHARS = 60;
const families = new WeakMap(); // conversation -> its messages by parent; dropped when a message is added or removed
const written = new Set(); // ids of messages that this tab wrote, deleted ones too

// crypto.randomUUID exists for https and localhost only.
export function newId() {
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

export function newConversation(settings) {
  const now = Date.now();
  return { id: newId(), title: "", isNamed: false, created: now, updated: now, nodes: {}, chosen: {}, settings };
}

export function addNode(conversation, parent, fields) {
  const node = { id: newId(), parent: parent ?? ROOT, created: Date.now(), ...fields };
  conversation.nodes[node.id] = node;
  families.delete(conversation);
  written.add(node.id);
  conversation.chosen[node.parent] = node.id;
  touch(conversation);
  return node;
}

export function removeNode(conversation, node) {
  delete conversation.nodes[node.id];
  families.delete(conversation);
  written.add(node.id);
  const others = children(conversation, node.parent);
  if (others.length) conversation.chosen[node.parent] = others.at(-1).id;
  else delete conversation.chosen[node.parent];
}

// Merges the messages that another tab saved for the same conversation as `kept`.
export function takeUp(conversation, kept) {
  for (const theirs of Object.values(kept.nodes)) {
    const ours = conversation.nodes[theirs.id];
    if (!written.has(theirs.id) && (!ours || !theirs.isRunning)) conversation.nodes[theirs.id] = stopped(theirs);
  }
  families.delete(conversation);
  conversation.chosen = { ...kept.chosen, ...conversation.chosen };
  if (kept.isNamed && !conversation.isNamed) Object.assign(conversation, { title: kept.title, isNamed: true });
}

// Returns the message; one that was being answered is marked as stopped.
function stopped(node) {
  return node.isRunning ? { ...node, isRunning: false, isStopped: true } : node;
}

// Returns the conversation with running answers marked as ended: the page was closed amid them.
export function atRest(conversation) {
  const nodes = Object.entries(conversation.nodes).map(([id, node]) => [id, stopped(node)]);
  return { ...conversation, nodes: Object.fromEntries(nodes) };
}

export function touch(conversation) {
  conversation.updated = Date.now();
  if (!conversation.isNamed) conversation.title = firstWords(conversation);
}

export function children(conversation, parent) {
  if (!families.has(conversation)) families.set(conversation, byParent(conversation));
  return families.get(conversation).get(parent) ?? [];
}

// Returns the messages after each message, by its id, the oldest first.
function byParent({ nodes }) {
  const found = new Map();
  for (const node of Object.values(nodes)) {
    if (found.has(node.parent)) found.get(node.parent).push(node);
    else found.set(node.parent, [node]);
  }
  return found;
}

// Returns the shown messages, the first one first.
export function shownPath(conversation) {
  const path = [];
  let at = ROOT;
  while (conversation.nodes[conversation.chosen[at]]) {
    const node = conversation.nodes[conversation.chosen[at]];
    path.push(node);
    at = node.id;
  }
  return path;
}

// Returns the messages from the first one to `node`.
export function pathTo(conversation, node) {
  const path = [];
  for (let at = node; at; at = conversation.nodes[at.parent]) path.unshift(at);
  return path;
}

export function branches(conversation, node) {
  const all = children(conversation, node.parent).filter((other) => other.role === node.role);
  return { all, index: all.indexOf(node) };
}

export function chooseBranch(conversation, node, step) {
  const { all, index } = branches(conversation, node);
  const other = all[index + step];
  if (other) conversation.chosen[node.parent] = other.id;
  return other;
}

function firstWords(conversation) {
  const first = shownPath(conversation).find((node) => node.role === "user");
  const words = (first?.content || first?.attachments?.[0]?.name || "").trim().split(/\s+/).join(" ");
  return words.length <= TITLE_CHARS ? words : `${words.slice(0, TITLE_CHARS).replace(/\s\S*$/, "")} …`;
}

// Returns the messages of a request, from the first one to `node`.
export function requestMessages(conversation, node) {
  const system = conversation.settings.system.trim();
  const path = pathTo(conversation, node);
  const messages = path.flatMap((each, index) => requestMessage(each, path[index + 1]?.role === "tool"));
  return system ? [{ role: "system", content: system }, ...messages] : messages;
}

// Tool calls without results are left out: they were stopped, perhaps amid their arguments, or the
// user went on without results. No server accepts a conversation with such calls.
function requestMessage(node, isAnswered) {
  if (node.role === "user") return [{ role: "user", content: userContent(node) }];
  if (node.role === "tool") return [{ role: "tool", tool_call_id: node.callId, content: node.content }];
  const calls = isAnswered ? node.calls : [];
  if (!node.content && !calls.length) return []; // it failed or was stopped before any text came
  const message = { role: "assistant", content: node.content };
  if (node.thinking) message.reasoning_content = node.thinking;
  if (calls.length) {
    message.tool_calls = calls.map(({ id, name, text }) => ({
      id, type: "function", function: { name, arguments: text || "{}" },
    }));
  }
  return [message];
}

function userContent(node) {
  if (!node.attachments?.length) return node.content;
  const parts = node.attachments.map((file) =>
    file.kind === "image"
      ? { type: "image_url", image_url: { url: file.data } }
      : { type: "file", file: { filename: file.name, file_data: file.data } });
  return node.content ? [...parts, { type: "text", text: node.content }] : parts;
}
