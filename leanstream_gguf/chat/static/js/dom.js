// Elements without HTML text: nothing that a model or a file says is ever parsed as HTML.

const SVG = "http://www.w3.org/2000/svg";

function set(element, name, value) {
  if (value === undefined || value === null || value === false) return;
  if (name === "class") element.setAttribute("class", value);
  else if (name === "text") element.textContent = value;
  else if (name === "on") for (const [event, handler] of Object.entries(value)) element.addEventListener(event, handler);
  else if (name === "data") Object.assign(element.dataset, value);
  else if (name === "value") element.value = value;
  else if (name.startsWith("on")) throw new Error("handlers go into `on`");
  else element.setAttribute(name, value === true ? "" : value);
}

/** h("button", {class: "x", on: {click}}, "text", child, [children]) */
export function h(tag, props = {}, ...children) {
  const element = document.createElement(tag);
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  for (const [name, value] of Object.entries(props)) set(element, name, value);
  return element;
}

/** The same for SVG. */
export function svg(tag, props = {}, ...children) {
  const element = document.createElementNS(SVG, tag);
  element.append(...children);
  for (const [name, value] of Object.entries(props)) set(element, name, value);
  return element;
}

export function icon(name) {
  return svg("svg", { class: "icon", "aria-hidden": "true", focusable: "false" }, svg("use", { href: `icons.svg#${name}` }));
}

/** A button with an icon; `label` is its name for everybody who does not see the icon. */
export function iconButton(name, label, click, props = {}) {
  const { class: more = "", ...others } = props;
  return h(
    "button",
    { type: "button", class: `icon-button ${more}`, "aria-label": label, title: label, on: { click }, ...others },
    icon(name),
  );
}

export const $ = (selector, root = document) => root.querySelector(selector);

/** Replace the children of an element. */
export function fill(element, ...children) {
  element.replaceChildren(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** Say something to screen readers. */
export function announce(text) {
  const region = document.getElementById("announcer");
  region.textContent = "";
  setTimeout(() => (region.textContent = text), 50); // two equal texts in a row are said twice
}

/** Run `work` at most once a frame. */
export function oncePerFrame(work) {
  let pending = false;
  return () => {
    if (pending) return;
    pending = true;
    requestAnimationFrame(() => {
      pending = false;
      work();
    });
  };
}

/** Run `work` when the calls have paused for `ms`. */
export function debounced(work, ms) {
  let timer = 0;
  return (...args) => {
    clearTimeout(timer);
    timer = setTimeout(() => work(...args), ms);
  };
}
