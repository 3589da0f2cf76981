// The page's parts but decisions: fleet, workers, prefixes, events. Each `show...` brings one part up to date with a
// state of the gateway. Owns their markup and their words.

import { lineChart, partsBar } from "./charts.js";
import { $, ago, count, duration, keepList, make, percent, plural, rate, seconds, setAttribute, setText } from "./dom.js";

const WORKERS_SHOWN = 24;
const HOLDERS_SHOWN = 6;
const TROUBLE = ["lost", "refused", "suspect", "connecting", "draining", "ready"]; // the order of workers
let showsAll = false;

// --- fleet ---

const TILES = [
  {
    name: "requests_per_second", title: "Requests", kind: "blue", top: 1,
    big: ({ fleet }) => `${rate(fleet.requests_per_second)} /s`,
    small: ({ totals }) => `${count(totals.live_requests)} live, ${count(totals.requests)} so far`,
  },
  {
    name: "hit", title: "Prompt tokens from cache", kind: "green", top: 1,
    big: ({ fleet }) => percent(fleet.hit),
    small: () => "of the last 30 s",
  },
  {
    name: "first_token_p50", title: "Time to first token", kind: "violet", top: 0.01,
    big: ({ fleet }) => seconds(fleet.first_token_p50),
    small: ({ fleet }) => `median; p99 ${seconds(fleet.first_token_p99)}`,
  },
  {
    name: "waiting", title: "Waiting at engines", kind: "orange", top: 4,
    big: ({ fleet }) => count(fleet.waiting),
    small: ({ fleet }) => `${count(fleet.running)} running`,
  },
];

export function showFleet(parent, state, history, shown) {
  const items = TILES.map((tile) => ({ tile, state, values: history[tile.name] ?? [], shown }));
  keepList(parent, items, ({ tile }) => tile.name, ({ tile }) => {
    const big = make("strong");
    const small = make("span", { class: "note" });
    const chart = lineChart();
    const head = make("div", {}, make("h2", {}, tile.title), big, small);
    const node = make("div", { class: `tile ${tile.kind}`, id: `tile-${tile.name}` }, head, chart.node);
    const update = (item) => {
      setText(big, tile.big(item.state));
      setText(small, tile.small(item.state));
      chart.update(item.values, item.shown, tile.top);
    };
    return { node, update };
  });
}

// --- workers ---

export function showWorkers(state, histories, shown) {
  const order = (worker) => TROUBLE.indexOf(worker.state);
  const compare = (a, b) => order(a) - order(b) || a.id.localeCompare(b.id, "en", { numeric: true });
  const sorted = [...state.workers].sort(compare);
  // One scale for all workers, so that their charts can be compared.
  const highest = (name) => Math.max(...sorted.map((worker) => Math.max(...histories.get(worker.address)[name])));
  const tops = { load: Math.max(1, highest("load")), waiting: Math.max(4, highest("waiting")), kv: 1, hit: 1 };
  const items = (showsAll ? sorted : sorted.slice(0, WORKERS_SHOWN)).map((worker) => {
    return { worker, past: histories.get(worker.address), shown, tops };
  });
  keepList($("workers"), items, ({ worker }) => worker.address, workerRow);
  const states = TROUBLE.map((name) => ({ name, number: sorted.filter((worker) => worker.state === name).length }));
  keepList($("workers-count"), states.filter(({ number }) => number), ({ name }) => name, ({ name }) => {
    const node = make("span", { class: `state ${name}` });
    return { node, update: ({ number }) => setText(node, `${count(number)} ${name}`) };
  });
  const more = $("workers-more");
  more.hidden = sorted.length <= WORKERS_SHOWN && !state.workers_left_out;
  const beyond = state.workers_left_out ? ` (${count(state.workers_left_out)} more are not listed)` : "";
  setText(more, `${showsAll ? "Show fewer" : `Show all ${count(sorted.length)}`}${beyond}`);
  more.onclick = () => {
    showsAll = !showsAll;
    showWorkers(state, histories, shown);
  };
}

