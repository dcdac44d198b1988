// The live panel: what the model takes and does right now, and the settings that act at once.

import { post } from "./api.js";
import { Sparkline } from "./charts.js";
import { attempt, notice } from "./dialogs.js";
import { $, announce, fill, h, icon } from "./dom.js";
import { fidelityControl } from "./fidelity.js";
import { bytes, number, percent, rate } from "./format.js";
import { refreshLive, useConfig } from "./live.js";
import { app, on } from "./state.js";

// Purposes of memory, in the order they are stacked: [field, name, what it is].
const PURPOSES = [
  ["resident_bytes", "Weights, always", "norms, routers, output matrix: always in memory"],
  ["pinned_bytes", "Weights, pinned", "layers that the budget has room for"],
  ["cache_bytes", "Expert cache", "experts and neurons used lately"],
  ["ring_bytes", "Read-ahead", "buffers that the next layers are read into"],
  ["kv_bytes", "Conversation", "keys and values of the context"],
  ["compute_bytes", "Compute", "buffers for the layer being computed"],
  ["metadata_bytes", "Vocabulary", "vocabulary and graphs"],
  ["baseline_bytes", "Program", "this program before the model was loaded"],
  ["margin_bytes", "Margin", "kept free for small things"],
];
const APPLY_MS = 60;

/** The budget in force, or null where there is none that matters: everything fits below it. */
function bound(snapshot = app.snapshot) {
  const budget = snapshot?.budget_bytes;
  const full = app.config?.budget?.full_bytes;
  return budget && (!full || budget <= full) ? budget : null;
}

const charts = {
  memory: new Sparkline("Measured memory", { pick: (s) => s.rss_bytes ?? null, format: bytes, limit: bound }),
  speed: new Sparkline("Speed", { pick: (s) => s.tokens_per_second, format: (v) => (v === null ? "idle" : `${number(v)} tokens/s`) }),
  hits: new Sparkline("Hit ratio", { pick: (s) => s.hit_ratio, format: (v) => (v === null ? "–" : percent(v)), max: 1 }),
  reads: new Sparkline("Read from drive", { pick: (s) => s.read_bytes_per_second ?? null, format: rate }),
};

// ---- memory by purpose ----

const bar = h("div", { class: "memory-bar", role: "img" });
const legend = h("ul", { class: "legend" });
const total = h("p", { class: "memory-total" });

function drawMemory() {
  const { memory } = app.snapshot || {};
  const budget = bound();
  const parts = PURPOSES.map(([key, name, what]) => ({ key, name, what, value: memory?.[key] || 0 })).filter((part) => part.value);
  const sum = memory?.total_bytes || 0;
  const whole = Math.max(budget || 0, sum) || 1;
  fill(
    bar,
    parts.map((part) => {
      const piece = h("span", { class: `piece p-${part.key}`, title: `${part.name}: ${bytes(part.value)}` });
      piece.style.width = `${(part.value / whole) * 100}%`;
      return piece;
    }),
  );
  bar.setAttribute("aria-label", memory ? `memory by purpose, ${bytes(sum)} of ${budget ? bytes(budget) : "no bound"}` : "no model loaded");
  fill(legend, parts.map((part) => h("li", { title: part.what }, h("span", { class: `swatch p-${part.key}` }), h("span", { text: part.name }), h("span", { class: "amount", text: bytes(part.value) }))));
  fill(total, memory ? [h("strong", { text: bytes(sum) }), budget ? ` planned, of ${bytes(budget)}` : " planned; everything is in memory"] : "No model loaded.");
}

// ---- budget ----

const slider = h("input", { type: "range", id: "budget", min: "0", max: "1000", step: "1", "aria-label": "Memory budget" });
const chosen = h("output", { for: "budget", class: "budget-value" });
const more = h("span", { class: "hint" });
const ends = h("div", { class: "budget-ends" });
const presets = h("div", { class: "segments", role: "group", "aria-label": "Budget presets" });
const trouble = h("p", { class: "trouble", role: "alert" });
let wanted = null; // bytes under the thumb, not in force yet
let sending = false;
let dragging = false;

const range = () => {
  const { minimum_bytes: low, full_bytes: high } = app.config.budget;
  return [low, Math.max(high, low + 1)];
};
const toSlider = (value) => Math.round(((value - range()[0]) / (range()[1] - range()[0])) * 1000);
const toBytes = (position) => Math.ceil(range()[0] + (position / 1000) * (range()[1] - range()[0]));

