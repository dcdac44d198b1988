// Where one writes: text, attached text files, send and stop.

import { attempt, notice } from "./dialogs.js";
import { $, fill, h, icon, iconButton } from "./dom.js";
import { bytes, integer } from "./format.js";
import { ask, isWriting, promptText, stop } from "./generate.js";
import { app, branch, on } from "./state.js";
import { followEnd, lastQuestion } from "./thread.js";

const MAX_FILE = 1 << 20; // bytes; more would not fit any context
const MAX_FILES = 16;
const MAX_HEIGHT = 240;
const CHARS_PER_TOKEN = 3.6; // of English text, to guess before the model has counted

let attachments = [];
let sending = false;

const prompt = () => $("#prompt");

function fit() {
  const area = prompt();
  area.style.height = "auto";
  area.style.height = `${Math.min(MAX_HEIGHT, area.scrollHeight)}px`;
}

/** The text of a file; null, with a notice, if it is none. */
async function readText(file) {
  if (file.size > MAX_FILE) {
    notice(`${file.name} is larger than ${bytes(MAX_FILE)}.`, { error: true });
    return null;
  }
  const data = new Uint8Array(await file.arrayBuffer());
  try {
    if (data.includes(0)) throw new TypeError("binary");
    return new TextDecoder("utf-8", { fatal: true }).decode(data);
  } catch {
    notice(`${file.name} is not a text file.`, { error: true });
    return null;
  }
}

async function attach(files) {
  for (const file of files) {
    if (attachments.length >= MAX_FILES) return notice(`At most ${MAX_FILES} files go with one message.`, { error: true });
    const text = await readText(file);
    if (text !== null) attachments.push({ name: file.name, text });
  }
  draw();
  prompt().focus();
}

function drawAttachments() {
  const list = $("#attachments");
  list.hidden = !attachments.length;
  fill(
    list,
    attachments.map((item, i) =>
      h(
        "li",
        { class: "chip" },
        icon("file"),
        h("span", { text: item.name }),
        h("small", { text: bytes(new Blob([item.text]).size) }),
        iconButton("close", `Remove ${item.name}`, () => {
          attachments.splice(i, 1);
          draw();
        }),
      ),
    ),
  );
}

/** About how much of the context the next question takes. */
function drawContext() {
  const meter = $("#context");
  const n_ctx = app.loaded.n_ctx;
  if (!n_ctx) {
    meter.textContent = "";
    return;
  }
  const shown = app.current ? branch(app.current) : [];
  const counted = shown.findLastIndex((message) => message.meta.prompt_tokens);
  const known = counted < 0 ? 0 : shown[counted].meta.prompt_tokens + (shown[counted].meta.completion_tokens || 0);
  const rest = shown.slice(counted + 1).map(promptText).join("") + prompt().value + attachments.map((item) => item.text).join("");
  const used = known + Math.ceil(rest.length / CHARS_PER_TOKEN);
  meter.textContent = `about ${integer(used)} of ${integer(n_ctx)} tokens`;
  meter.classList.toggle("over", used > n_ctx * 0.9);
}

function draw() {
  const writing = isWriting(app.current);
  const state = app.snapshot?.state;
  const usable = app.online && (state === "ready" || state === "loading");
  const button = $("#send");
  button.classList.toggle("stop", writing);
  button.setAttribute("aria-label", writing ? "Stop" : "Send");
  button.title = writing ? "Stop (Esc)" : "Send (Enter)";
  button.disabled = !writing && (!usable || sending || (!prompt().value.trim() && !attachments.length));
  if (button.dataset.shows !== String(writing)) fill(button, icon(writing ? "stop" : "send"));
  button.dataset.shows = String(writing);
  prompt().placeholder = !app.online ? "The server does not answer…" : state === "ready" || state === "loading" ? "Ask anything" : "Choose a model first";
  drawAttachments();
  drawContext();
}

async function send() {
  const text = prompt().value.trim();
  if (isWriting(app.current)) return stop(app.current);
  if ($("#send").disabled) return undefined;
  const files = attachments;
  sending = true;
  attachments = [];
  prompt().value = "";
  fit();
  draw();
  const sent = attempt(() => ask(text, files));
  sending = false;
  setTimeout(followEnd, 0);
  return sent;
}

function onKey(event) {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    if (!isWriting(app.current)) send();
  } else if (event.key === "ArrowUp" && !prompt().value && !attachments.length) {
    event.preventDefault();
    lastQuestion()?.click();
  }
}

function startDropping() {
  const overlay = $("#drop");
  let depth = 0;
  const hasFiles = (event) => event.dataTransfer?.types.includes("Files");
  window.addEventListener("dragenter", (event) => {
    if (hasFiles(event) && ++depth) overlay.hidden = false;
  });
  window.addEventListener("dragleave", (event) => {
    if (hasFiles(event) && --depth <= 0) overlay.hidden = true;
  });
  window.addEventListener("dragover", (event) => hasFiles(event) && event.preventDefault());
  window.addEventListener("drop", (event) => {
    if (!hasFiles(event)) return;
    event.preventDefault();
    depth = 0;
    overlay.hidden = true;
    attach(event.dataTransfer.files);
  });
}

export function startComposer() {
  const input = $("#files");
  $("#attach").append(icon("attach"));
  $("#attach").addEventListener("click", () => input.click());
  input.addEventListener("change", () => {
    attach([...input.files]);
    input.value = "";
  });
  prompt().addEventListener("input", () => {
    fit();
    draw();
  });
  prompt().addEventListener("keydown", onKey);
  prompt().addEventListener("paste", (event) => {
    if (!event.clipboardData.files.length) return;
    event.preventDefault();
    attach(event.clipboardData.files);
  });
  $("#composer").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  startDropping();
  for (const event of ["current", "writing", "snapshot", "config", "online", "offline"]) on(event, draw);
  draw();
}

/** Fill in a suggestion. */
export function suggest(text) {
  prompt().value = text;
  fit();
  draw();
  prompt().focus();
}
