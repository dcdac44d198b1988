// The list of conversations: search, open, rename, export, delete.

import { blob } from "./api.js";
import { change, open, refreshList, remove, startNew } from "./conversations.js";
import { attempt, confirmed, toggleMenu } from "./dialogs.js";
import { $, debounced, fill, h, icon, iconButton } from "./dom.js";
import { ago, period } from "./format.js";
import { stop } from "./generate.js";
import { app, emit, on } from "./state.js";

let renaming = null; // id

function save(name, content) {
  const address = URL.createObjectURL(content);
  const link = h("a", { href: address, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}

const fileName = (title) => title.replace(/[^\p{L}\p{N}\- ]+/gu, "").trim().replace(/\s+/g, "-").slice(0, 60) || "conversation";

export async function exportAs(item, form) {
  const content = await attempt(() => blob(`/chat/api/conversations/${item.id}/export?form=${form}`));
  if (content) save(`${fileName(item.title)}.${form}`, content);
}

export async function removeAsked(item) {
  const sure = await confirmed("Delete conversation?", `“${item.title}” and all its messages will be deleted from this computer.`, "Delete", { danger: true });
  if (!sure) return;
  stop(item);
  await attempt(() => remove(item.id));
}

export function startRenaming(id) {
  renaming = id;
  draw();
  const input = $("#conversations input");
  input?.focus();
  input?.select();
}

function actions(item) {
  return [
    { label: "Rename", icon: "edit", run: () => startRenaming(item.id) },
    { label: "Export as Markdown", icon: "download", run: () => exportAs(item, "md") },
    { label: "Export as JSON", icon: "download", run: () => exportAs(item, "json") },
    { label: "Delete", icon: "trash", danger: true, run: () => removeAsked(item) },
  ];
}

function renameField(item) {
  let done = false;
  const finish = (keep) => {
    if (done) return;
    done = true;
    renaming = null;
    const title = input.value.trim();
    if (keep && title && title !== item.title) attempt(() => change(item, { title }));
    draw();
  };
  const input = h("input", {
    class: "rename",
    "aria-label": "New name",
    value: item.title,
    maxlength: "300",
    on: {
      blur: () => finish(true),
      keydown: (event) => {
        if (event.key === "Enter") finish(true);
        if (event.key === "Escape") finish(false);
        event.stopPropagation();
      },
    },
  });
  return input;
}

function row(item) {
  const current = app.current?.id === item.id;
  if (renaming === item.id) return h("li", { class: "conversation current" }, renameField(item));
  const menu = iconButton("more", `Actions for ${item.title}`, () => toggleMenu(menu, actions(item)), { "aria-haspopup": "menu", "aria-expanded": "false" });
  const writing = app.writing.has(item.id);
  return h(
    "li",
    { class: `conversation ${current ? "current" : ""}`, data: { id: item.id } },
    h(
      "button",
      {
        type: "button",
        class: "conversation-open",
        "aria-current": current ? "true" : null,
        on: {
          click: () => {
            emit("navigated");
            attempt(() => open(item.id));
          },
          dblclick: () => startRenaming(item.id),
        },
      },
      h("span", { class: "title", text: item.title }),
      writing ? h("span", { class: "dot", role: "img", "aria-label": "answer is being written" }) : h("span", { class: "when", text: ago(item.updated) }),
      item.snippet ? h("span", { class: "snippet", text: item.snippet }) : null,
    ),
    menu,
  );
}

function draw() {
  const list = $("#conversations");
  const held = list.contains(document.activeElement) ? document.activeElement.closest("[data-id]")?.dataset.id : null;
  const groups = [];
  for (const item of app.conversations) {
    const name = app.query ? "Found" : period(item.updated);
    if (groups.at(-1)?.name !== name) groups.push({ name, items: [] });
    groups.at(-1).items.push(item);
  }
  const empty = h("p", { class: "empty", text: app.query ? "Nothing found." : "Conversations appear here. They stay on this computer." });
  fill(list, groups.length ? groups.map((group) => [h("h3", { text: group.name }), h("ul", {}, group.items.map(row))]) : empty);
  if (held && renaming === null) $(`[data-id="${held}"] .conversation-open`, list)?.focus();
}

export function startSidebar() {
  const search = $("#search");
  const run = debounced(() => attempt(refreshList), 150);
  search.addEventListener("input", () => {
    app.query = search.value;
    run();
  });
  search.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || !search.value) return;
    search.value = app.query = "";
    run();
    event.stopPropagation();
  });
  $("#new-chat").append(icon("plus"), h("span", { text: "New chat" }));
  $("#new-chat").addEventListener("click", () => {
    emit("navigated");
    startNew();
    $("#prompt").focus();
  });
  for (const event of ["conversations", "current", "writing"]) on(event, () => renaming === null && draw());
  draw();
}
