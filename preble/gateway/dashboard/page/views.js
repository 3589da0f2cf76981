// The page's smaller parts: fleet, prefixes, events. Each `show...` brings one part up to date with a
// state of the gateway. Owns their markup and their words.

import { lineChart, partsBar } from "./charts.js";
import { $, ago, count, duration, keepList, make, percent, plural, rate, seconds, setAttribute, setText, showNone } from "./dom.js";

const HOLDERS_SHOWN = 6;

// --- fleet ---

const perSecond = (value) => `${rate(value)} /s`;
const TILES = [
  {
    name: "requests_per_second", title: "Requests", kind: "blue", top: 1, word: perSecond,
    small: ({ totals }) => `${count(totals.live_requests)} live, ${count(totals.requests)} so far`,
  },
  {
    name: "errors", title: "Errors", kind: "red", top: 0.01, word: percent,
    small: ({ totals }) => `${count(totals.failed_answers)} failed, ${count(totals.refused_answers)} refused`,
    hint: "Answers of the last 30 s that were errors of ours (5xx) or refusals (429); below, since the start",
  },
  {
    name: "output_tokens_per_second", title: "Output tokens", kind: "teal", top: 10, word: perSecond,
    small: ({ totals }) => `${count(totals.output_tokens)} so far`,
  },
  {
    name: "first_token_p50", title: "Time to first token", kind: "violet", top: 0.01, word: seconds,
    small: ({ fleet }) => `median; p99 ${seconds(fleet.first_token_p99)}`,
  },
  {
    name: "seconds_per_token_p50", title: "Time per token", kind: "pink", top: 0.005, word: seconds,
    small: ({ fleet }) => `median; p99 ${seconds(fleet.seconds_per_token_p99)}`,
    hint: "Between the output tokens of a choice, its mean, of choices that ended in the last 30 s",
  },
  {
    name: "hit", title: "From cache", kind: "green", top: 1, word: percent,
    small: ({ fleet }) => (fleet.loaded > 0 ? `${percent(fleet.loaded)} of it loaded` : "of prompt tokens"),
    hint: "Prompt tokens of the last 30 s that were found in caches; of it, what was loaded from host memory or disk",
  },
  {
    name: "waiting", title: "Waiting at engines", kind: "orange", top: 4, word: count,
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
    if (tile.hint) head.setAttribute("title", tile.hint);
    const node = make("div", { class: `tile ${tile.kind}`, id: `tile-${tile.name}` }, head, chart.node);
    const update = (item) => {
      setText(big, tile.word(item.state.fleet[tile.name]));
      setText(small, tile.small(item.state));
      chart.update(item.values, { shown: item.shown, top: tile.top, word: tile.word, seconds: item.state.tick_seconds });
    };
    return { node, update };
  });
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
    setText(load, prefix.load < 1 ? `load ${percent(prefix.load)}` : `load of ${prefix.load.toFixed(1)} workers`);
    bar.update(prefix.holders.map((one) => ({ share: one.load / most, kind: "holder", title: `${one.worker}: ${percent(one.load)}` })));
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
