// Keeps conversations in this browser's IndexedDB, and nowhere else.
// `heads` hold what the list shows and searches; `conversations` hold all of each.

import { takeUp } from "./conversation.js";

const NAME = "hearth-chat";
const SEARCHED_CHARS = 20_000; // of a conversation's words
const changes = "BroadcastChannel" in self ? new BroadcastChannel(NAME) : null;
let opened = null;

function database() {
  opened ??= new Promise((resolve, reject) => {
    const request = indexedDB.open(NAME, 1);
    request.onupgradeneeded = () => {
      request.result.createObjectStore("heads", { keyPath: "id" });
      request.result.createObjectStore("conversations", { keyPath: "id" });
    };
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
  return opened;
}

// Runs `work` on both stores, and gives what its request found once all of it is kept. Other tabs
// get what is `told`.
async function transact(mode, work, told = null) {
  const transaction = (await database()).transaction(["heads", "conversations"], mode);
  const [heads, conversations] = ["heads", "conversations"].map((name) => transaction.objectStore(name));
  const request = work(heads, conversations);
  return new Promise((resolve, reject) => {
    transaction.oncomplete = () => {
      if (told) changes?.postMessage(told);
      resolve(request?.result);
    };
    transaction.onabort = () => reject(transaction.error);
  });
}

// Calls `action` with {kept: id}, {removed: id} or {removed: "all"} for what another tab did.
export function onChangeElsewhere(action) {
  changes?.addEventListener("message", ({ data }) => action(data));
}

// Keeps the conversation with what other tabs wrote into it since it was read.
export function put(conversation) {
  return transact("readwrite", (heads, conversations) => {
    conversations.get(conversation.id).onsuccess = ({ target }) => {
      if (target.result) takeUp(conversation, target.result);
      heads.put(headOf(conversation));
      conversations.put(conversation);
    };
  }, { kept: conversation.id });
}

function headOf({ id, title, updated, nodes }) {
  const words = Object.values(nodes).map((node) => node.content).join("\n");
  return { id, title, updated, words: `${title}\n${words}`.slice(0, SEARCHED_CHARS).toLowerCase() };
}

export function get(id) {
  return transact("readonly", (_, conversations) => conversations.get(id));
}

export function all() {
  return transact("readonly", (_, conversations) => conversations.getAll());
}

// The heads, the one that changed last first.
export async function heads() {
  const rows = await transact("readonly", (store) => store.getAll());
  return rows.sort((a, b) => b.updated - a.updated);
}

export function remove(id) {
  return transact("readwrite", (heads_, conversations) => {
    heads_.delete(id);
    conversations.delete(id);
  }, { removed: id });
}

export function removeAll() {
  return transact("readwrite", (heads_, conversations) => {
    heads_.clear();
    conversations.clear();
  }, { removed: "all" });
}
