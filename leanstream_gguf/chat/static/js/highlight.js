// Colours for code: strings, comments, numbers and keywords of the common languages. One pass, text nodes only.

import { h } from "./dom.js";

const words = (text) => new Set(text.split(" "));
const C_LIKE = words(
  "abstract as async auto await bool boolean break case catch char class const constexpr continue default delete do double else enum export extends extern false final finally float fn for from func function go goto if impl implements import in inline int interface let long match mod mut namespace new nil null nullptr of operator override package private protected pub public return self short signed sizeof static string struct super switch template this throw trait true try type typedef typename typeof undefined union unsafe unsigned use using var virtual void volatile where while yield",
);
const PYTHON = words(
  "and as assert async await break class continue def del elif else except False finally for from global if import in is lambda match case None nonlocal not or pass raise return self True try while with yield",
);
const SHELL = words("if then else elif fi for while do done case esac function in return export local echo cd set sudo source exit");
const SQL = words(
  "select from where insert into values update set delete create table index drop alter join left right inner outer on group by order having limit offset and or not null is in as distinct union all primary key references default case when then else end",
);

const HASH = { comment: /#[^\n]*/y };
const SLASH = { comment: /\/\/[^\n]*|\/\*[\s\S]*?(?:\*\/|$)/y };
const LANGUAGES = new Map([
  ...["python", "py"].map((name) => [name, { ...HASH, keywords: PYTHON, string: /[rbfu]*("""[\s\S]*?(?:"""|$)|'''[\s\S]*?(?:'''|$)|"(?:\\.|[^"\\\n])*"?|'(?:\\.|[^'\\\n])*'?)/iy }]),
  ...["bash", "sh", "shell", "zsh", "console"].map((name) => [name, { ...HASH, keywords: SHELL }]),
  ...["yaml", "yml", "toml", "ini", "dockerfile", "makefile", "r", "ruby", "rb"].map((name) => [name, { ...HASH, keywords: PYTHON }]),
  ["sql", { comment: /--[^\n]*/y, keywords: SQL, fold: true }],
  ...["c", "cpp", "c++", "cs", "csharp", "java", "javascript", "js", "jsx", "ts", "tsx", "typescript", "go", "rust", "rs", "kotlin", "swift", "php", "json", "css", "scala", "dart", "zig"].map((name) => [name, { ...SLASH, keywords: C_LIKE }]),
]);
const STRING = /"(?:\\.|[^"\\\n])*"?|'(?:\\.|[^'\\\n])*'?|`(?:\\.|[^`\\])*`?/y;
const NUMBER = /(?:0[xX][\da-fA-F_]+|\d[\d_]*(?:\.\d+)?(?:[eE][+-]?\d+)?)\w*/y;
const WORD = /[A-Za-z_]\w*/y;
const MAX_LENGTH = 60000; // beyond this, plain text: colours are not worth a slow page

/** Nodes for a piece of code; plain text where the language is not known. */
export function highlighted(code, language) {
  const rules = LANGUAGES.get(language.toLowerCase());
  if (!rules || code.length > MAX_LENGTH) return [code];
  const parts = [];
  let plain = 0;
  let i = 0;
  const take = (kind, pattern) => {
    pattern.lastIndex = i;
    const match = pattern.exec(code);
    if (!match || match[0] === "") return false;
    if (kind) {
      if (i > plain) parts.push(code.slice(plain, i));
      parts.push(h("span", { class: `tok-${kind}`, text: match[0] }));
      plain = i + match[0].length;
    }
    i += match[0].length;
    return true;
  };
  while (i < code.length) {
    if (take("comment", rules.comment) || take("string", rules.string || STRING) || take("number", NUMBER)) continue;
    WORD.lastIndex = i;
    const word = WORD.exec(code);
    if (!word) {
      i += 1;
      continue;
    }
    const isKeyword = rules.keywords.has(rules.fold ? word[0].toLowerCase() : word[0]);
    take(isKeyword ? "keyword" : code[i + word[0].length] === "(" ? "call" : null, WORD);
  }
  if (plain < code.length) parts.push(code.slice(plain));
  return parts;
}
