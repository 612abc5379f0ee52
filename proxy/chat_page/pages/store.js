// Keeps conversations in this browser's IndexedDB, and nowhere else.
// `heads` hold what the list shows and searches; `conversations` hold all of each.

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

// Runs `work` on both stores, and gives what its request found once all of it is kept.
async function transact(mode, work) {
  const transaction = (await database()).transaction(["heads", "conversations"], mode);
  const [heads, conversations] = ["heads", "conversations"].map((name) => transaction.objectStore(name));
  const request = work(heads, conversations);
  return new Promise((resolve, reject) => {
    transaction.oncomplete = () => {
      if (mode === "readwrite") changes?.postMessage("changed");
      resolve(request?.result);
    };
    transaction.onabort = () => reject(transaction.error);
  });
}

export function onChangeElsewhere(action) {
  changes?.addEventListener("message", action);
}

export function put(conversation) {
  return transact("readwrite", (heads, conversations) => {
    heads.put(headOf(conversation));
    conversations.put(structuredClone(conversation));
  });
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
  });
}

export function removeAll() {
  return transact("readwrite", (heads_, conversations) => {
    heads_.clear();
    conversations.clear();
  });
}
