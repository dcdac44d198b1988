// Starts the page: state from the server, then its parts; keys; side panes; what happens when the server goes and returns.

import { get, setKey, takeKey } from "./api.js";
import { startComposer, suggest } from "./composer.js";
import { refreshList, reopen, startNew } from "./conversations.js";
import { askForKey, attempt, notice } from "./dialogs.js";
import { $, announce, icon } from "./dom.js";
import { stop } from "./generate.js";
import { startLive } from "./live.js";
import { startModels } from "./models.js";
import { startPanel } from "./panel.js";
import { applyTheme, keepPreference, openChatSettings, openSettings } from "./settings.js";
import { startSidebar } from "./sidebar.js";
import { app, on } from "./state.js";
import { startThread } from "./thread.js";

const narrow = matchMedia("(max-width: 820px)");
const medium = matchMedia("(max-width: 1180px)");

// ---- side panes: columns where there is room, drawers where there is not ----

const PANES = {
  sidebar: { button: "#toggle-sidebar", drawer: narrow },
  panel: { button: "#toggle-panel", drawer: medium },
};

function showPane(name, open, { keep = true } = {}) {
  const { button, drawer } = PANES[name];
  const pane = $(`#${name}`);
  pane.hidden = !open;
  $(button).setAttribute("aria-expanded", String(open));
  document.body.classList.toggle(`has-${name}`, open);
  const drawers = Object.entries(PANES).some(([other, { drawer: asDrawer }]) => asDrawer.matches && !$(`#${other}`).hidden);
  $("#scrim").hidden = !drawers;
  if (open && drawer.matches) pane.querySelector("button, input")?.focus();
  if (keep && !drawer.matches) keepPreference(name, { open });
}

const toggle = (name) => showPane(name, $(`#${name}`).hidden);

function closeDrawers() {
  let closed = false;
  for (const [name, { drawer, button }] of Object.entries(PANES)) {
    if (!drawer.matches || $(`#${name}`).hidden) continue;
    showPane(name, false, { keep: false });
    $(button).focus();
    closed = true;
  }
  return closed;
}

function arrangePanes() {
  for (const [name, { drawer }] of Object.entries(PANES)) {
    showPane(name, !drawer.matches && app.page.preferences[name]?.open !== false, { keep: false });
  }
}

function startPanes() {
  for (const [name, { button, drawer }] of Object.entries(PANES)) {
    $(button).addEventListener("click", () => toggle(name));
    drawer.addEventListener("change", arrangePanes);
  }
  $("#scrim").addEventListener("click", closeDrawers);
  for (const close of document.querySelectorAll("[data-close-pane]")) close.addEventListener("click", () => toggle(close.dataset.closePane));
  on("navigated", () => narrow.matches && closeDrawers());
  arrangePanes();
}

// ---- keys ----

function onKey(event) {
  const modified = event.ctrlKey || event.metaKey;
  const key = event.key.toLowerCase();
  if (document.querySelector("dialog[open]")) return;
  if (event.key === "Escape") {
    if (closeDrawers()) return;
    if (app.current) stop(app.current);
  } else if (modified && key === "k") {
    showPane("sidebar", true, { keep: false });
    $("#search").focus();
    $("#search").select();
  } else if (modified && event.shiftKey && key === "o") {
    startNew();
    $("#prompt").focus();
  } else if (modified && key === "b") toggle("sidebar");
  else if (modified && key === ".") toggle("panel");
  else return;
  event.preventDefault();
}

// ---- the connection ----

function startConnection() {
  const banner = $("#banner");
  on("offline", () => {
    banner.hidden = false;
    document.body.classList.add("is-offline");
    announce("The server does not answer.");
  });
  on("online", async () => {
    if (banner.hidden) return;
    banner.hidden = true;
    document.body.classList.remove("is-offline");
    announce("The server is back.");
    notice("Connected again.");
    await attempt(refreshList);
  });
  window.addEventListener("leanstream:key-needed", () =>
    askForKey((key) => {
      setKey(key);
      location.reload();
    }),
  );
}

async function waitForServer() {
  for (;;) {
    try {
      return await get("/chat/api/state");
    } catch (error) {
      if (error.status === 401) return new Promise(() => {}); // the key dialog reloads the page
      $("#banner").hidden = false;
      await new Promise((resolve) => setTimeout(resolve, 1000));
    }
  }
}

async function start() {
  takeKey();
  startConnection();
  applyTheme();
  app.page = await waitForServer();
  $("#banner").hidden = true;
  applyTheme();
  for (const [id, name] of Object.entries({ "toggle-sidebar": "sidebar", "toggle-panel": "panel", "chat-settings": "sliders", settings: "gear", jump: "down" })) {
    $(`#${id}`).prepend(icon(name));
  }
  for (const close of document.querySelectorAll("[data-close-pane]")) close.append(icon("close"));
  startPanes();
  startSidebar();
  startThread();
  startComposer();
  startModels();
  startPanel();
  $("#chat-settings").addEventListener("click", openChatSettings);
  $("#settings").addEventListener("click", openSettings);
  document.addEventListener("keydown", onKey);
  on("suggest", suggest);
  await Promise.all([startLive(), attempt(refreshList), attempt(reopen)]);
  document.body.classList.add("is-ready");
  if (!narrow.matches) $("#prompt").focus();
}

start();
