// Small charts on SVG: one line over time with its area, and bars of parts. Owns their geometry; colours are the
// style's. The newest value is at the right edge; a gap in the line is a time without a value.

import { make, makeSvg, setAttribute } from "./dom.js";

const WIDTH = 300;
const HEIGHT = 100;

// A line chart. `update(values, shown, top)`: the latest values, how many places the width has, and the least height of
// the scale; it grows when a value is higher.
export function lineChart() {
  const area = makeSvg("path", { class: "area" });
  const line = makeSvg("path", { class: "line", "vector-effect": "non-scaling-stroke" });
  const box = { class: "chart", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" };
  const node = makeSvg("svg", box, area, line);
  function update(values, shown, top) {
    const scale = Math.max(top, ...values.filter((value) => value !== null));
    const runs = runsOf(values, shown, scale);
    setAttribute(line, "d", runs.map((run) => `M${run.map(point).join("L")}${run.length === 1 ? "h0.01" : ""}`).join(""));
    setAttribute(area, "d", runs.map((run) => `M${run[0][0]},${HEIGHT}L${run.map(point).join("L")}V${HEIGHT}Z`).join(""));
  }
  return { node, update };
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
