// The workers: a strip with the load of each, and a row for each, with charts or compact. Owns their markup and words, and
// what the reader chose: the order, the filter, the kind of rows. Many workers are compact, unless the reader wants charts.

import { highest, lineChart, niceTop } from "./charts.js";
import { $, count, duration, keepList, make, percent, seconds, setAttribute, setText, showNone } from "./dom.js";
import { describeUnder } from "./hover.js";

const WITH_CHARTS = 24; // rows that are shown at first
const COMPACT = 256;
const MANY = 12; // workers, from which on rows are compact
const TROUBLE = ["lost", "refused", "suspect", "connecting", "draining", "ready"]; // the order of states

const byName = (a, b) => a.id.localeCompare(b.id, "en", { numeric: true });
const byTrouble = (a, b) => TROUBLE.indexOf(a.state) - TROUBLE.indexOf(b.state);
const most = (field) => (a, b) => (b[field] ?? -1) - (a[field] ?? -1);
const ORDERS = {
  trouble: byTrouble,
  name: () => 0,
  load: most("load"),
  queue: (a, b) => b.waiting - a.waiting || b.running - a.running,
  kv: most("kv"),
  hit: most("hit"),
};

const METERS = [
  { name: "load", title: "Load", kind: "blue", word: percent, top: 1,
    hint: () => "Work given to it in the window, prefill and expected decoding, as a share of its time" },
  { name: "waiting", title: "Queue", kind: "orange", word: count, top: 4,
    more: (worker) => `${count(worker.running)} running`, hint: () => "Requests that wait at the engine" },
  { name: "kv", title: "KV cache", kind: "violet", word: percent, top: 1,
    more: (worker) => (worker.away_tokens ? `${thousands(worker.away_tokens)} below` : ""), hint: cachedOf },
  { name: "hit", title: "Hit rate", kind: "green", word: percent, top: 1,
    more: (worker) => (worker.loaded >= 0.005 ? `${Math.round(100 * worker.loaded)} % below` : ""),
    hint: () => "Prompt tokens found in its cache, of the last 30 s; below: of them, those loaded from host memory or disk" },
];

const chosen = { order: "trouble", text: "", state: null, compact: null, all: false, worker: null };
let last = null; // { state, histories, shown }

export function showWorkers(state, histories, shown) {
  last = { state, histories, shown };
  const { workers } = state;
  const sorted = [...workers].sort((a, b) => ORDERS[chosen.order](a, b) || byName(a, b)).filter(isWanted);
  const isCompact = chosen.compact ?? workers.length > MANY;
  const limit = chosen.all ? Infinity : isCompact ? COMPACT : WITH_CHARTS;
  // One scale for all workers, so that their charts can be compared.
  const scale = Object.fromEntries(METERS.map(({ name, top }) => {
    return [name, niceTop(workers.reduce((least, { address }) => highest(histories.get(address)[name], least), top))];
  }));
  const items = sorted.slice(0, limit).map((worker) => {
    return { worker, past: histories.get(worker.address), shown, scale, seconds: state.tick_seconds };
  });
  showTools(workers, isCompact);
  $("loads-box").hidden = workers.length <= MANY;
  showStrip(sorted, scale.load);
  showHeads(isCompact, scale);
  setAttribute($("workers"), "class", isCompact ? "is-compact" : "");
  const kind = isCompact ? "compact" : "charts";
  keepList($("workers"), items, ({ worker }) => `${kind} ${worker.address}`, isCompact ? compactRow : workerRow);
  showNone($("workers"), workers.length > 0 && sorted.length === 0, "No worker is like that.");
  showMore(sorted.length, limit, state.workers_left_out);
  showDetail(state);
}

function isWanted({ id, address, state, engine, model }) {
  if (chosen.state !== null && state !== chosen.state) return false;
  return chosen.text === "" || [id, address, state, engine, model].some((one) => one.toLowerCase().includes(chosen.text));
}

function again() {
  if (last !== null) showWorkers(last.state, last.histories, last.shown);
}

function showMore(found, limit, leftOut) {
  const more = $("workers-more");
  more.hidden = found <= Math.min(limit, chosen.all ? WITH_CHARTS : limit) && !leftOut;
  const beyond = leftOut ? ` (${count(leftOut)} more are not listed)` : "";
  setText(more, `${chosen.all ? "Show fewer" : `Show all ${count(found)}`}${beyond}`);
}

// --- tools ---

$("workers-more").addEventListener("click", () => {
  chosen.all = !chosen.all;
  again();
});
$("workers-filter").addEventListener("input", (event) => {
  chosen.text = event.target.value.trim().toLowerCase();
  again();
});
$("workers-order").addEventListener("change", (event) => {
  chosen.order = event.target.value;
  again();
});
$("workers-rows").addEventListener("click", () => {
  chosen.compact = !(chosen.compact ?? (last !== null && last.state.workers.length > MANY));
  again();
});

