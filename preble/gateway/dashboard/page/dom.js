// Elements and words: makes nodes, keeps lists in step with data, writes numbers. All text goes in as text nodes, so
// that nothing a worker or a client calls itself can become markup. Owns no data.

const SVG = "http://www.w3.org/2000/svg";

export const $ = (id) => document.getElementById(id);

// An element; `attributes` with `class`, `title` and so on, children are nodes or strings.
export function make(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

export function makeSvg(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

// Set what differs only: a node that stays the same keeps its selection, and costs no layout.
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function setAttribute(node, name, value) {
  if (node.getAttribute(name) !== value) node.setAttribute(name, value);
}

// Keep the children of `parent` in step with `items`, one each, in order. `create(item)` returns an object with `node`
// and `update(item)`. A child that stays is not replaced, nor moved because another one goes, so a click or the focus on it is
// not lost.
export function keepList(parent, items, keyOf, create) {
  const known = (parent.kept ??= new Map());
  const wanted = new Set(items.map(keyOf));
  for (const [key, { node }] of known) {
    if (!wanted.has(key)) {
      node.remove();
      known.delete(key);
    }
  }
  let place = parent.firstChild;
  for (const item of items) {
    const key = keyOf(item);
    if (!known.has(key)) known.set(key, create(item));
    const { node, update } = known.get(key);
    update(item);
    if (node === place) place = place.nextSibling;
    else parent.insertBefore(node, place);
  }
}

// One line in place of a list that is empty.
export function showNone(list, isEmpty, text) {
  const there = list.nextElementSibling?.classList.contains("none") ? list.nextElementSibling : null;
  if (isEmpty && there === null) list.after(make("p", { class: "note none" }, text));
  else if (isEmpty) setText(there, text);
  else if (there !== null) there.remove();
}

// --- words ---

const UNKNOWN = "–";

export function percent(share) {
  return share === null || share === undefined ? UNKNOWN : `${(100 * share).toFixed(share > 0 && share < 0.1 ? 1 : 0)} %`;
}

export function count(value) {
  return value === null || value === undefined ? UNKNOWN : Math.round(value).toLocaleString("en-US");
}

export function rate(value) {
  return value === null || value === undefined ? UNKNOWN : value < 10 ? value.toFixed(1) : count(value);
}

// Seconds with the unit that fits: 850 µs, 12 ms, 1.24 s, 3 min.
export function seconds(value) {
  if (value === null || value === undefined) return UNKNOWN;
  const size = Math.abs(value);
  if (size === 0) return "0 s";
  if (size < 0.001) return `${Math.round(value * 1e6)} µs`;
  if (size < 0.9995) return `${(value * 1e3).toFixed(size < 0.01 ? 1 : 0)} ms`;
  if (size < 1000) return `${value.toFixed(size < 10 ? 2 : size < 60 ? 1 : 0)} s`;
  return duration(value);
}

// A time that has passed, in whole units.
export function duration(value) {
  if (value < 60) return `${Math.floor(value)} s`;
  if (value < 3600) return `${Math.floor(value / 60)} min`;
  if (value < 86400) return `${Math.floor(value / 3600)} h ${Math.floor((value % 3600) / 60)} min`;
  return `${Math.floor(value / 86400)} d ${Math.floor((value % 86400) / 3600)} h`;
}

export function ago(value) {
  return value < 1 ? "now" : `${duration(value)} ago`;
}

export function plural(number, word) {
  return `${count(number)} ${word}${number === 1 ? "" : "s"}`;
}