const METERS = [
  { name: "load", title: "Load", kind: "blue", word: (worker) => percent(worker.load),
    hint: () => "Work given to it in the window, prefill and expected decoding, as a share of its time" },
  { name: "waiting", title: "Queue", kind: "orange", word: (worker) => count(worker.waiting),
    more: (worker) => `${count(worker.running)} running`, hint: () => "Requests that wait at the engine" },
  { name: "kv", title: "KV cache", kind: "violet", word: (worker) => percent(worker.kv),
    hint: (worker) => `${count(worker.cached_tokens)} of ${count(worker.kv_capacity_tokens)} tokens estimated cached` },
  { name: "hit", title: "Hit rate", kind: "green", word: (worker) => percent(worker.hit),
    hint: () => "Prompt tokens found in its cache, of the last 30 s" },
];

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
  const update = ({ worker, past, shown, tops }) => {
    setAttribute(node, "class", `worker workers-grid is-${worker.state}`);
    setAttribute(node, "data-worker", worker.id);
    setAttribute(who, "title", `${worker.address}\n${engineOf(worker)}\nrestarts ${worker.restarts}, losses ${worker.losses}`);
    setText(name, worker.id);
    setText(state, worker.state);
    setAttribute(state, "class", `state ${worker.state}`);
    setText(why, whyOf(worker));
    for (const meter of meters) {
      setText(meter.word_, meter.word(worker));
      setText(meter.more_, meter.more ? meter.more(worker) : "");
      setAttribute(meter.node, "title", meter.hint(worker));
      meter.chart.update(past[meter.name], shown, tops[meter.name]);
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

// --- prefixes ---

export function showPrefixes(state) {
  const { prefixes, totals, window_seconds: window } = state;
  const some = `of ${count(totals.groups)}, by load within ${duration(window)}`;
  setText($("prefixes-note"), prefixes.length ? some : "");
  const most = Math.max(...prefixes.map((prefix) => prefix.load), 0.001);
  const items = prefixes.map((prefix) => ({ prefix, most }));
  keepList($("prefixes"), items, ({ prefix }) => `${prefix.name} ${prefix.prefix_tokens}`, prefixRow);
  showNone($("prefixes"), prefixes.length === 0, "No prefix has been asked for twice yet.");
}

function prefixRow() {
  const name = make("code", { title: "A name for it; its tokens are not shown" });
  const tokens = make("b");
  const requests = make("span", { class: "note" });
  const load = make("b");
  const bar = partsBar();
  const holders = make("div", { class: "holders" });
  const node = make(
    "div", { class: "prefix", role: "listitem" },
    make("div", { class: "line" }, tokens, name, requests, make("span", { class: "push" }, load)),
    bar.node, holders,
  );
  const update = ({ prefix, most }) => {
    setText(name, prefix.name);
    setText(tokens, plural(prefix.prefix_tokens, "token"));
    setText(requests, `${plural(prefix.requests, "request")}${prefix.has_namespace ? ", in a namespace" : ""}`);
    setText(load, `load ${percent(prefix.load)}`);
    bar.update(prefix.holders.map((one) => ({ share: one.load / most, kind: "p", title: `${one.worker}: ${percent(one.load)}` })));
    const shown = prefix.holders.slice(0, HOLDERS_SHOWN);
    keepList(holders, shown, (one) => one.worker, () => holderChip(prefix.prefix_tokens));
    const rest = prefix.holders_count - shown.length;
    setAttribute(holders, "data-rest", rest ? `and ${count(rest)} more` : "");
  };
  return { node, update };
}

function holderChip(tokens) {
  const node = make("span", { class: "chip" });
  const update = (one) => {
    const part = Math.min(1, one.cached_tokens / tokens);
    setText(node, `${one.worker}${part < 0.995 ? ` ${percent(part)} cached` : ""}`);
    setAttribute(node, "title", `${one.worker}: ${plural(one.requests, "request")}, ${count(one.cached_tokens)} tokens of it cached`);
  };
  return { node, update };
}

// --- events ---

const KINDS = { replica: "copy", rebalance: "move" };

export function showEvents(state) {
  setText($("events-note"), state.events_total ? `${count(state.events_total)} so far` : "");
  keepList($("events"), state.events, (event) => event.number, eventRow);
  showNone($("events"), state.events.length === 0, "No worker has changed, nothing was moved or copied.");
}

function eventRow(event) {
  const age = make("time", { class: "note" });
  const kind = event.kind === "worker" ? event.after : event.phase === "ended" ? "ended" : event.kind;
  const word = event.kind === "worker" ? event.after : `${KINDS[event.kind] ?? event.kind}${event.phase === "ended" ? " ended" : ""}`;
  const text = make("div", {}, ...eventWords(event));
  const node = make("div", { class: "event", role: "listitem" }, make("span", { class: `state ${kind}` }, word), text, age);
  return { node, update: (one) => setText(age, ago(one.seconds_ago)) };
}

function eventWords(event) {
  const strong = (text) => make("b", {}, text);
  if (event.kind === "worker") {
    const from = event.before === event.after ? "" : ` (was ${event.before})`;
    return [strong(event.worker), `${from}${event.why ? `: ${event.why}` : ""}`];
  }
  if (event.kind === "policy") return [strong(event.after), ` instead of ${event.before}`];
  const what = `${plural(event.prefix_tokens, "token")} `;
  const why = event.phase === "ended" ? event.why : event.reason;
  return [what, strong(event.from_worker), " → ", strong(event.to_worker), make("div", { class: "note" }, why ?? "")];
}

// One line in place of a list that is empty.
export function showNone(list, isEmpty, text) {
  const there = list.nextElementSibling?.classList.contains("none") ? list.nextElementSibling : null;
  if (isEmpty && there === null) list.after(make("p", { class: "note none" }, text));
  else if (isEmpty) setText(there, text);
  else if (there !== null) there.remove();
}
