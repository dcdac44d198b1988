// The list of conversations and the open one: loading, saving, and keeping several tabs alike.

import { ApiError, call, get, patch, post } from "./api.js";
import { app, emit, on, tellTabs } from "./state.js";

const API = "/chat/api";
const OPEN = "leanstream-open"; // of this tab

export async function refreshList() {
  const query = app.query.trim();
  const { conversations } = await get(`${API}/conversations?q=${encodeURIComponent(query)}`);
  if (query !== app.query.trim()) return; // typed on meanwhile
  app.conversations = conversations;
  emit("conversations");
}

function opened(conversation) {
  app.current = conversation;
  if (conversation) sessionStorage.setItem(OPEN, conversation.id);
  else sessionStorage.removeItem(OPEN);
  emit("current");
}

/** A freshly loaded conversation; a message that this tab is writing is newer here than in the store. */
function adopt(fresh) {
  const generation = app.writing.get(fresh.id);
  if (generation?.message) {
    const at = fresh.messages.findIndex((message) => message.id === generation.message.id);
    if (at < 0) fresh.messages.push(generation.message);
    else fresh.messages[at] = generation.message;
    fresh.leaf_id = generation.message.id;
    generation.conversation = fresh;
  }
  return fresh;
}

export async function open(id) {
  opened(adopt(await get(`${API}/conversations/${id}`)));
}

/** The one that was open in this tab, after a reload. */
export async function reopen() {
  const id = sessionStorage.getItem(OPEN);
  startNew();
  if (!id) return;
  try {
    await open(id);
  } catch (error) {
    if (!(error instanceof ApiError)) throw error; // one that was deleted is no longer open
  }
}

/** An empty page; saved with its first message. */
export function startNew() {
  app.draft = { system: app.page.preferences.defaults?.system || "", settings: { ...(app.page.preferences.defaults?.settings || {}) } };
  opened(null);
}

function changed(id) {
  tellTabs({ kind: "changed", id });
  return refreshList();
}

/** The open conversation, created from the draft if it is not saved yet. */
export async function ensureCurrent() {
  if (app.current) return app.current;
  const conversation = await post(`${API}/conversations`, { system: app.draft.system, settings: app.draft.settings });
  opened(conversation);
  return conversation;
}

/** Add a message after `parentId` and show its branch. */
export async function addMessage(conversation, message) {
  const added = await post(`${API}/conversations/${conversation.id}/messages`, message);
  if (!conversation.messages.some((known) => known.id === added.id)) conversation.messages.push(added);
  Object.assign(conversation, { leaf_id: added.id, updated: added.updated });
  if (app.current?.id === conversation.id) emit("current");
  await changed(conversation.id);
  const listed = app.conversations.find((item) => item.id === conversation.id);
  if (listed) conversation.title = listed.title;
  return added;
}

// Saves that failed because the server was away, by message; the newest wins.
const unsaved = new Map();

/** Save a message. A server that is away gets it when it is back. */
export async function saveMessage(conversation, message, { final = false, keepalive = false } = {}) {
  const body = { content: message.content, state: message.state, meta: message.meta };
  try {
    await patch(`${API}/messages/${message.id}`, body, { keepalive });
    unsaved.delete(message.id);
    if (final) await changed(conversation.id);
  } catch (error) {
    if (error instanceof ApiError) throw error;
    if (final) unsaved.set(message.id, { conversation, message });
  }
}

on("online", async () => {
  for (const { conversation, message } of [...unsaved.values()]) await saveMessage(conversation, message, { final: true });
});

export async function change(conversation, values) {
  const { messages, ...rest } = await patch(`${API}/conversations/${conversation.id}`, values);
  Object.assign(conversation, rest);
  if (app.current?.id === conversation.id) {
    if (app.current !== conversation) Object.assign(app.current, rest);
    emit("current");
  }
  await changed(conversation.id);
}

export async function remove(id) {
  await call("DELETE", `${API}/conversations/${id}`);
  if (app.current?.id === id) startNew();
  await changed(id);
}

on("tab:changed", async ({ id }) => {
  await refreshList();
  if (app.current?.id !== id) return;
  try {
    const fresh = await get(`${API}/conversations/${id}`);
    if (app.current?.id !== id || fresh.updated < app.current.updated) return; // asked before our own last change
    app.current = adopt(fresh);
    emit("current");
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    startNew(); // deleted in another tab
  }
});
