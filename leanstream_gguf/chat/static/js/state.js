// What the page knows, and who wants to hear when it changes. Other tabs hear of saved changes too.

const listeners = new Map();

export const app = {
  online: true,
  started: false, // the first answer of the server has arrived
  page: { preferences: {}, can_quit: false, version: "" }, // GET /chat/api/state
  conversations: [], // of the list, newest first
  query: "", // of the search field
  current: null, // the open conversation with its messages; null = a new one that is not saved yet
  writing: new Map(), // conversation id -> the Generation that writes in it, in this tab
  draft: { system: "", settings: {} }, // of that new one
  snapshot: null, // GET /v1/stream/stats
  samples: [], // of the last minute, oldest first
  config: null, // GET /v1/stream/config; null without a model
  loaded: { model: null }, // GET /chat/api/loaded
  catalog: { models: [], folders: [], demo: { state: "absent" } }, // GET /chat/api/models
};

export function on(name, handler) {
  if (!listeners.has(name)) listeners.set(name, []);
  listeners.get(name).push(handler);
}

export function emit(name, detail) {
  for (const handler of listeners.get(name) || []) handler(detail);
}

const channel = "BroadcastChannel" in window ? new BroadcastChannel("leanstream") : null;

/** Tell the other tabs. */
export function tellTabs(message) {
  channel?.postMessage(message);
}

channel?.addEventListener("message", ({ data }) => emit(`tab:${data.kind}`, data));

// ---- the tree of messages ----

/** The messages from the first one to `leafId`. */
export function branch(conversation, leafId = conversation.leaf_id) {
  const byId = new Map(conversation.messages.map((message) => [message.id, message]));
  const shown = [];
  for (let message = byId.get(leafId); message; message = byId.get(message.parent_id)) shown.unshift(message);
  return shown;
}

/** The other versions of a message, itself included, oldest first. */
export const siblings = (conversation, message) => conversation.messages.filter((other) => other.parent_id === message.parent_id);

/** The last message below one, following the newest versions. */
export function leafBelow(conversation, id) {
  for (;;) {
    const next = conversation.messages.filter((message) => message.parent_id === id).at(-1);
    if (!next) return id;
    id = next.id;
  }
}
