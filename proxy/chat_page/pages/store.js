// Keeps conversations in this browser's IndexedDB only.
// `heads` has what the list shows and searches; `conversations` has the whole conversations.

import { takeUp } from "./conversation.js";

const NAME = "hearth-chat";
const SEARCHED_CHARS = 20_000; // of a conversation's text
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

// Runs `work` on both stores, and returns its request's result once the transaction is saved. Other
// tabs get the message `told`.
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

// Calls `action` with {kept: id}, {removed: id} or {removed: "all"} after a change by another tab.
export function onChangeElsewhere(action) {
  changes?.addEventListener("message", ({ data }) => action(data));
}

// Saves the conversation, merged with what other tabs have saved since it was read.
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

// Returns the heads, the latest change first.
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
