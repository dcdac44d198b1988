// Models on this computer: the list with what each needs, loading, folders, the demo model.

import { get, post } from "./api.js";
import { attempt } from "./dialogs.js";
import { refreshLive } from "./live.js";
import { app, emit, on } from "./state.js";

const POLL_MS = 700;
let watching = 0; // how many parts of the page show the list
let timer = 0;

const unfinished = () => app.catalog.demo.state === "downloading" || app.catalog.models.some((model) => model.needs === null);

export async function refreshCatalog() {
  app.catalog = await get("/chat/api/models");
  emit("catalog");
}

async function poll() {
  clearTimeout(timer);
  if (app.online) await refreshCatalog().catch(() => {});
  if (watching && (unfinished() || !app.online)) timer = setTimeout(poll, POLL_MS);
}

/** Keep the list fresh while it is shown; returns what to call when it no longer is. */
export function watchCatalog() {
  watching += 1;
  poll();
  return () => (watching -= 1);
}

export async function loadModel(model, options = {}) {
  await attempt(() => post("/chat/api/models/load", { path: model.path, ...options }));
  await refreshLive();
}

export async function unloadModel() {
  await attempt(() => post("/v1/stream/unload"));
  await refreshLive();
}

export const estimate = (model, memory) => post("/chat/api/models/estimate", { path: model.path, memory });

export async function addFolder(path) {
  const done = await attempt(() => post("/chat/api/folders", { path }).then(() => true));
  await poll();
  return Boolean(done);
}

export async function removeFolder(path) {
  await attempt(() => post("/chat/api/folders/remove", { path }));
  await poll();
}

export async function startDemo() {
  await attempt(() => post("/chat/api/demo"));
  await poll();
}

export async function cancelDemo() {
  await attempt(() => post("/chat/api/demo/cancel"));
  await poll();
}

/** The demo model as an entry of the list, once it is there. */
export const demoModel = () => app.catalog.models.find((model) => model.path === app.catalog.demo.path);

on("online", poll);
