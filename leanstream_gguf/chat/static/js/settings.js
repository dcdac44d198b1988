// Two dialogs: the settings of a conversation (system prompt, sampling), and those of the page (theme, defaults, about).

import { call, post } from "./api.js";
import { change } from "./conversations.js";
import { attempt, confirmed, field, notice, showDialog } from "./dialogs.js";
import { $, fill, h, icon } from "./dom.js";
import { DEFAULTS } from "./generate.js";
import { app, emit } from "./state.js";

const SAMPLING = [
  ["temperature", "Temperature", { min: 0, max: 2, step: 0.05 }, "0 always takes the likeliest token; higher is more varied."],
  ["top_p", "Top P", { min: 0, max: 1, step: 0.01 }, "Sample from the likeliest tokens that make up this probability."],
  ["min_p", "Min P", { min: 0, max: 1, step: 0.01 }, "Leave out tokens less likely than this share of the likeliest."],
  ["top_k", "Top K", { min: 0, max: 200, step: 1 }, "Sample from this many tokens; 0 = all."],
  ["repeat_penalty", "Repeat penalty", { min: 0.8, max: 2, step: 0.01 }, "Above 1 discourages repeating."],
  ["max_tokens", "Longest answer", { min: 1, max: 100000, step: 1 }, "In tokens."],
  ["seed", "Seed", { min: 0, max: 4294967295, step: 1 }, "The same seed and settings give the same answer. Empty: a new one each time."],
];

export async function keepPreference(key, value) {
  app.page.preferences[key] = value;
  await attempt(() => call("PUT", `/chat/api/preferences/${key}`, value));
}

function samplingFields(values) {
  const inputs = new Map();
  const fields = SAMPLING.map(([name, label, limits, hint]) => {
    const input = h("input", { type: "number", inputmode: "decimal", ...limits, value: String(values[name] ?? DEFAULTS[name] ?? ""), placeholder: name === "seed" ? "random" : "" });
    inputs.set(name, input);
    return field(label, input, hint);
  });
  const read = () => {
    const found = {};
    for (const [name, input] of inputs) {
      if (input.value === "" || !input.checkValidity()) continue;
      if (Number(input.value) !== DEFAULTS[name]) found[name] = Number(input.value);
    }
    return found;
  };
  const invalid = () => [...inputs.values()].find((input) => !input.reportValidity());
  const reset = () => {
    for (const [name, input] of inputs) input.value = String(DEFAULTS[name] ?? "");
  };
  return { grid: h("div", { class: "sampling" }, fields), read, invalid, reset };
}

/** System prompt and sampling of the open conversation, or of the next one. */
export function openChatSettings() {
  const target = app.current || app.draft;
  const system = h("textarea", { rows: "5", value: target.system, placeholder: "You are a helpful assistant." });
  const sampling = samplingFields(target.settings);
  const asDefault = h("input", { type: "checkbox" });
  const save = async () => {
    if (sampling.invalid()) return;
    const values = { system: system.value, settings: sampling.read() };
    if (app.current) await attempt(() => change(app.current, values));
    else Object.assign(app.draft, values);
    if (asDefault.checked) await keepPreference("defaults", values);
    dialog.close();
    notice(asDefault.checked ? "Saved, for new conversations too." : "Saved.");
  };
  const dialog = showDialog(
    "Conversation settings",
    [
      field("System prompt", system, "What the model is told before the conversation."),
      h("div", { class: "row between" }, h("h3", { text: "Sampling" }), h("button", { type: "button", class: "link", text: "Reset", on: { click: sampling.reset } })),
      sampling.grid,
      h("label", { class: "check" }, asDefault, "Use for new conversations too"),
    ],
    {
      actions: [h("button", { type: "button", class: "button", text: "Cancel", on: { click: () => dialog.close() } }), h("button", { type: "button", class: "button primary", text: "Save", on: { click: save } })],
    },
  );
  system.focus();
}

// ---- the page ----

const dark = matchMedia("(prefers-color-scheme: dark)");

export function applyTheme() {
  const theme = app.page.preferences.theme?.name || "system";
  const name = theme === "system" ? (dark.matches ? "dark" : "light") : theme;
  document.documentElement.dataset.theme = name;
  $("meta[name=theme-color]").content = name === "dark" ? "#101416" : "#ffffff";
}
dark.addEventListener("change", applyTheme);

const SHORTCUTS = [
  ["Enter", "send"],
  ["Shift Enter", "new line"],
  ["Esc", "stop the answer"],
  ["↑ in an empty field", "edit the last question"],
  ["Ctrl K", "search conversations"],
  ["Ctrl Shift O", "new conversation"],
  ["Ctrl B", "conversations on or off"],
  ["Ctrl .", "live panel on or off"],
];

function themeChoice() {
  const current = app.page.preferences.theme?.name || "system";
  const group = h("div", { class: "segments", role: "group", "aria-label": "Theme" });
  const draw = (chosen) =>
    fill(
      group,
      ["system", "light", "dark"].map((name) =>
        h("button", {
          type: "button",
          "aria-pressed": String(name === chosen),
          text: { system: "As the system", light: "Light", dark: "Dark" }[name],
          on: {
            click: async () => {
              await keepPreference("theme", { name });
              applyTheme();
              draw(name);
              group.querySelector("[aria-pressed=true]").focus();
            },
          },
        }),
      ),
    );
  draw(current);
  return group;
}

async function quit() {
  const sure = await confirmed("Quit LeanStream?", "The model is unloaded and this page stops working until LeanStream is started again.", "Quit");
  if (sure) await attempt(() => post("/chat/api/quit"));
}

export function openSettings() {
  const { version, data_folder: folder, can_quit: canQuit } = app.page;
  showDialog("Settings", [
    h("h3", { text: "Theme" }),
    themeChoice(),
    h("h3", { text: "New conversations" }),
    h("p", { text: "System prompt and sampling are set in a conversation, where “Use for new conversations too” makes them the default." }),
    h("button", { type: "button", class: "button", text: "Conversation settings…", on: { click: openChatSettings } }),
    h("h3", { text: "Keys" }),
    h("dl", { class: "shortcuts" }, SHORTCUTS.map(([keys, what]) => [h("dt", {}, keys.split(" ").length > 3 ? h("kbd", { text: keys }) : keys.split(" ").map((k) => h("kbd", { text: k }))), h("dd", { text: what })])),
    h("h3", { text: "About" }),
    h("p", { text: `LeanStream ${version}. Conversations are kept in ${folder}.` }),
    h("p", {}, "Programs can use the model too: the OpenAI-compatible address is ", h("code", { text: `${location.origin}/v1` }), "."),
    canQuit ? h("button", { type: "button", class: "button", on: { click: quit } }, icon("power"), "Quit LeanStream") : null,
  ]);
  emit("navigated");
}
