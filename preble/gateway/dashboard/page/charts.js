// Small charts on SVG: one line over time with its area, and bars of parts. Owns their geometry, their scale and what they
// say under the pointer; colours are the style's. The newest value is at the right edge; a gap in the line is a time
// without a value.

import { make, makeSvg, setAttribute, setText } from "./dom.js";
import { describeUnder } from "./hover.js";

const WIDTH = 300;
const HEIGHT = 100;
const STEPS = [1, 1.5, 2, 3, 4, 5, 6, 8, 10];

// A line chart. `update(values, { shown, top, word, seconds })`: the latest values, how many places the width has, the least
// height of the scale (it grows when a value is higher), a value in words, and how far apart values are.
export function lineChart() {
  const area = makeSvg("path", { class: "area" });
  const line = makeSvg("path", { class: "line", "vector-effect": "non-scaling-stroke" });
  const box = { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" };
  const scaleWord = make("span", { class: "scale", "aria-hidden": "true" });
  const node = make("div", { class: "chart" }, makeSvg("svg", box, area, line), scaleWord);
  let now = { values: [], shown: 1, word: String, seconds: 1 };
  function update(values, { shown, top, word, seconds }) {
    const scale = niceTop(highest(values, top));
    now = { values, shown, word, seconds };
    const runs = runsOf(values, shown, scale);
    setAttribute(line, "d", runs.map((run) => `M${run.map(point).join("L")}${run.length === 1 ? "h0.01" : ""}`).join(""));
    setAttribute(area, "d", runs.map((run) => `M${run[0][0]},${HEIGHT}L${run.map(point).join("L")}V${HEIGHT}Z`).join(""));
    setText(scaleWord, word(scale));
  }
  describeUnder(node, (share) => {
    const { values, shown, word, seconds } = now;
    if (values.length === 0) return null;
    const places = Math.max(shown - 1, 1);
    const back = Math.min(Math.round((1 - share) * places), values.length - 1);
    const age = Math.round(back * seconds);
    return { at: 1 - back / places, text: `${word(values[values.length - 1 - back])}, ${age ? `${age} s ago` : "now"}` };
  });
  return { node, update };
}

// The highest of some values, null among them, and of `least`.
export function highest(values, least) {
  let most = least;
  for (const value of values) if (value !== null && value > most) most = value;
  return most;
}

// The next round number, so that a scale does not change with every value.
export function niceTop(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return power * STEPS.find((step) => value <= power * step * (1 + 1e-9));
}

function point([x, y]) {
  return `${x.toFixed(1)},${y.toFixed(1)}`;
}

// Values as runs of points, cut where a value is missing.
function runsOf(values, shown, scale) {
  const runs = [];
  let run = null;
  values.forEach((value, i) => {
    if (value === null) {
      run = null;
      return;
    }
    if (run === null) runs.push((run = []));
    const x = WIDTH * (1 - (values.length - 1 - i) / Math.max(shown - 1, 1));
    run.push([x, (HEIGHT - 4) * (1 - value / scale) + 2]);
  });
  return runs;
}

// A bar of parts of one whole. `update([{ share, kind, title }])`; shares are of the bar's width.
export function partsBar() {
  const node = make("span", { class: "parts" });
  function update(parts) {
    while (node.children.length > parts.length) node.lastChild.remove();
    while (node.children.length < parts.length) node.append(make("i"));
    parts.forEach((part, i) => {
      const child = node.children[i];
      setAttribute(child, "class", part.kind);
      if (part.title) setAttribute(child, "title", part.title);
      child.hidden = !(part.share > 0);
      child.style.width = `${Math.min(1, part.share) * 100}%`;
    });
  }
  return { node, update };
}
