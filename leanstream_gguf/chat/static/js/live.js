// The connection to the server: asks for a snapshot twice a second, says when the server is gone and when it is back.
//
// Short requests, not one long stream: a browser opens at most six connections to a host, and every tab would keep one.

import { ApiError, get } from "./api.js";
import { app, emit } from "./state.js";

const INTERVAL_MS = 500;
const HIDDEN_INTERVAL_MS = 5000;
const TIMEOUT_MS = 8000;
const WINDOW_S = 60;

let timer = 0;
let configKey = "";

function keep(snapshot) {
  if (app.samples.at(-1)?.sequence === snapshot.sequence && app.samples.at(-1)?.time === snapshot.time) return;
  if (app.samples.length && snapshot.time < app.samples.at(-1).time) app.samples = []; // another server process
  app.samples.push(snapshot);
  while (app.samples[0].time < snapshot.time - WINDOW_S - 1) app.samples.shift();
}

async function refreshConfig(snapshot) {
  const key = `${snapshot.state} ${snapshot.model} ${snapshot.budget_bytes}`; // a reload passes through "loading"
  if (key === configKey) return;
  configKey = key;
  if (snapshot.state !== "ready") app.config = null;
  try {
    app.loaded = await get("/chat/api/loaded");
    app.config = snapshot.state === "ready" ? await get("/v1/stream/config") : null;
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    app.config = null; // the model was unloaded meanwhile
  }
  emit("config");
}

function setOnline(online) {
  if (app.online === online) return;
  app.online = online;
  if (!online) configKey = "";
  emit(online ? "online" : "offline");
}

async function once() {
  const snapshot = await get("/v1/stream/stats", { signal: AbortSignal.timeout(TIMEOUT_MS) });
  const before = app.snapshot;
  app.snapshot = snapshot;
  keep(snapshot);
  app.started = true;
  setOnline(true);
  await refreshConfig(snapshot);
  emit("snapshot", { changed: before?.state !== snapshot.state || before?.model !== snapshot.model });
}

async function tick() {
  clearTimeout(timer);
  try {
    await once();
  } catch (error) {
    if (!(error instanceof ApiError)) setOnline(false);
  }
  timer = setTimeout(tick, document.hidden ? HIDDEN_INTERVAL_MS : INTERVAL_MS);
}

/** Begin, with the last minute's samples so that the charts are not empty after a reload. */
export async function startLive() {
  try {
    app.samples = (await get("/v1/stream/history")).samples;
  } catch {
    app.samples = [];
  }
  await tick();
  document.addEventListener("visibilitychange", () => !document.hidden && tick());
}

/** Ask again now, after something was changed. */
export const refreshLive = tick;

/** The budget or a policy was changed: read back what is in force. */
export function useConfig(config) {
  app.config = config;
  emit("config");
}
