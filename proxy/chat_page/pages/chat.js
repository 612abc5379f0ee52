// Runs the page: shows a conversation and the list of all, and handles the user's actions.

import { counted } from "/dashboard/format.js";

import { models } from "./api.js";
import { Answering } from "./answering.js";
import { Attachments } from "./attachments.js";
import { addNode, atRest, chooseBranch, newConversation, removeNode, ROOT, shownPath, takeUp } from "./conversation.js";
import { drawIcons } from "./icons.js";
import { MessageList } from "./message_list.js";
import { plainName } from "./plain_text.js";
import { keepSettings, lastSettings, ModelChooser, SettingsForm } from "./settings.js";
import { Sidebar } from "./sidebar.js";
import { SignInDialog } from "./sign_in.js";
import * as store from "./store.js";
import { Toast } from "./toast.js";
import { exported, imported } from "./transfer.js";

const KEEP_MS = 1000; // between two saves of a growing answer
const SPOKEN_CHARS_MAX = 600; // of an answer read out by screen readers
const NARROW = matchMedia("(max-width: 760px)"); // as in chat.css
const byId = (id) => document.getElementById(id);
const prompt = byId("prompt");
const DRAFT = "hearth-chat-draft-"; // followed by an id

let conversation = null; // the shown conversation
const loaded = new Map(); // id -> conversation; keeps the objects of conversations that are being answered
const keeping = new Map(); // id -> the timer of the next save
const removed = new Set(); // ids of deleted conversations, whose stopped answers end later

const toast = new Toast(byId("toast"));
const answering = new Answering({ changed: answerChanged, ended: answerEnded });
const chooser = new ModelChooser(chooseModel);
const settingsForm = new SettingsForm(changeSettings);
const attachments = new Attachments(byId("attachments"), {
  refused: (reason) => toast.tell(reason),
  imageReason: () => chooser.imageReason(),
});
const list = new MessageList(byId("messages"), byId("scroller"), {
  edit, again, branch, results, isBusy, tell: (text) => toast.tell(text),
});
const sidebar = new Sidebar({ open, renamed, remove });
const signIn = new SignInDialog(signedIn);

// ---------------------------------------------------------------- questions and answers

async function send() {
  await attachments.reading;
  const text = prompt.value.trim();
  if ((!text && !attachments.files.length) || answering.isRunning(conversation)) return;
  prompt.value = "";
  keepDraft();
  fitPrompt();
  const parent = shownPath(conversation).at(-1);
  const node = addNode(conversation, parent?.id, { role: "user", content: text, attachments: attachments.take() });
  await ask(node);
}

function edit(node, text) {
  return ask(addNode(conversation, node.parent, { role: "user", content: text, attachments: node.attachments ?? [] }));
}

// Answers again in a new branch; a failed answer without text is replaced.
function again(node) {
  if (isBusy()) return undefined;
  const parent = conversation.nodes[node.parent];
  if (!node.content && !node.thinking && !node.calls.length) removeNode(conversation, node);
  return ask(parent);
}

async function ask(parent) {
  list.isFollowing = true;
  conversation.settings.model = chooser.value;
  loaded.set(conversation.id, conversation);
  const answer = answering.answer(conversation, parent);
  list.show(conversation);
  list.showEnd();
  showState();
  keep(conversation, 0);
  await answer;
}

function results(node, texts) {
  const answer = answering.giveResults(conversation, node, texts);
  list.show(conversation);
  showState();
  return answer;
}

function branch(node, step) {
  if (isBusy()) return;
  const other = chooseBranch(conversation, node, step);
  if (!other) return;
  list.show(conversation);
  list.views.get(other.id)?.root.querySelector(step > 0 ? ".branch-next" : ".branch-previous")?.focus();
  keep(conversation, 0);
}

function isBusy() {
  const isRunning = answering.isRunning(conversation);
  if (isRunning) toast.tell("An answer is being written. Stop it first, or wait for its end.");
  return isRunning;
}

function answerChanged(whose, node) {
  if (whose === conversation) list.changed(node);
  keep(whose, KEEP_MS);
}

function answerEnded(whose, node) {
  keep(whose, 0);
  if (node?.error?.status === 401) signIn.check();
  if (whose !== conversation) return;
  list.show(conversation);
  showState();
  speak(node);
  if (chooser.isUnknown) loadModels(); // the model is loaded now, or the server is back
}

function speak(node) {
  if (!node) return;
  if (node.error) say(`The answer failed: ${node.error.message}`);
  else if (node.isStopped) say("Stopped.");
  else say(`Answer: ${node.content.slice(0, SPOKEN_CHARS_MAX)}${node.content.length > SPOKEN_CHARS_MAX ? " …" : ""}`);
}

function say(text) {
  byId("status").textContent = text;
}

// ---------------------------------------------------------------- conversations

function keep(whose, afterMs) {
  if (afterMs && keeping.has(whose.id)) return;
  clearTimeout(keeping.get(whose.id));
  keeping.set(whose.id, setTimeout(() => keepNow(whose), afterMs));
}

