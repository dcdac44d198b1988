// Markdown of an answer -> elements. Every text becomes a text node and every element is made here by name, so that nothing
// a model writes can become live HTML. Images are shown as links: a picture from elsewhere would tell who is reading.
//
// Headings, paragraphs, emphasis, code, fences, lists (nested, tasks), quotes, tables, rules, links.

import { h, iconButton } from "./dom.js";
import { highlighted } from "./highlight.js";
import { inline } from "./inline.js";

const FENCE = /^( {0,3})(`{3,}|~{3,})\s*([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?:\s+(.*?))?(?:\s+#+)?\s*$/;
const RULE = /^ {0,3}(?:(?:\*\s*){3,}|(?:-\s*){3,}|(?:_\s*){3,})$/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])(?:\s+|$)(.*)$/;
const QUOTE = /^ {0,3}> ?(.*)$/;
const DELIMITER = /^ {0,3}\|?\s*:?-+:?\s*(?:\|\s*:?-+:?\s*)*\|?\s*$/;
const MAX_DEPTH = 12;

const blank = (line) => line.trim() === "";
const isTable = (lines, i) => i + 1 < lines.length && lines[i].includes("|") && lines[i + 1].includes("-") && DELIMITER.test(lines[i + 1]);

/** Does this line begin another block, so that a paragraph before it ends? */
function interrupts(line) {
  const item = ITEM.exec(line);
  return FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) || (item && item[3] !== "" && !/^\d/.test(item[2])) || /^ *1[.)]\s/.test(line);
}

/** [{kind, lines, ...}]: the blocks of a text; the last one may still be growing. */
export function blocks(text) {
  const lines = text.replace(/\r\n?/g, "\n").replace(/\t/g, "    ").split("\n");
  const found = [];
  for (let i = 0; i < lines.length; ) {
    if (blank(lines[i])) {
      i += 1;
      continue;
    }
    const [block, next] = takeBlock(lines, i);
    block.source = lines.slice(i, next).join("\n");
    found.push(block);
    i = next;
  }
  return found;
}

function takeBlock(lines, i) {
  const line = lines[i];
  const fence = FENCE.exec(line);
  if (fence) return takeFence(lines, i, fence);
  const heading = HEADING.exec(line);
  if (heading) return [{ kind: "heading", level: heading[1].length, text: heading[2] || "" }, i + 1];
  if (RULE.test(line)) return [{ kind: "rule" }, i + 1];
  if (QUOTE.test(line)) return takeQuote(lines, i);
  if (ITEM.test(line)) return takeList(lines, i);
  if (isTable(lines, i)) return takeTable(lines, i);
  let end = i + 1;
  while (end < lines.length && !blank(lines[end]) && !interrupts(lines[end]) && !isTable(lines, end)) end += 1;
  return [{ kind: "paragraph", text: lines.slice(i, end).map((l) => l.trimStart()).join("\n") }, end];
}

function takeFence(lines, i, [, indent, mark, info]) {
  const closing = new RegExp(`^ {0,3}${mark[0]}{${mark.length},}\\s*$`);
  let end = i + 1;
  while (end < lines.length && !closing.test(lines[end])) end += 1;
  const strip = new RegExp(`^ {0,${indent.length}}`);
  const code = lines.slice(i + 1, end).map((line) => line.replace(strip, "")).join("\n");
  return [{ kind: "code", language: info.trim().split(/\s+/)[0] || "", code, closed: end < lines.length }, Math.min(end + 1, lines.length)];
}

function takeQuote(lines, i) {
  const inner = [];
  let end = i;
  while (end < lines.length && !blank(lines[end])) {
    const quoted = QUOTE.exec(lines[end]);
    if (!quoted && interrupts(lines[end])) break;
    inner.push(quoted ? quoted[1] : lines[end]);
    end += 1;
  }
  return [{ kind: "quote", text: inner.join("\n") }, end];
}

function takeList(lines, i) {
  const first = ITEM.exec(lines[i]);
  const ordered = /\d/.test(first[2]);
  const base = first[1].length;
  const items = [];
  let loose = false;
  let end = i;
  while (end < lines.length) {
    const line = lines[end];
    const item = ITEM.exec(line);
    const indent = line.length - line.trimStart().length;
    if (blank(line)) {
      const next = lines.slice(end + 1).find((l) => !blank(l));
      const nextItem = next && ITEM.exec(next);
      const nextIndent = next ? next.length - next.trimStart().length : 0;
      if (!next || !((nextItem && /\d/.test(nextItem[2]) === ordered && nextIndent >= base) || nextIndent > base + 1)) break;
      loose = true;
      items.at(-1).push("");
    } else if (item && indent <= base + 1 && indent >= base && !RULE.test(line)) {
      if (/\d/.test(item[2]) !== ordered) break;
      items.push([item[3]]);
      items.at(-1).offset = indent + item[2].length + 1;
    } else if (indent > base || (!interrupts(line) && !item && !blank(lines[end - 1]))) {
      items.at(-1).push(line.slice(Math.min(indent, items.at(-1).offset)));
    } else break;
    end += 1;
  }
  return [{ kind: "list", ordered, start: ordered ? parseInt(first[2], 10) : 1, loose, items: items.map((item) => item.join("\n").trimEnd()) }, end];
}

function cells(line) {
  const trimmed = line.trim().replace(/^\|/, "").replace(/(?<!\\)\|$/, "");
  return trimmed.split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
}

function takeTable(lines, i) {
  const align = cells(lines[i + 1]).map((mark) => (mark.endsWith(":") ? (mark.startsWith(":") ? "center" : "right") : "left"));
  let end = i + 2;
  while (end < lines.length && !blank(lines[end]) && lines[end].includes("|")) end += 1;
  return [{ kind: "table", align, head: cells(lines[i]), rows: lines.slice(i + 2, end).map(cells) }, end];
}

// ---- blocks -> elements ----

const BUILD = {
  heading: (block) => h(`h${Math.min(6, block.level + 2)}`, { class: `md-h${block.level}` }, inline(block.text)),
  rule: () => h("hr"),
  paragraph: (block) => h("p", {}, inline(block.text)),
  quote: (block, depth) => h("blockquote", {}, elements(block.text, depth + 1)),
  code: (block) => codeBlock(block.language, block.code),
  list: listElement,
  table: tableElement,
};

function listElement(block, depth) {
  const items = block.items.map((text) => {
    const task = /^\[([ xX])\]\s+/.exec(text);
    const parts = blocks(task ? text.slice(task[0].length) : text);
    const tight = !block.loose && parts[0]?.kind === "paragraph";
    const body = depth >= MAX_DEPTH ? [text] : tight ? [inline(parts[0].text), parts.slice(1).map((part) => build(part, depth + 1))] : parts.map((part) => build(part, depth + 1));
    const done = task && task[1] !== " ";
    const box = task && h("span", { class: "task", role: "img", "aria-label": done ? "done:" : "to do:" }, done ? "☑ " : "☐ ");
    return h("li", { class: task ? "task-item" : null }, box, body);
  });
  return h(block.ordered ? "ol" : "ul", { start: block.ordered && block.start !== 1 ? block.start : null }, items);
}

function tableElement(block) {
  const row = (tag, values) =>
    h("tr", {}, block.head.map((_, column) => h(tag, { class: `align-${block.align[column] || "left"}`, scope: tag === "th" ? "col" : null }, inline(values[column] || ""))));
  return h(
    "div",
    { class: "table-scroll", tabindex: "0", role: "group", "aria-label": "table" },
    h("table", {}, h("thead", {}, row("th", block.head)), h("tbody", {}, block.rows.map((values) => row("td", values)))),
  );
}

function codeBlock(language, code) {
  const copy = iconButton("copy", "Copy code", async () => {
    await navigator.clipboard.writeText(code);
    copy.classList.add("done");
    setTimeout(() => copy.classList.remove("done"), 1500);
  });
  return h(
    "figure",
    { class: "code-block" },
    h("figcaption", {}, h("span", {}, language || "text"), copy),
    h("pre", { tabindex: "0", "aria-label": language ? `code, ${language}` : "code" }, h("code", {}, highlighted(code, language))),
  );
}

function build(block, depth) {
  return BUILD[block.kind](block, depth);
}

function elements(text, depth) {
  return depth > MAX_DEPTH ? [h("p", { text })] : blocks(text).map((block) => build(block, depth));
}

/** Make `container` show this text. Blocks that did not change since the last call keep their elements. */
export function render(container, text) {
  const wanted = blocks(text);
  wanted.forEach((block, i) => {
    const source = `${block.kind} ${block.closed ?? ""} ${block.source}`;
    const old = container.children[i];
    if (old && old.__source === source) return;
    const element = build(block, 0);
    element.__source = source;
    if (old) old.replaceWith(element);
    else container.append(element);
  });
  while (container.children.length > wanted.length) container.lastElementChild.remove();
}