function drawBudget() {
  const active = Boolean(app.config?.active);
  slider.disabled = !active || !app.online;
  for (const button of presets.children) button.disabled = slider.disabled;
  if (!active) {
    chosen.textContent = "–";
    more.textContent = "";
    fill(ends);
    return;
  }
  const { budget } = app.config;
  const [low, high] = range();
  const allowed = wanted ?? budget.bytes;
  const now = Math.min(high, allowed || high);
  if (!dragging && wanted === null) slider.value = String(toSlider(now));
  chosen.textContent = bytes(now);
  more.textContent = allowed && allowed <= high ? "" : allowed ? `all it needs; ${bytes(allowed)} allowed` : "all it needs; no bound set";
  slider.setAttribute("aria-valuetext", chosen.textContent);
  fill(ends, h("span", { text: `${bytes(low)} least` }), h("span", { text: `${bytes(high)} everything` }));
  for (const button of presets.children) {
    button.setAttribute("aria-pressed", String(wanted === null && (button.dataset.budget === "full" ? now >= high : button.dataset.budget === "min" && now <= low)));
  }
}

/** Put the newest wish in force, one request at a time, so that dragging is followed closely and nothing piles up. */
async function send() {
  if (sending || wanted === null) return;
  sending = true;
  try {
    while (wanted !== null) {
      const target = wanted;
      useConfig(await post("/v1/stream/config", { budget: target }));
      if (wanted === target) wanted = null;
      trouble.textContent = "";
    }
    announce(`Memory budget is ${chosen.textContent}.`);
  } catch (error) {
    wanted = null;
    trouble.textContent = error.message;
  } finally {
    sending = false;
    drawBudget();
    refreshLive();
  }
}

function wish(value) {
  wanted = value;
  drawBudget();
  clearTimeout(timer);
  timer = setTimeout(send, APPLY_MS);
}

let timer = 0;
slider.addEventListener("input", () => {
  dragging = true;
  wish(toBytes(Number(slider.value)));
});
slider.addEventListener("change", () => (dragging = false));
for (const [name, label] of [
  ["min", "Least"],
  ["auto", "Automatic"],
  ["full", "Everything"],
]) {
  presets.append(
    h("button", {
      type: "button",
      text: label,
      data: { budget: name },
      on: {
        click: () => {
          const [low, high] = range();
          const target = { min: low, full: high, auto: app.config.budget.automatic_bytes }[name];
          wish(Math.max(low, Math.min(high, target)));
        },
      },
    }),
  );
}

// ---- what the expert cache keeps ----

const policy = h("select", { id: "policy" });
const policyField = h("div", { class: "field inline" }, h("label", { for: "policy", text: "Cache keeps" }), policy);
const POLICY_NAMES = { lfu: "most used (lfu)", lru: "latest used (lru)", slru: "used twice (slru)", lean: "expected next (lean)" };
policy.addEventListener("change", () =>
  attempt(async () => {
    useConfig(await post("/v1/stream/config", { policy: policy.value }));
    notice("In force from the next token.");
  }),
);

function drawPolicy() {
  const names = Object.keys(app.config?.policy?.available || {});
  policyField.hidden = names.length < 2 || !app.snapshot?.memory?.cache_bytes;
  fill(policy, names.map((name) => h("option", { value: name, text: POLICY_NAMES[name] || name })));
  if (app.config) policy.value = app.config.policy.name;
}

// ---- all of it ----

const now = h("div", { class: "now" });

function drawNow() {
  const { state, tokens_per_second: speed, queue, degraded, error } = app.snapshot || {};
  const text = !app.online ? "offline" : state === "ready" ? (speed === null || speed === undefined ? "idle" : "answering") : state || "–";
  fill(
    now,
    h("div", { class: "speed" }, h("strong", { class: speed ? "" : "none", text: speed ? number(speed) : "–" }), h("span", { text: "tokens/s" })),
    h("div", { class: `status s-${text}` }, h("span", { class: "lamp", "aria-hidden": "true" }), text, queue?.waiting ? `, ${queue.waiting} waiting` : ""),
  );
  const words = degraded || error?.message;
  if (words) now.append(h("p", { class: "degraded" }, icon("warning"), words));
}

export function startPanel() {
  const section = (title, ...children) => h("section", {}, h("h3", { text: title }), children);
  fill(
    $("#panel-body"),
    now,
    section("Memory budget", h("div", { class: "budget-head" }, chosen, more), slider, ends, presets, trouble),
    section("Memory by purpose", total, bar, legend, charts.memory.element),
    section("Activity", charts.speed.element, charts.hits.element, charts.reads.element, policyField),
    section("Fidelity", fidelityControl()),
  );
  on("snapshot", () => {
    drawNow();
    drawMemory();
    if (!$("#panel").hidden) for (const chart of Object.values(charts)) chart.draw(app.samples);
  });
  on("config", () => {
    drawBudget();
    drawPolicy();
  });
  on("offline", () => {
    drawNow();
    drawBudget();
  });
  drawNow();
  drawMemory();
  drawBudget();
  drawPolicy();
}
