// Answers: ask the model, show the text as it comes, save it now and then, stop, try again.

import { ApiError, events } from "./api.js";
import { addMessage, change, ensureCurrent, saveMessage } from "./conversations.js";
import { announce } from "./dom.js";
import { app, branch, emit, on, tellTabs } from "./state.js";

const SAVE_EVERY_MS = 1000;
const TELL_EVERY_MS = 150;

export const DEFAULTS = { temperature: 0.7, top_p: 0.95, min_p: 0.05, top_k: 40, repeat_penalty: 1.0, max_tokens: 1024 };

const running = app.writing;

export const isWriting = (conversation) => Boolean(conversation && running.has(conversation.id));

/** The text of a message as the model reads it: attached files come after what was typed. */
export function promptText(message) {
  const files = message.attachments.map(({ name, text }) => {
    const longest = Math.max(2, ...[...text.matchAll(/`+/g)].map((run) => run[0].length));
    const fence = "`".repeat(longest + 1);
    return `File ${name}:\n${fence}\n${text}\n${fence}`;
  });
  return [message.content, ...files].filter(Boolean).join("\n\n");
}

/** A model that thinks aloud is not shown its own thoughts again. */
const withoutThoughts = (text) => text.replace(/^\s*<think>[\s\S]*?<\/think>\s*/, "");

function request(conversation, leafId, skipped) {
  const history = branch(conversation, leafId).filter((message) => message.state !== "failed" || message.content);
  const kept = history.slice(skipped);
  const messages = kept.map((message) => ({
    role: message.role,
    content: message.role === "user" ? promptText(message) : withoutThoughts(message.content),
  }));
  if (conversation.system) messages.unshift({ role: "system", content: conversation.system });
  const settings = { ...DEFAULTS, ...conversation.settings };
  return { model: app.snapshot?.model || undefined, messages, stream: true, stream_options: { include_usage: true }, ...settings };
}

class Generation {
  constructor(conversation, message, skipped) {
    this.conversation = conversation;
    this.message = message;
    this.skipped = skipped;
    this.controller = new AbortController();
    this.started = performance.now();
    this.firstToken = null;
    this.lastToken = null;
    this.nChunks = 0;
    this.usage = null;
    this.saved = this.told = performance.now();
    message.generation = this;
  }

  stop() {
    this.controller.abort();
  }

  async run() {
    const { message } = this;
    let state = "complete";
    try {
      const body = request(this.conversation, message.parent_id, this.skipped);
      for await (const chunk of events("/v1/chat/completions", body, { signal: this.controller.signal })) this.take(chunk);
    } catch (error) {
      if (this.leaving) return; // saved by the handler below
      state = error.name === "AbortError" ? "stopped" : "failed";
      if (state === "failed") message.meta.error = { message: error.message, code: error.code || null, ...(error.fields || {}) };
    }
    this.measure();
    message.state = state;
    delete message.generation;
    const { conversation } = this; // loaded anew, perhaps, meanwhile
    running.delete(conversation.id);
    emit("writing", conversation);
    tellTabs({ kind: "text", id: message.id, content: message.content, state });
    announce(state === "complete" ? "Answer finished." : state === "stopped" ? "Answer stopped." : `Answer failed: ${message.meta.error.message}`);
    if (app.current?.id === conversation.id) emit("current");
    await saveMessage(conversation, message, { final: true });
  }

  take(chunk) {
    if (chunk.error) throw new ApiError(200, chunk.error);
    if (chunk.usage) this.usage = chunk.usage;
    const choice = chunk.choices?.[0];
    if (choice?.finish_reason) this.message.meta.finish_reason = choice.finish_reason;
    const text = choice?.delta?.content;
    if (!text) return;
    const now = performance.now();
    this.firstToken ??= now;
    this.lastToken = now;
    this.nChunks += 1;
    this.message.content += text;
    emit("text", this.message);
    if (now - this.told > TELL_EVERY_MS) {
      this.told = now;
      tellTabs({ kind: "text", id: this.message.id, content: this.message.content, state: "writing" });
    }
    if (now - this.saved > SAVE_EVERY_MS) {
      this.saved = now;
      saveMessage(this.conversation, this.message).catch(() => this.stop()); // deleted in another tab
    }
  }

  measure() {
    const { meta } = this.message;
    const n = this.usage?.completion_tokens ?? this.nChunks;
    meta.completion_tokens = n;
    if (this.usage) meta.prompt_tokens = this.usage.prompt_tokens;
    if (this.firstToken === null) return;
    meta.first_token_seconds = (this.firstToken - this.started) / 1000;
    const seconds = (this.lastToken - this.firstToken) / 1000;
    if (n > 1 && seconds > 0) meta.tokens_per_second = (n - 1) / seconds;
  }
}

async function answer(conversation, parentId, skipped = 0) {
  if (isWriting(conversation)) return;
  const placeholder = { id: "", generation: null };
  running.set(conversation.id, placeholder); // no second answer while this one is being created
  try {
    const meta = { model: app.snapshot?.model || null, fidelity: app.config?.fidelity?.name || null };
    const message = await addMessage(conversation, { role: "assistant", content: "", parent_id: parentId, meta, state: "writing" });
    // Another tab's news may have replaced the objects meanwhile.
    const shown = app.current?.id === conversation.id ? app.current : conversation;
    const target = shown.messages.find((item) => item.id === message.id) || message;
    const generation = new Generation(shown, target, skipped);
    running.set(conversation.id, generation);
    emit("writing", conversation);
    emit("current");
    announce("The model is answering.");
    await generation.run();
  } finally {
    running.delete(conversation.id);
    emit("writing", conversation);
  }
}

/** Send what was typed. */
export async function ask(text, attachments) {
  const conversation = await ensureCurrent();
  const question = await addMessage(conversation, { role: "user", content: text, parent_id: conversation.leaf_id, attachments });
  await answer(conversation, question.id);
}

/** Another answer to the same question; the old one stays as a version. `skipped` leaves out the oldest messages. */
export function retry(message, skipped = 0) {
  return answer(app.current, message.parent_id, skipped);
}

/** The question in other words: a new version, and its answer. */
export async function edit(message, text) {
  const conversation = app.current;
  const { attachments, parent_id } = message;
  const question = await addMessage(conversation, { role: "user", content: text, parent_id, attachments });
  await answer(conversation, question.id);
}

export function stop(conversation) {
  running.get(conversation?.id)?.stop?.();
}

/** Show the branch that ends below this message. */
export function showVersion(conversation, leafId) {
  return change(conversation, { leaf_id: leafId });
}

// The text so far survives closing the tab in the middle of an answer.
window.addEventListener("pagehide", () => {
  for (const generation of running.values()) {
    if (!generation.message) continue;
    generation.leaving = true;
    generation.message.state = "stopped";
    saveMessage(generation.conversation, generation.message, { keepalive: true });
  }
});

on("tab:text", ({ id, content, state }) => {
  const message = app.current?.messages.find((item) => item.id === id);
  if (!message || message.generation) return;
  message.content = content;
  message.state = state;
  message.heard = Date.now();
  emit("text", message);
});