function showTools(workers, isCompact) {
  const states = TROUBLE.map((name) => ({ name, number: workers.filter((worker) => worker.state === name).length }));
  const there = states.filter(({ name, number }) => number || name === chosen.state);
  keepList($("workers-count"), there, ({ name }) => name, ({ name }) => {
    const node = make("button", { class: `state ${name}`, title: "Show only these" });
    node.addEventListener("click", () => {
      chosen.state = chosen.state === name ? null : name;
      again();
    });
    const update = ({ number }) => {
      setText(node, `${count(number)} ${name}`);
      setAttribute(node, "aria-pressed", String(chosen.state === name));
    };
    return { node, update };
  });
  setText($("workers-rows"), isCompact ? "Charts" : "Compact");
}

function showHeads(isCompact, scale) {
  $("workers-head").hidden = isCompact;
  $("compact-heads").hidden = !isCompact;
  const units = { load: percent(scale.load), waiting: count(scale.waiting), kv: percent(scale.kv), hit: percent(scale.hit) };
  for (const { name, title } of METERS) {
    setText($(`head-${name}`), `${title} `);
    $(`head-${name}`).append(make("span", { class: "scale" }, `to ${units[name]}`));
  }
}

// --- the strip ---

let inStrip = [];

// One bar for each worker, as high as its load, in the order of the rows.
function showStrip(sorted, top) {
  inStrip = sorted;
  const items = sorted.map((worker) => ({ worker, top }));
  keepList($("loads"), items, ({ worker }) => worker.address, () => {
    const bar = make("i");
    const node = make("span", {}, bar);
    const update = ({ worker, top: whole }) => {
      setAttribute(node, "class", `is-${worker.state}${worker.load > 1 ? " is-over" : ""}`);
      bar.style.height = `${100 * Math.min(1, worker.load / whole)}%`;
    };
    return { node, update };
  });
  setText($("loads-scale"), `load, to ${percent(top)}`);
}

function inStripAt(share) {
  return Math.min(Math.floor(share * inStrip.length), inStrip.length - 1);
}

describeUnder($("loads-box"), (share) => {
  if (inStrip.length === 0) return null;
  const number = inStripAt(share);
  const { id, state, load, waiting } = inStrip[number];
  const text = `${id}: ${state === "ready" ? "" : `${state}, `}load ${percent(load)}, ${count(waiting)} waiting`;
  return { at: (number + 0.5) / inStrip.length, text };
});
$("loads-box").addEventListener("click", (event) => {
  const box = $("loads-box").getBoundingClientRect();
  const worker = inStrip[inStripAt(Math.min(Math.max((event.clientX - box.left) / box.width, 0), 0.999999))];
  if (worker !== undefined) open(worker);
});

// --- rows ---

function compactRow({ worker: first }) {
  const name = make("b", { class: "name" });
  const chart = lineChart();
  const words = METERS.map(({ name: field, kind, word, hint }) => ({ field, word, hint, node: make("span", { class: `number ${field} ${kind}` }) }));
  const node = make("button", { class: "worker compact", "data-worker": first.id }, make("i", { class: "dot" }), name, chart.node, ...words.map((one) => one.node));
  const item = make("div", { role: "listitem" }, node);
  let now = first;
  node.addEventListener("click", () => open(now));
  const update = ({ worker, past, shown, scale, seconds }) => {
    now = worker;
    const state = worker.state === "ready" ? "" : ` ${worker.state}: ${whyOf(worker)}`;
    setAttribute(node, "class", `worker compact blue is-${worker.state}${worker.load > 1 ? " is-over" : ""}`);
    setAttribute(node, "data-worker", worker.id);
    setAttribute(node, "aria-label", `${worker.id}, ${worker.state}, load ${percent(worker.load)}, ${count(worker.waiting)} waiting`);
    setText(name, worker.id);
    setAttribute(name, "title", `${worker.id}${state}`);
    chart.update(past.load, { shown, top: scale.load, word: percent, seconds });
    for (const { field, word, node: cell } of words) setText(cell, word(worker[field]));
  };
  return { node: item, update };
}

