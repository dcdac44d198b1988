// Dialogs, menus and short notices. <dialog> gives the focus trap and Escape; menus are buttons in a popover.

import { h, icon, iconButton } from "./dom.js";

/** A modal dialog with a title, shown at once; removed when it closes. `onClose` runs then. */
export function showDialog(title, body, { actions = [], onClose, wide = false, id } = {}) {
  const heading = h("h2", { id: `${id || "dialog"}-title`, text: title });
  const close = iconButton("close", "Close", () => dialog.close());
  const dialog = h(
    "dialog",
    { class: `dialog ${wide ? "wide" : ""}`, "aria-labelledby": heading.id, id },
    h("header", {}, heading, close),
    h("div", { class: "dialog-body" }, body),
    actions.length ? h("footer", {}, actions) : null,
  );
  dialog.addEventListener("click", (event) => event.target === dialog && dialog.close()); // on the backdrop
  dialog.addEventListener("close", () => {
    dialog.remove();
    onClose?.();
  });
  document.body.append(dialog);
  dialog.showModal();
  return dialog;
}

/** Ask; true if confirmed. */
export function confirmed(title, text, verb, { danger = false } = {}) {
  return new Promise((resolve) => {
    let answer = false;
    const yes = h("button", {
      type: "button",
      class: `button ${danger ? "danger" : "primary"}`,
      text: verb,
      on: {
        click: () => {
          answer = true;
          dialog.close();
        },
      },
    });
    const no = h("button", { type: "button", class: "button", text: "Cancel", on: { click: () => dialog.close() } });
    const dialog = showDialog(title, h("p", { text }), { actions: [no, yes], onClose: () => resolve(answer) });
    (danger ? no : yes).focus();
  });
}

/** A short notice at the bottom; errors stay longer. */
export function notice(text, { error = false } = {}) {
  const toast = h(
    "div",
    { class: `toast ${error ? "error" : ""}` },
    icon(error ? "warning" : "check"),
    h("span", { text }),
    iconButton("close", "Dismiss", () => toast.remove()),
  );
  document.getElementById("notices").append(toast);
  setTimeout(() => toast.remove(), error ? 12000 : 4000);
}

/** Run something that talks to the server; what goes wrong becomes a notice. */
export async function attempt(work) {
  try {
    return await work();
  } catch (error) {
    if (error.name !== "AbortError") notice(error.message, { error: true });
    return undefined;
  }
}

let openMenu = null;

function closeMenu(refocus) {
  if (!openMenu) return;
  const { menu, button } = openMenu;
  openMenu = null;
  menu.remove();
  button.setAttribute("aria-expanded", "false");
  if (refocus) button.focus();
}

/** A menu under a button: items are {label, icon, run, danger}. Arrow keys move, Escape closes. */
export function toggleMenu(button, items) {
  const again = openMenu?.button === button;
  closeMenu(false);
  if (again) return;
  const entries = items.map((item) =>
    h(
      "button",
      {
        type: "button",
        role: "menuitem",
        tabindex: "-1",
        class: item.danger ? "danger" : null,
        on: {
          click: (event) => {
            event.stopPropagation();
            closeMenu(true);
            item.run();
          },
        },
      },
      icon(item.icon),
      item.label,
    ),
  );
  const menu = h("div", { class: "menu", role: "menu", "aria-label": button.getAttribute("aria-label") }, entries);
  menu.addEventListener("keydown", (event) => moveIn(entries, event));
  document.body.append(menu);
  place(menu, button);
  openMenu = { menu, button };
  button.setAttribute("aria-expanded", "true");
  entries[0].focus();
}

function moveIn(entries, event) {
  const at = entries.indexOf(document.activeElement);
  const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  if (step) entries[(at + step + entries.length) % entries.length].focus();
  else if (event.key === "Home") entries[0].focus();
  else if (event.key === "End") entries.at(-1).focus();
  else if (event.key === "Escape" || event.key === "Tab") closeMenu(true);
  else return;
  event.preventDefault();
  event.stopPropagation();
}

function place(menu, button) {
  const at = button.getBoundingClientRect();
  const { offsetWidth: width, offsetHeight: height } = menu;
  menu.style.left = `${Math.max(8, Math.min(at.right - width, innerWidth - width - 8))}px`;
  menu.style.top = `${at.bottom + height + 8 > innerHeight ? Math.max(8, at.top - height - 4) : at.bottom + 4}px`;
}

document.addEventListener("pointerdown", (event) => {
  if (openMenu && !openMenu.menu.contains(event.target) && !openMenu.button.contains(event.target)) closeMenu(false);
});
window.addEventListener("resize", () => closeMenu(false));

/** A labelled field: the control below its name, a hint below that. */
export function field(label, control, hint) {
  const id = control.id || `field-${Math.random().toString(36).slice(2)}`;
  control.id = id;
  const note = hint ? h("small", { id: `${id}-hint`, text: hint }) : null;
  if (note) control.setAttribute("aria-describedby", note.id);
  return h("div", { class: "field" }, h("label", { for: id, text: label }), control, note);
}

/** Ask for the API key. */
let keyDialog = null;
export function askForKey(use) {
  if (keyDialog) return;
  const input = h("input", { type: "password", autocomplete: "off", required: true });
  const form = h("form", { method: "dialog" }, field("API key", input, "This server was started with a key. It is kept for this tab only."));
  const ok = h("button", { type: "button", class: "button primary", text: "Continue", on: { click: submit } });
  function submit(event) {
    event?.preventDefault();
    if (input.value) use(input.value);
  }
  form.addEventListener("submit", submit);
  keyDialog = showDialog("Key needed", form, { actions: [ok], onClose: () => (keyDialog = null) });
  input.focus();
}

