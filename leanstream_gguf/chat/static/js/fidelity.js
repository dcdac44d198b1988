// The fidelity switch: exact or, where the file carries a calibration, lossy choices with their measured cost beside them.

import { post } from "./api.js";
import { attempt } from "./dialogs.js";
import { fill, h } from "./dom.js";
import { useConfig } from "./live.js";
import { app, on } from "./state.js";

const TEXTS = {
  exact: ["Exact", "The output of llama.cpp, at every budget."],
  faithful: ["Faithful", "A sketch chooses which neurons are read."],
  threshold: ["Threshold", "Small neurons are skipped."],
};

const small = (value) => (value !== 0 && Math.abs(value) < 0.001 ? value.toExponential(1) : value.toFixed(4));
const signed = (share) => `${share > 0 ? "+" : ""}${(share * 100).toFixed(Math.abs(share) < 0.001 ? 2 : 1)} %`;

/** "KL 0.0123 · perplexity +0.4 %": what was measured, in words; null if nothing was. */
export function costText(quality) {
  if (!quality) return null;
  const parts = [];
  if (typeof quality.kl === "number") parts.push(`KL ${small(quality.kl)}`);
  if (typeof quality.perplexity_change === "number") parts.push(`perplexity ${signed(quality.perplexity_change)}`);
  if (typeof quality.recall === "number") parts.push(`recall ${(quality.recall * 100).toFixed(1)} %`);
  if (!parts.length) return null;
  const floor = typeof quality.noise_floor === "number" ? ` (llama.cpp's own noise: KL ${small(quality.noise_floor)})` : "";
  return `measured: ${parts.join(" · ")}${floor}`;
}

/** A choice's identity: a threshold is offered once for every KL it was calibrated for. */
const keyOf = ({ name, max_kl: limit }) => (name === "threshold" ? `threshold ${limit}` : name);

async function choose(option) {
  const body = { fidelity: option.name };
  if (option.name === "threshold") body.thresholds = { max_kl: option.max_kl };
  const config = await attempt(() => post("/v1/stream/config", body));
  if (!config) return draw(true);
  useConfig(config);
  return undefined;
}

const group = h("div", { class: "choices", role: "radiogroup", "aria-label": "Fidelity" });

function optionElement(option, current) {
  const [title, text] = TEXTS[option.name] || [option.name, ""];
  const key = keyOf(option);
  const input = h("input", { type: "radio", name: "fidelity", value: key, checked: key === current, on: { change: () => choose(option) } });
  const limit = option.name === "threshold" && option.max_kl ? `, KL at most ${option.max_kl}` : "";
  const badges = option.exact
    ? h("span", { class: "badge good", text: "lossless" })
    : h("span", { class: `badge ${option.quality?.within_noise_floor ? "accent" : "warn"}`, text: option.quality?.within_noise_floor ? "within noise" : "lossy" });
  const cost = option.exact ? null : h("small", { class: "cost", text: costText(option.quality) || "its cost was not measured for this file" });
  return h("label", { class: "choice" }, input, h("span", {}, h("strong", { text: title + limit }), badges, h("small", { text }), cost));
}

let drawn = "";
function draw(again = false) {
  const fidelity = app.config?.fidelity;
  const key = JSON.stringify(fidelity ?? null);
  if (key === drawn && again !== true) return;
  drawn = key;
  const options = fidelity?.available || [];
  fill(
    group,
    options.map((option) => optionElement(option, keyOf(fidelity))),
    options.length === 1 ? h("p", { class: "hint", text: "Lossy choices appear here, with what they cost, for files that carry a calibration." }) : null,
    options.length ? null : h("p", { class: "hint", text: "No model loaded." }),
  );
}

export function fidelityControl() {
  on("config", () => draw());
  draw();
  return group;
}