async function keepNow(whose) {
  clearTimeout(keeping.get(whose.id));
  keeping.delete(whose.id);
  if (!Object.keys(whose.nodes).length || removed.has(whose.id)) return;
  try {
    await store.put(whose);
    await sidebar.refresh();
  } catch (error) {
    toast.tell(`The conversation could not be kept: ${error.message}`);
  }
}

async function open(id) {
  const kept = loaded.has(id) ? null : await store.get(id);
  const found = loaded.get(id) ?? (kept && atRest(kept));
  if (!found) return startNew();
  show(found);
  closeDrawer();
  prompt.focus();
  return undefined;
}

function startNew() {
  show(newConversation({ ...lastSettings(), model: chooser.value || lastSettings().model }));
  closeDrawer();
  prompt.focus();
}

function show(found) {
  if (conversation && !answering.isRunning(conversation)) loaded.delete(conversation.id);
  conversation = found;
  loaded.set(found.id, found);
  prompt.value = localStorage.getItem(draftName()) ?? "";
  fitPrompt();
  chooser.choose(found.settings.model);
  sidebar.select(found.id);
  list.show(found);
  list.showEnd();
  showState();
}

async function renamed(id, title) {
  const found = loaded.get(id) ?? (await store.get(id));
  Object.assign(found, { title, isNamed: true });
  await keepNow(found);
  showState();
}

async function remove(id) {
  const found = loaded.get(id) ?? (await store.get(id));
  removed.add(id);
  answering.stop(found);
  await store.remove(id);
  localStorage.removeItem(DRAFT + id);
  loaded.delete(id);
  if (conversation.id === id) startNew();
  await sidebar.refresh();
  toast.tell(`“${plainName(found.title, 40)}” is deleted.`, "Undo", async () => {
    removed.delete(id);
    await store.put(found);
    await sidebar.refresh();
    open(id);
  });
}

// Another tab saved or deleted a conversation.
async function changedElsewhere({ kept, removed: gone }) {
  sidebar.refresh();
  removed.delete(kept); // its deletion was undone
  for (const each of [...loaded.values()].filter(({ id }) => gone === "all" || gone === id)) {
    removed.add(each.id);
    answering.stop(each);
    loaded.delete(each.id);
    if (each === conversation && !isNew()) startNew();
  }
  const found = kept === conversation.id && (await store.get(kept));
  if (!found || found.id !== conversation.id) return;
  takeUp(conversation, found);
  list.show(conversation);
  showState();
}

async function removeAll(event) {
  const button = event.currentTarget;
  const heads = await store.heads();
  if (!heads.length) {
    toast.tell("There are no conversations.");
  } else if (button.dataset.isAsked !== "yes") {
    button.dataset.isAsked = "yes";
    button.textContent = `Delete ${counted(heads.length, "conversation", "conversations")} for good?`;
    return;
  } else {
    for (const each of loaded.values()) {
      removed.add(each.id);
      answering.stop(each);
    }
    for (const name of Object.keys(localStorage)) if (name.startsWith(DRAFT)) localStorage.removeItem(name);
    await store.removeAll();
    loaded.clear();
    startNew();
    await sidebar.refresh();
    toast.tell("All conversations are deleted.");
  }
  button.dataset.isAsked = "";
  button.textContent = "Delete all";
}

async function exportAll() {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([exported(await store.all())], { type: "application/json" }));
  link.download = `hearth-chat-${new Date().toISOString().slice(0, 10)}.json`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}

async function importFile(file) {
  try {
    const found = imported(await file.text());
    for (const each of found) await store.put(each);
    await sidebar.refresh();
    toast.tell(`${counted(found.length, "conversation is", "conversations are")} imported.`);
  } catch (error) {
    toast.tell(error.message);
  }
}

// ---------------------------------------------------------------- settings

// Sends requests again that were refused for a missing key.
async function signedIn() {
  await loadModels();
  const last = shownPath(conversation).at(-1);
  if (last?.error?.status === 401) again(last);
}

async function loadModels() {
  try {
    chooser.show(await models(), conversation.settings.model);
  } catch (error) {
    if (error.status === 401) signIn.ask();
    else toast.tell(error.message);
  }
  showState();
}

function chooseModel(name) {
  conversation.settings.model = name;
  keepSettings({ ...lastSettings(), model: name });
  keep(conversation, 0);
  showState();
}

function changeSettings(settings) {
  Object.assign(conversation.settings, settings);
  keepSettings(conversation.settings);
  keep(conversation, 0);
  showState();
}

// ---------------------------------------------------------------- the composer

