// The model picker: the button in the header, and the dialog with all models.

import { watchCatalog } from "./catalog.js";
import { showDialog } from "./dialogs.js";
import { $, fill, h, icon } from "./dom.js";
import { loadText, DemoCard, Folders, ModelList } from "./modelcards.js";
import { app, on } from "./state.js";

let shown = null; // {dialog, parts}

export function openModels() {
  if (shown) return;
  const list = new ModelList();
  const demo = new DemoCard();
  const folders = new Folders();
  const none = h("p", { class: "hint", text: "No GGUF files were found in these folders." });
  const parts = {
    draw() {
      list.draw();
      demo.draw();
      folders.draw();
      if (app.catalog.demo.state === "present") demo.element.hidden = true;
      none.hidden = app.catalog.models.length > 0;
    },
  };
  const stop = watchCatalog();
  parts.draw();
  const dialog = showDialog("Models", [list.element, none, demo.element, folders.element], {
    wide: true,
    id: "models-dialog",
    onClose: () => {
      stop();
      shown = null;
    },
  });
  shown = { dialog, parts };
}

function drawButton() {
  const { state, model, load } = app.snapshot || {};
  const button = $("#model-button");
  const names = { empty: "Choose a model", failed: "Loading failed", stopping: "Stopping…" };
  const text = state === "ready" ? model : state === "loading" ? `Loading ${model}` : names[state] || "…";
  const key = `${state} ${text} ${loadText(load)}`;
  if (button.dataset.shows === key) return;
  button.dataset.shows = key;
  fill(
    button,
    h("span", { class: `lamp s-${state}`, "aria-hidden": "true" }),
    h("span", { class: "model-name", text }),
    state === "loading" ? h("span", { class: "load-text", text: loadText(load) }) : null,
    icon("down"),
  );
  const strip = $("#load-strip");
  strip.hidden = state !== "loading";
  strip.firstElementChild.style.width = `${(load?.progress ?? 0.02) * 100}%`;
}

export function startModels() {
  $("#model-button").addEventListener("click", openModels);
  const draw = () => {
    drawButton();
    shown?.parts.draw();
  };
  on("snapshot", draw);
  on("catalog", () => shown?.parts.draw());
  on("models:open", openModels);
  drawButton();
}
