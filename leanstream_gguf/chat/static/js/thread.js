// The open conversation: its messages in order, kept at the end while an answer grows, unless somebody scrolled up.

import { $, fill, oncePerFrame } from "./dom.js";
import { viewOf } from "./message.js";
import { app, branch, on } from "./state.js";
import { welcome } from "./welcome.js";

const NEAR_END = 80; // px
let views = []; // of the messages shown
let shownId = null;
let pinned = true; // to the end
const pending = new Set();

const scroller = () => $("#thread");
const atEnd = () => scroller().scrollHeight - scroller().scrollTop - scroller().clientHeight < NEAR_END;

function toEnd() {
  scroller().scrollTop = scroller().scrollHeight;
}

const flush = oncePerFrame(() => {
  const wasPinned = pinned;
  for (const view of views) {
    if (!pending.has(view.message.id)) continue;
    view.drawText();
    if (view.message.state !== "writing") view.draw();
  }
  pending.clear();
  if (wasPinned) toEnd();
});

function draw() {
  const conversation = app.current;
  const messages = conversation ? branch(conversation) : [];
  const list = $("#messages");
  document.title = `${conversation ? `${conversation.title} · ` : ""}LeanStream`;
  $("#conversation-title").textContent = conversation?.title || "New conversation";
  document.body.classList.toggle("is-empty", messages.length === 0);
  if (!messages.length) {
    views = [];
    shownId = conversation?.id || null;
    fill(list, welcome());
    return;
  }
  const editing = list.querySelector(".editor textarea");
  const switched = shownId !== conversation.id;
  shownId = conversation.id;
  const known = new Map(switched ? [] : views.map((view) => [view.message.id, view]));
  views = messages.map((message) => {
    const view = known.get(message.id);
    if (!view) return viewOf(message);
    view.message = message;
    if (!view.element.contains(editing)) view.draw();
    return view;
  });
  const wanted = views.map((view) => view.element);
  if (wanted.length !== list.children.length || wanted.some((element, i) => list.children[i] !== element)) list.replaceChildren(...wanted);
  if (switched) pinned = true;
  if (pinned) toEnd();
}

export function startThread() {
  const jump = $("#jump");
  scroller().addEventListener("scroll", () => {
    pinned = atEnd();
    jump.hidden = pinned || !views.length;
  });
  jump.addEventListener("click", () => {
    pinned = true;
    toEnd();
  });
  new ResizeObserver(() => pinned && views.length && toEnd()).observe($("#messages"));
  on("current", draw);
  on("writing", draw);
  on("text", (message) => {
    pending.add(message.id);
    flush();
  });
  for (const event of ["catalog", "config"]) on(event, () => !views.length && draw());
  on("snapshot", ({ changed }) => changed && !views.length && draw());
  // An answer that was being written elsewhere and has gone silent becomes an interrupted one.
  setInterval(() => {
    const silent = views.find((view) => view.message.state === "writing" && !view.message.generation);
    silent?.draw();
  }, 2000);
}

/** After sending: follow the answer. */
export function followEnd() {
  pinned = true;
  toEnd();
}

/** The last question, for the arrow-up key. */
export function lastQuestion() {
  return views.filter((view) => view.message.role === "user").at(-1)?.element.querySelector(".edit");
}