function showState() {
  const isRunning = answering.isRunning(conversation);
  const held = document.activeElement;
  if (held === byId(isRunning ? "send" : "stop")) prompt.focus(); // the focused button is hidden now
  byId("stop").hidden = !isRunning;
  byId("send").hidden = isRunning;
  attachments.choose(draftName());
  const place = isNew() ? "" : `#${conversation.id}`; // so that a reload shows the same conversation
  if (location.hash !== place) history.replaceState(null, "", place || location.pathname);
  byId("welcome").hidden = !isNew();
  const title = plainName(conversation.title, 60);
  document.title = title ? `${title} · Hearth` : "Hearth";
  byId("about-model").textContent = chooser.about();
  const reason = chooser.imageReason();
  byId("image-note").textContent = reason ? `Text and PDF files can be attached. ${reason}` : "Images, text and PDF files can be attached.";
  const { hasTools, toolText, system } = conversation.settings;
  const marks = [system.trim() && "system prompt", hasTools && "tools", toolText.trim() && "your tools"].filter(Boolean);
  byId("settings-note").textContent = marks.join(", ");
}

function isNew() {
  return !Object.keys(conversation.nodes).length;
}

function draftName() {
  return DRAFT + (isNew() ? ROOT : conversation.id);
}

function keepDraft() {
  localStorage.removeItem(draftName());
  try {
    if (prompt.value) localStorage.setItem(draftName(), prompt.value);
  } catch {
    // Too long for the browser's storage: the draft lives only as long as the page is open.
  }
}

function fitPrompt() {
  prompt.rows = Math.min(12, Math.max(1, prompt.value.split("\n").length));
  prompt.style.height = "auto";
  prompt.style.height = `${prompt.scrollHeight + 2}px`;
}

function openDrawer() {
  document.body.classList.add("drawer");
  byId("close-sidebar").focus();
  byId("main").inert = true; // the page behind the sidebar takes no input
}

function closeDrawer() {
  byId("main").inert = false;
  if (byId("sidebar").contains(document.activeElement)) byId("open-sidebar").focus();
  document.body.classList.remove("drawer");
}

// ---------------------------------------------------------------- the user's actions

function onKey(event) {
  if (document.querySelector("dialog[open]")) return;
  if ((event.metaKey || event.ctrlKey) && event.key.toLowerCase() === "k") {
    event.preventDefault();
    startNew();
  } else if (event.key === "Escape") {
    if (document.body.classList.contains("drawer")) closeDrawer();
    else if (answering.isRunning(conversation)) answering.stop(conversation);
  } else if (event.key === "ArrowUp" && event.target === prompt && !prompt.value) {
    list.last("user")?.edit();
    event.preventDefault();
  }
}

function listenToComposer() {
  byId("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  prompt.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    send();
  });
  prompt.addEventListener("input", () => {
    keepDraft();
    fitPrompt();
  });
  prompt.addEventListener("paste", (event) => {
    if (!event.clipboardData.files.length) return;
    event.preventDefault();
    attachments.add([...event.clipboardData.files]);
  });
  byId("attach").addEventListener("click", () => byId("file").click());
  byId("file").addEventListener("change", async (event) => {
    await attachments.add([...event.target.files]);
    event.target.value = "";
  });
  byId("stop").addEventListener("click", () => answering.stop(conversation));
}

function listenToDrops() {
  const main = byId("main");
  main.addEventListener("dragover", (event) => {
    if (!event.dataTransfer.types.includes("Files")) return;
    event.preventDefault();
    main.classList.add("dropping");
  });
  main.addEventListener("dragleave", (event) => {
    if (!main.contains(event.relatedTarget)) main.classList.remove("dropping");
  });
  main.addEventListener("drop", (event) => {
    main.classList.remove("dropping");
    if (!event.dataTransfer.files.length) return;
    event.preventDefault();
    attachments.add([...event.dataTransfer.files]);
  });
}

function listen() {
  listenToComposer();
  listenToDrops();
  document.addEventListener("keydown", onKey);
  document.querySelector(".skip").addEventListener("click", (event) => {
    event.preventDefault(); // the address already names the conversation
    prompt.focus();
  });
  byId("new-chat").addEventListener("click", startNew);
  byId("new-chat-top").addEventListener("click", startNew);
  byId("open-sidebar").addEventListener("click", openDrawer);
  byId("close-sidebar").addEventListener("click", closeDrawer);
  byId("scrim").addEventListener("click", closeDrawer);
  NARROW.addEventListener("change", closeDrawer);
  byId("open-settings").addEventListener("click", () => settingsForm.open(conversation.settings));
  byId("export").addEventListener("click", exportAll);
  byId("import").addEventListener("click", () => byId("import-file").click());
  byId("import-file").addEventListener("change", async (event) => {
    await importFile(event.target.files[0]);
    event.target.value = "";
  });
  byId("delete-all").addEventListener("click", removeAll);
  window.addEventListener("pagehide", () => {
    for (const each of loaded.values()) if (answering.isRunning(each)) keepNow(each);
  });
  store.onChangeElsewhere(changedElsewhere);
  window.addEventListener("hashchange", () => location.hash && open(location.hash.slice(1)));
}

async function begin() {
  drawIcons();
  listen();
  const id = location.hash.slice(1);
  startNew();
  try {
    if (id) await open(id);
    await sidebar.refresh();
  } catch (error) {
    toast.tell(`Conversations cannot be kept in this browser: ${error.message}`);
  }
  try {
    if (await signIn.check()) await loadModels();
  } catch (error) {
    toast.tell(error.message);
  }
}

begin();