function workerRow({ worker: first }) {
  const name = make("b", { class: "name" });
  const state = make("span", { class: "state" });
  const why = make("span", { class: "note why" });
  const meters = METERS.map((meter) => {
    const word = make("b");
    const more = make("span", { class: "note" });
    const chart = lineChart();
    const label = make("span", { class: "label" }, meter.title);
    const node = make("div", { class: `meter ${meter.kind}` }, label, chart.node, make("span", { class: "value" }, word, more));
    return { ...meter, node, word_: word, more_: more, chart };
  });
  const who = make("div", { class: "who" }, make("div", {}, name, state), why);
  const node = make("div", { class: "worker workers-grid", role: "listitem", "data-worker": first.id }, who, ...meters.map((one) => one.node));
  const update = ({ worker, past, shown, scale, seconds }) => {
    setAttribute(node, "class", `worker workers-grid is-${worker.state}`);
    setAttribute(node, "data-worker", worker.id);
    setAttribute(who, "title", `${worker.address}\n${engineOf(worker)}\nrestarts ${worker.restarts}, losses ${worker.losses}`);
    setText(name, worker.id);
    setText(state, worker.state);
    setAttribute(state, "class", `state ${worker.state}`);
    setText(why, whyOf(worker));
    for (const meter of meters) {
      setText(meter.word_, meter.word(worker[meter.name]));
      setText(meter.more_, meter.more ? meter.more(worker) : "");
      setAttribute(meter.node, "title", meter.hint(worker));
      meter.chart.update(past[meter.name], { shown, top: scale[meter.name], word: meter.word, seconds });
    }
  };
  return { node, update };
}

function whyOf(worker) {
  if (worker.state === "ready") return worker.restarts ? `restarted ${count(worker.restarts)}×` : engineOf(worker);
  return `for ${duration(worker.state_seconds)}${worker.why ? `: ${worker.why}` : ""}`;
}

function engineOf({ engine, model }) {
  return engine === model ? engine : `${engine} ${model}`;
}

// --- one worker ---

function open(worker) {
  chosen.worker = worker.address;
  again();
  if (!$("worker").open) $("worker").showModal();
}

$("worker").addEventListener("close", () => {
  chosen.worker = null;
  keepList($("worker-charts"), [], () => "", () => null);
});
$("worker-close").addEventListener("click", () => $("worker").close());

// The dialog with the charts and the details of the worker that was opened, with every tick anew.
function showDetail({ workers, tick_seconds: tick }) {
  const worker = workers.find(({ address }) => address === chosen.worker);
  if (worker === undefined) {
    if ($("worker").open) $("worker").close();
    return;
  }
  setText($("worker-title"), worker.id);
  setText($("worker-state"), worker.state);
  setAttribute($("worker-state"), "class", `state ${worker.state}`);
  keepList($("worker-charts"), METERS, ({ name }) => name, ({ name, title, kind, word, top, hint, more }) => {
    const big = make("strong");
    const note = make("span", { class: "note" });
    const chart = lineChart();
    const node = make("div", { class: `tile ${kind}` }, make("div", {}, make("h2", {}, title), big, note), chart.node);
    const update = () => {
      const now = last.state.workers.find(({ address }) => address === chosen.worker);
      setText(big, word(now[name]));
      setText(note, more?.(now) || hint(now));
      chart.update(last.histories.get(now.address)[name], { shown: last.shown, top, word, seconds: tick });
    };
    return { node, update };
  });
  const details = [
    ["State", `${worker.state} for ${duration(worker.state_seconds)}${worker.why ? `: ${worker.why}` : ""}`],
    ["Address", worker.address],
    ["Engine", engineOf(worker)],
    ["Live requests", `${count(worker.live_requests)} booked, ${count(worker.running)} running, ${count(worker.waiting)} waiting`],
    ["KV cache", `${cachedOf(worker)}${accuracyOf(worker)}`],
    ...(worker.away_tokens ? [["Loading", `${seconds(1000 * worker.host_token_seconds)} for 1,000 tokens from host memory, ${seconds(1000 * worker.disk_token_seconds)} from disk, as learned`]] : []),
    ["Since the start", `${count(worker.restarts)} restarts, ${count(worker.losses)} losses of its connection`],
  ];
  keepList($("worker-details"), details, ([name]) => name, ([name]) => {
    const value = make("dd");
    const node = make("div", {}, make("dt", {}, name), value);
    return { node, update: ([, text]) => setText(value, text) };
  });
}

// What is estimated cached in the GPU's memory, and what below it.
function cachedOf({ cached_tokens: cached, away_tokens: away, kv_capacity_tokens: capacity }) {
  const below = away ? `, ${count(away)} more in host memory or on disk` : "";
  return `${count(cached - (away ?? 0))} of ${count(capacity)} tokens estimated cached${below}`;
}

function thousands(value) {
  return value < 10_000 ? count(value) : `${count(value / 1000)}k`;
}

function accuracyOf({ cache_accuracy: accuracy }) {
  return accuracy === null || accuracy === undefined ? "" : `, ${percent(accuracy)} of that right`;
}
