// Markdown inside a line -> nodes: code, emphasis, strikethrough, links. See markdown.js.

import { h } from "./dom.js";

const SAFE = /^(https?:|mailto:)/i;
const PATTERNS = [
  { kind: "escape", at: /\\([\\`*_{}[\]()#+\-.!~|<>])/y },
  { kind: "code", at: /(`+)([^`]|[^`][\s\S]*?[^`])\1(?!`)/y },
  { kind: "image", at: /!\[([^\]]*)\]\(\s*<?([^\s)>]+)>?(?:\s+["'][^"']*["'])?\s*\)/y },
  { kind: "link", at: /\[((?:\\.|[^[\]\\]|\[[^\]]*\])+)\]\(\s*<?([^\s)>]+)>?(?:\s+["'][^"']*["'])?\s*\)/y },
  { kind: "auto", at: /<((?:https?:\/\/|mailto:)[^\s<>]+)>/y },
  { kind: "bare", at: /https?:\/\/[^\s<>"'`]*[^\s<>"'`.,;:!?)\]}*_]/y },
  { kind: "strong", at: /(\*\*|__)(?=\S)([\s\S]*?\S[*_]*)\1/y },
  { kind: "em", at: /([*_])(?=[^\s*_])([\s\S]*?[^\s*_])\1(?!\1)/y },
  { kind: "del", at: /~~(?=\S)([\s\S]*?\S)~~/y },
  { kind: "break", at: /(?: {2,}|\\)\n/y },
];
const STARTS = /[\\`!\[<h*_~ ]/g;
const MAX_DEPTH = 8;
const MAX_LENGTH = 20000; // a longer line is shown as it is: searching it for pairs takes quadratic time

/** A link, if its address is one that may be opened; else its text. */
function link(address, children) {
  if (!SAFE.test(address)) return h("span", {}, children);
  return h("a", { href: address, target: "_blank", rel: "noopener noreferrer nofollow" }, children);
}

const BUILD = {
  escape: (m) => m[1],
  code: (m) => h("code", { text: /^ .* $/.test(m[2]) && m[2].trim() ? m[2].slice(1, -1) : m[2] }),
  image: (m) => link(m[2], [`[image: ${m[1] || m[2]}]`]),
  link: (m, depth) => link(m[2], inline(m[1], depth + 1)),
  auto: (m) => link(m[1], [m[1]]),
  bare: (m) => link(m[0], [m[0]]),
  strong: (m, depth) => h("strong", {}, inline(m[2], depth + 1)),
  em: (m, depth) => h("em", {}, inline(m[2], depth + 1)),
  del: (m, depth) => h("del", {}, inline(m[1], depth + 1)),
  break: () => h("br"),
};

const isWord = (character) => /[\p{L}\p{N}]/u.test(character || "");

function matchAt(text, i) {
  for (const { kind, at } of PATTERNS) {
    at.lastIndex = i;
    const match = at.exec(text);
    if (!match) continue;
    const underscore = (kind === "strong" || kind === "em") && match[1][0] === "_";
    if (underscore && (isWord(text[i - 1]) || isWord(text[i + match[0].length]))) continue; // snake_case
    if (kind === "bare" && isWord(text[i - 1])) continue;
    return [kind, match];
  }
  return null;
}

/** Nodes and strings for one line or paragraph. */
export function inline(text, depth = 0) {
  if (depth > MAX_DEPTH || text.length > MAX_LENGTH) return [text];
  const parts = [];
  let plain = 0;
  STARTS.lastIndex = 0;
  for (let start = STARTS.exec(text); start; start = STARTS.exec(text)) {
    const i = start.index;
    const found = matchAt(text, i);
    if (!found) continue;
    const [kind, match] = found;
    if (i > plain) parts.push(text.slice(plain, i));
    const lastIndex = i + match[0].length;
    parts.push(BUILD[kind](match, depth));
    plain = lastIndex;
    STARTS.lastIndex = lastIndex; // the nested call above moved it
  }
  if (plain < text.length) parts.push(text.slice(plain));
  return parts;
}
