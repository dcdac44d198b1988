// What an empty conversation shows: without a model, how to get one; with a model, a place to begin.

import { watchCatalog } from "./catalog.js";
import { fill, h, icon } from "./dom.js";
import { bytes } from "./format.js";
import { DemoCard, Folders, loadText, ModelList, progressBar } from "./modelcards.js";
import { app, emit, on } from "./state.js";

const SUGGESTIONS = [
  ["Explain something", "Explain how a memory cache works, to a ten-year-old."],
  ["Write a story", "Write a short story about a lighthouse keeper who finds a message in a bottle."],
  ["Plan", "Make a plan for learning to cook in four weeks."],
  ["Code", "Write a Python function that finds the longest common prefix of a list of strings."],
];

const element = h("div", { class: "welcome" });
const demo = new DemoCard();
const list = new ModelList();
const folders = new Folders();
const loading = h("div", { class: "card loading-card" });
let stopWatching = null;
let key = "";

function head(title, text) {
  return h("div", { class: "welcome-head" }, h("span", { class: "logo", "aria-hidden": "true" }, icon("stream")), h("h1", { text: title }), h("p", { text }));
}

function firstRun() {
  const found = app.catalog.models.filter((model) => model.path !== app.catalog.demo.path);
  return [
    head("Welcome to LeanStream", "It runs language models that are larger than your memory: part of the weights stays in memory, the rest is read from the drive as it is needed, with the same answers. Everything stays on this computer."),
    h("h2", { text: "Start with the demo model" }),
    demo.element,
    found.length ? h("h2", { text: "Or use a model of your own" }) : h("h2", { text: "Or bring a model of your own" }),
    found.length ? list.element : h("p", { class: "hint", text: "Any GGUF file works, larger than your memory or not. Add the folder that holds it:" }),
    folders.element,
  ];
}

function loadingPage() {
  return [head(app.snapshot.model || "Loading", "You can write already; the answer comes when the model is ready."), loading];
}

function ready() {
  const { budget } = app.config || {};
  const memory = budget ? `It runs within ${bytes(Math.min(budget.bytes || budget.full_bytes, budget.full_bytes))} of memory. ` : "";
  return [
    head(app.snapshot.model, `${memory}What is said here stays on this computer.`),
    h("div", { class: "suggestions" }, SUGGESTIONS.map(([title, text]) => h("button", { type: "button", class: "card suggestion", on: { click: () => emit("suggest", text) } }, h("strong", { text: title }), h("span", { text })))),
  ];
}

function failed() {
  const { error, model } = app.snapshot;
  return [
    head("The model could not be loaded", model || ""),
    h("div", { class: "failure", role: "alert" }, icon("warning"), h("p", { text: error?.message || "No reason was given." })),
    h("div", { class: "row center" }, h("button", { type: "button", class: "button primary", text: "Choose a model", on: { click: () => emit("models:open") } })),
  ];
}

const PAGES = { empty: firstRun, loading: loadingPage, ready, failed };

/** The element; brought up to date by each call, without moving the focus. */
export function welcome() {
  const state = app.snapshot?.state || "";
  const wantsCatalog = state === "empty";
  if (wantsCatalog && !stopWatching) stopWatching = watchCatalog();
  if (!wantsCatalog && stopWatching) {
    stopWatching();
    stopWatching = null;
  }
  if (wantsCatalog) for (const part of [demo, list, folders]) part.draw();
  if (state === "loading") {
    const { load } = app.snapshot;
    fill(loading, progressBar(`Loading ${app.snapshot.model}`, load?.progress ?? null), h("p", { text: load?.total_bytes ? `${loadText(load)} · ${bytes(load.bytes)} of ${bytes(load.total_bytes)} read` : loadText(load) }));
  }
  const wanted = `${state} ${app.snapshot?.model} ${app.config?.budget?.bytes} ${wantsCatalog && app.catalog.models.length > 0} ${app.snapshot?.error?.message}`;
  if (wanted !== key) {
    key = wanted;
    fill(element, PAGES[state] ? PAGES[state]() : []);
  }
  return element;
}

on("snapshot", () => element.isConnected && app.snapshot.state === "loading" && welcome());
