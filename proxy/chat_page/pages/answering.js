// Asks the model for an answer and writes it into the conversation as it comes.

import { openChat, prefill } from "./api.js";
import { addNode, children, requestMessages } from "./conversation.js";
import { isOwn, offered, run } from "./tools.js";

export const ROUNDS_MAX = 8; // rounds of tool calls without the user
const PREFILL_POLL_MS = 700;

export class Answering {
  // Calls `changed(conversation, node)` after each change of a message, and `ended` at the end of an answer.
  constructor({ changed, ended }) {
    this.changed = changed;
    this.ended = ended;
    this.running = new Map(); // conversation's id -> the AbortController of its answer
  }

  isRunning(conversation) {
    return this.running.has(conversation.id);
  }

  stop(conversation) {
    this.running.get(conversation.id)?.abort();
  }

  // Answers the message `parent`, and continues while the model calls the page's own tools.
  async answer(conversation, parent) {
    if (this.isRunning(conversation)) return;
    const controller = new AbortController();
    this.running.set(conversation.id, controller);
    let node = null;
    try {
      for (let round = 0; parent && round < ROUNDS_MAX; round += 1) {
        node = addNode(conversation, parent.id, newAnswer(conversation));
        await this.#stream(conversation, parent, node, controller.signal);
        parent = this.#runTools(conversation, node);
      }
      node.isAtRoundsMax = parent !== null;
    } finally {
      this.running.delete(conversation.id);
      this.ended(conversation, node);
    }
  }

  async #stream(conversation, parent, node, signal) {
    const began = performance.now();
    this.changed(conversation, node);
    try {
      const answer = await openChat(body(conversation, parent), `page-${conversation.id}`, signal);
      node.servedBy = answer.servedBy ?? "";
      this.#watchPrefill(conversation, node, answer.requestId, signal); // runs until the answer begins
      for await (const chunk of answer.chunks) {
        if (take(node, chunk) && node.firstAfter === null) node.firstAfter = (performance.now() - began) / 1000;
        this.changed(conversation, node);
      }
    } catch (error) {
      if (error.name !== "AbortError") node.error = { message: error.message, status: error.status ?? 0, code: error.code ?? "" };
      else node.isStopped = true;
    } finally {
      node.elapsed = (performance.now() - began) / 1000;
      node.isRunning = false;
      node.prefill = null;
      this.changed(conversation, node);
    }
  }

  // Updates the progress of the prefill until the answer begins.
  async #watchPrefill(conversation, node, requestId, signal) {
    const waits = () => node.isRunning && node.firstAfter === null && !signal.aborted;
    while (requestId && waits()) {
      await new Promise((resolve) => setTimeout(resolve, PREFILL_POLL_MS));
      const row = waits() ? await prefill(requestId, signal).catch(() => null) : null;
      if (row && waits()) {
        node.prefill = row;
        this.changed(conversation, node);
      }
    }
  }

  // Runs the calls if all are of the page's own tools; returns the last result, or null.
  #runTools(conversation, node) {
    if (node.error || node.isStopped || !node.calls.length) return null;
    const { settings } = conversation;
    if (!node.calls.every((call) => isOwn(call.name, settings))) return null; // the user writes the results of other tools
    let parent = node;
    for (const call of node.calls) {
      parent = addNode(conversation, parent.id, toolResult(call, run(call.name, call.text)));
      this.changed(conversation, parent);
    }
    return parent;
  }

  // Adds the results that the user wrote, one for each call, and continues the answer.
  giveResults(conversation, node, texts) {
    let parent = node;
    node.calls.forEach((call, index) => {
      const own = isOwn(call.name, conversation.settings);
      parent = addNode(conversation, parent.id, toolResult(call, own ? run(call.name, call.text) : texts[index]));
    });
    return this.answer(conversation, parent);
  }
}

export function needsResults(conversation, node) {
  const isDone = !node.isRunning && !node.error && !node.isStopped;
  return isDone && node.calls?.length > 0 && !children(conversation, node.id).length;
}

function newAnswer(conversation) {
  return {
    role: "assistant", content: "", thinking: "", calls: [], model: conversation.settings.model, isRunning: true,
    firstAfter: null, elapsed: 0, usage: null, error: null, isStopped: false, finish: "", prefill: null, servedBy: "",
  };
}

function toolResult(call, content) {
  return { role: "tool", content, callId: call.id, name: call.name };
}

function body(conversation, parent) {
  const { settings } = conversation;
  const asked = { model: settings.model, messages: requestMessages(conversation, parent) };
  if (settings.temperature !== null) asked.temperature = settings.temperature;
  if (settings.maxTokens !== null) asked.max_tokens = settings.maxTokens;
  if (settings.thinking !== "auto") asked.enable_thinking = settings.thinking === "on";
  const tools = offered(settings);
  if (tools.length) asked.tools = tools;
  return asked;
}

// Adds a chunk of the stream to the message; returns whether it has a part of the answer.
function take(node, chunk) {
  if (chunk.usage) node.usage = chunk.usage;
  if (chunk.prefill) node.prefill = chunk.prefill;
  const choice = chunk.choices?.[0];
  if (!choice) return false;
  if (choice.finish_reason) node.finish = choice.finish_reason;
  const delta = choice.delta ?? {};
  const thought = delta.reasoning_content ?? delta.reasoning ?? "";
  node.thinking += thought;
  node.content += delta.content ?? "";
  for (const call of delta.tool_calls ?? []) takeCall(node.calls, call);
  return Boolean(thought || delta.content || delta.tool_calls?.length);
}

// The `index` of a call need not be its position in `calls`: some servers number calls otherwise.
function takeCall(calls, { index = 0, id, function: told }) {
  let call = calls.find((each) => each.index === index);
  if (!call) {
    call = { index, id: id ?? `call-${calls.length}`, name: "", text: "" };
    calls.push(call);
  }
  call.name ||= told?.name ?? "";
  call.text += told?.arguments ?? "";
}
