// Calls to the server this page came from: JSON, and event streams through fetch, so that the API key can be sent.

const KEY = "leanstream-key";

/** An answer that says what is wrong; `fields` holds what the server knows about it (used, limit, remedy). */
export class ApiError extends Error {
  constructor(status, error) {
    super(error.message || `the server answered ${status}`);
    this.status = status;
    this.code = error.code || null;
    this.fields = error;
  }
}

/** The server does not answer at all. */
export class OfflineError extends Error {
  constructor() {
    super("The server does not answer.");
    this.code = "offline";
    this.fields = {};
  }
}

/** Take the key from the address (#key=...), keep it for this tab, and take it out of the address. */
export function takeKey() {
  const found = new URLSearchParams(location.hash.slice(1)).get("key");
  if (!found) return;
  setKey(found);
  history.replaceState(null, "", location.pathname);
}

export function setKey(value) {
  sessionStorage.setItem(KEY, value);
}

function headers(body) {
  const found = {};
  const key = sessionStorage.getItem(KEY);
  if (key) found.Authorization = `Bearer ${key}`;
  if (body !== undefined) found["Content-Type"] = "application/json";
  return found;
}

async function answerOf(response) {
  const text = await response.text();
  let document = null;
  try {
    document = text ? JSON.parse(text) : null;
  } catch {
    document = null; // not ours: a proxy's page
  }
  return document;
}

async function send(method, path, body, { signal, keepalive } = {}) {
  let response;
  try {
    response = await fetch(path, {
      method,
      signal,
      keepalive,
      headers: headers(body),
      body: body === undefined ? undefined : JSON.stringify(body),
      cache: "no-store",
    });
  } catch (error) {
    if (error.name === "AbortError" || error.name === "TimeoutError") throw error;
    throw new OfflineError();
  }
  if (response.status === 401) window.dispatchEvent(new CustomEvent("leanstream:key-needed"));
  if (!response.ok) {
    const document = await answerOf(response);
    throw new ApiError(response.status, document?.error || {});
  }
  return response;
}

/** JSON in, JSON out. */
export async function call(method, path, body, options) {
  return answerOf(await send(method, path, body, options));
}

export const get = (path, options) => call("GET", path, undefined, options);
export const post = (path, body = {}, options) => call("POST", path, body, options);
export const patch = (path, body, options) => call("PATCH", path, body, options);

/** A file to be saved. */
export async function blob(path) {
  return (await send("GET", path)).blob();
}

/** The data of each server-sent event, parsed; ends with the stream or its [DONE]. Comments are passed over. */
export async function* events(path, body, { signal } = {}) {
  const response = await send("POST", path, body, { signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      let part;
      try {
        part = await reader.read();
      } catch (error) {
        if (error.name === "AbortError") throw error;
        throw new OfflineError();
      }
      if (part.done) return;
      rest += part.value;
      const lines = rest.split(/\r?\n/);
      rest = lines.pop();
      for (const line of lines) {
        if (!line.startsWith("data:")) continue;
        const data = line.slice(5).trim();
        if (data === "[DONE]") return;
        yield JSON.parse(data);
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
