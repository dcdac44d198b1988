// One message: what it says, and what can be done with it.

import { confirmed } from "./dialogs.js";
import { fill, h, icon, iconButton } from "./dom.js";
import { bytes, integer, number } from "./format.js";
import { edit, retry, showVersion } from "./generate.js";
import { render } from "./markdown.js";
import { app, leafBelow, siblings } from "./state.js";

const STALE_S = 6; // an answer that nobody has saved for so long is not being written any more
const THOUGHTS = /^\s*<think>([\s\S]*?)(?:<\/think>|$)/;

/** Is somebody writing this, here or in another tab? */
function writingState(message) {
  if (message.generation) return true;
  if (message.state !== "writing") return false;
  return Date.now() - Math.max(message.heard || 0, message.updated * 1000) < STALE_S * 1000;
}

function copyButton(text) {
  const button = iconButton("copy", "Copy", async () => {
    await navigator.clipboard.writeText(text());
    button.classList.add("done");
    setTimeout(() => button.classList.remove("done"), 1500);
  });
  return button;
}

/** "‹ 2/3 ›", where a message has several versions. */
function versions(message) {
  const all = siblings(app.current, message);
  if (all.length < 2) return null;
  const at = all.indexOf(message);
  const go = (step) => showVersion(app.current, leafBelow(app.current, all[at + step].id));
  const busy = app.writing.has(app.current.id);
  return h(
    "span",
    { class: "versions" },
    iconButton("left", "Previous version", () => go(-1), { disabled: at === 0 || busy }),
    h("span", { text: `${at + 1}/${all.length}`, "aria-label": `version ${at + 1} of ${all.length}` }),
    iconButton("right", "Next version", () => go(1), { disabled: at === all.length - 1 || busy }),
  );
}

function editor(message, view) {
  const area = h("textarea", { class: "edit-area", "aria-label": "Edit your message", value: message.content, rows: "3" });
  const done = () => view.draw();
  const send = () => {
    const text = area.value.trim();
    done();
    if (text && text !== message.content) edit(message, text);
  };
  area.addEventListener("keydown", (event) => {
    if (event.key === "Escape") done();
    else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      send();
    } else return;
    event.stopPropagation();
  });
  fill(
    view.element,
    h(
      "div",
      { class: "editor" },
      area,
      h("p", { class: "hint", text: "The old version and its answers stay: ‹ › switches between them." }),
      h("div", { class: "row end" }, h("button", { type: "button", class: "button", text: "Cancel", on: { click: done } }), h("button", { type: "button", class: "button primary", text: "Send", on: { click: send } })),
    ),
  );
  area.focus();
  area.setSelectionRange(area.value.length, area.value.length);
  area.style.height = `${Math.min(400, area.scrollHeight + 4)}px`;
}

const attachmentChip = ({ name, text }) =>
  h("details", { class: "attachment" }, h("summary", {}, icon("file"), h("span", { text: name }), h("small", { text: bytes(new Blob([text]).size) })), h("pre", { tabindex: "0", "aria-label": name, text }));

class UserView {
  constructor(message) {
    this.message = message;
    this.element = h("article", { class: "message user", "aria-label": "You", data: { id: message.id } });
    this.draw();
  }

  draw() {
    const { message } = this;
    const busy = app.writing.has(app.current?.id);
    fill(
      this.element,
      h("div", { class: "bubble" }, message.content ? h("div", { class: "plain", text: message.content }) : null, message.attachments.map(attachmentChip)),
      h(
        "div",
        { class: "actions" },
        versions(message),
        copyButton(() => message.content),
        iconButton("edit", "Edit", () => editor(message, this), { disabled: busy, class: "edit" }),
      ),
    );
  }
}

function figures(meta) {
  const parts = [];
  if (meta.tokens_per_second) parts.push(`${number(meta.tokens_per_second)} tokens/s`);
  if (meta.completion_tokens) parts.push(`${integer(meta.completion_tokens)} tokens`);
  if (meta.first_token_seconds !== undefined) parts.push(`first after ${number(meta.first_token_seconds, 2)} s`);
  if (meta.finish_reason === "length") parts.push("stopped at the token limit");
  return parts.join(" · ");
}

function failure(message) {
  const error = message.meta.error || { message: "The answer was interrupted." };
  const actions = [h("button", { type: "button", class: "button small", on: { click: () => retry(message) } }, icon("retry"), "Try again")];
  if (error.code === "context_length_exceeded") {
    actions.unshift(
      h("button", {
        type: "button",
        class: "button small",
        text: "Leave out the oldest messages",
        on: {
          click: async () => {
            const sure = await confirmed("Leave out the oldest messages?", "The model will not see the first half of this conversation. Nothing is deleted.", "Leave out");
            if (sure) retry(message, Math.ceil(countBefore(message) / 2 / 2) * 2);
          },
        },
      }),
    );
  }
  return h("div", { class: "failure", role: "alert" }, icon("warning"), h("p", { text: error.message }), h("div", { class: "row" }, actions));
}

function countBefore(message) {
  let n = 0;
  const byId = new Map(app.current.messages.map((item) => [item.id, item]));
  for (let item = byId.get(message.parent_id); item; item = byId.get(item.parent_id)) n += 1;
  return n;
}

class AssistantView {
  constructor(message) {
    this.message = message;
    this.body = h("div", { class: "markdown" });
    this.thoughts = h("details", { class: "thoughts" }, h("summary", { text: "Thoughts" }), h("div", { class: "markdown" }));
    this.head = h("div", { class: "author" });
    this.foot = h("div", { class: "actions" });
    this.trouble = h("div", {});
    this.element = h("article", { class: "message assistant", "aria-label": "Answer", data: { id: message.id } }, this.head, this.thoughts, this.body, this.trouble, this.foot);
    this.draw();
  }

  drawText() {
    const { content } = this.message;
    const thought = THOUGHTS.exec(content);
    this.thoughts.hidden = !thought || !thought[1].trim();
    if (thought) render(this.thoughts.lastElementChild, thought[1]);
    render(this.body, thought ? content.slice(thought[0].length) : content);
    const waiting = writingState(this.message) && !content;
    this.body.classList.toggle("waiting", waiting);
    this.element.classList.toggle("writing", writingState(this.message));
  }

  draw() {
    const { message } = this;
    const writing = writingState(message);
    const failed = message.state === "failed" || (message.state === "writing" && !writing);
    this.element.setAttribute("aria-busy", String(writing));
    fill(this.head, h("span", { class: "avatar", "aria-hidden": "true" }, icon("stream")), h("span", { text: message.meta.model || "Answer" }));
    this.drawText();
    fill(this.trouble, failed ? failure(message) : null);
    if (writing) return void fill(this.foot, message.generation ? null : h("span", { class: "figures", text: "being written in another tab" }));
    const busy = app.writing.has(app.current?.id);
    fill(
      this.foot,
      versions(message),
      copyButton(() => message.content),
      iconButton("retry", "Try again", () => retry(message), { disabled: busy, class: "retry" }),
      h("span", { class: "figures", text: [message.state === "stopped" ? "stopped" : "", figures(message.meta)].filter(Boolean).join(" · ") }),
    );
  }
}

export const viewOf = (message) => (message.role === "user" ? new UserView(message) : new AssistantView(message));
