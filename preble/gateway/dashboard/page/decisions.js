// Decisions: the list of the last ones, and the dialog that explains one with every worker's terms. Owns their markup and
// the words for reasons and terms.

import { partsBar } from "./charts.js";
import { $, ago, count, keepList, make, percent, plural, seconds, setText, showNone } from "./dom.js";

const WORKERS_EXPLAINED = 200;

const REASONS = {
  exploit: "A worker that has most of the prompt cached was the cheapest of all.",
  explore: "No worker has most of the prompt cached, so the cheapest of all got it.",
  escape: "Most of the prompt is cached elsewhere; waiting or decoding there costs more than computing it again here.",
  rendezvous: "No worker has most of the prompt cached. Other routers place requests, too: it was drawn among the cheap ones, so that prompts which begin alike meet.",
  rebalance: "A plan moves this prefix from a heavy worker to a light one.",
  replica: "A plan has copied this prefix to more workers; the cheapest of those that serve it got it.",
};

// What a worker's price is made of, in seconds: they add up to its total. The credit is taken off, and in no bar.
const TERMS = [
  { name: "queue_seconds", kind: "queue", title: "Queue", text: "waiting for what is ahead there" },
  { name: "prefill_seconds", kind: "prefill", title: "Prefill", text: "computing what it lacks of this prompt" },
  { name: "others_seconds", kind: "others", title: "Others", text: "those there who wait for it, or decode slower" },
  { name: "decode_seconds", kind: "decode", title: "Decode", text: "its own output, beside what decodes there" },
  { name: "eviction_seconds", kind: "eviction", title: "Eviction", text: "computing again what is evicted for it" },
  { name: "balance_seconds", kind: "balance", title: "Balance", text: "a share of its load" },
  { name: "credit_seconds", kind: "credit", title: "Credit", text: "taken off: saved up by earlier requests for a copy" },
];

// One more, behind the prefill, where some worker has part of the prompt below its GPU's memory.
const LOADING = { name: "loading_seconds", kind: "loading", title: "Loading", text: "bringing to its GPU what it has in host memory or on disk" };

// What is shown beside the price.
const BESIDE = [
  { name: "load_seconds", title: "Load", text: "work given to it within the window" },
  { name: "backlog_seconds", title: "Backlog", text: "prefill given to it and not done" },
];

// What a first token waits for, if the backlog is worked off first.
const FIRST_TOKEN = [
  { name: "backlog_seconds", kind: "queue", title: "Backlog" },
  { name: "prefill_seconds", kind: "prefill", title: "Prefill" },
  { name: "loading_seconds", kind: "loading", title: "Loading" },
];

function predicted(terms) {
  return terms.backlog_seconds + terms.prefill_seconds + terms.loading_seconds;
}

// The terms that a decision's prices have.
function termsOf({ terms }) {
  const loads = terms.some(({ loading_seconds: loading }) => loading > 0);
  return loads ? TERMS.flatMap((term) => (term.kind === "prefill" ? [term, LOADING] : [term])) : TERMS;
}

// How much of a prompt is cached, by where it lies.
function cachedParts({ matched_tokens: matched, host_tokens: host, disk_tokens: disk }, prompt) {
  const part = (tokens, kind, where) => ({ share: tokens / prompt, kind, title: `${plural(tokens, "token")} ${where}` });
  return [part(matched - host - disk, "cached", "in its GPU's memory"), part(host + disk, "loading", "in host memory or on disk, to be loaded")];
}

function partsOf(parts, terms, whole) {
  return parts.map(({ name, kind, title }) => {
    const value = terms[name];
    return { share: whole > 0 ? value / whole : 0, kind, title: `${title}: ${seconds(value)}` };
  });
}

// --- the list ---

export function showDecisions(state, ask) {
  const { decisions, gateway } = state;
  const recorded = state.totals.recorded !== null && state.totals.recorded !== undefined;
  const share = gateway.record_share >= 1 ? "" : `the first ${gateway.records_per_second} of each second and ${percent(gateway.record_share)} of the rest; `;
  setText($("decisions-note"), decisions.length ? `${share}click one for every worker's terms` : "");
  const most = Math.max(...decisions.map((one) => predicted(one.chosen)), 0);
  const items = decisions.map((decision) => ({ decision, most }));
  keepList($("decisions"), items, ({ decision }) => decision.sequence, (item) => decisionRow(item.decision, ask));
  const none = recorded ? "No request has been placed yet." : "Decisions are not recorded since the policy was changed.";
  showNone($("decisions"), decisions.length === 0, none);
}

function decisionRow(made, ask) {
  const age = make("span", { class: "note age" });
  const prompt = partsBar();
  const first = partsBar();
  const firstWord = make("b");
  const token = make("span", { class: "token" });
  const matched = make("span", { class: "note" });
  const node = make(
    "button", { class: "decision decisions-grid", "data-sequence": made.sequence, title: `request ${made.request_id}` },
    age,
    make("b", { class: "name" }, made.worker),
    make("span", {}, make("span", { class: `reason ${made.reason}` }, made.reason)),
    make("span", { class: "meter-line" }, prompt.node, matched),
    make("span", { class: "meter-line" }, first.node, firstWord),
    token,
  );
  node.addEventListener("click", () => explain(made.sequence, ask));
  const update = ({ decision, most }) => {
    const { chosen } = decision;
    setText(age, ago(decision.seconds_ago));
    prompt.update(cachedParts(chosen, decision.prompt_tokens));
    setText(matched, `${count(chosen.matched_tokens)} of ${count(decision.prompt_tokens)}`);
    first.update(partsOf(FIRST_TOKEN, chosen, most));
    setText(firstWord, seconds(predicted(chosen)));
    setText(token, tokenWord(decision));
  };
  return { node, update };
}

function tokenWord(decision) {
  if (decision.outcome === null) return "running";
  const first = decision.outcome.first_token_seconds;
  return first === null ? decision.outcome.ended : seconds(first);
}

// --- one decision ---

async function explain(sequence, ask) {
  const dialog = $("decision");
  dialog.replaceChildren(make("p", { class: "note" }, "…"));
  if (!dialog.open) dialog.showModal();
  try {
    const answer = await ask(`v1/preble/decisions/${sequence}`);
    const body = await answer.json();
    if (!answer.ok) throw new Error(body.error.message);
    dialog.replaceChildren(...explanation(body));
  } catch (error) {
    dialog.replaceChildren(closing("Decision"), make("p", {}, error.message));
  }
}

function closing(title) {
  const button = make("button", { class: "close", "aria-label": "Close" }, "×");
  button.addEventListener("click", () => $("decision").close());
  return make("div", { class: "title" }, make("h2", { id: "decision-title" }, title), button);
}

function explanation(decision) {
  const { chosen } = decision;
  const prompt = partsBar();
  prompt.update(cachedParts(chosen, decision.prompt_tokens));
  return [
    closing(`${decision.worker}: ${decision.reason}`),
    make("p", { class: "reason-text" }, REASONS[decision.reason] ?? `The rule of policy ${decision.policy} chose it.`, " ", against(decision)),
    make("div", { class: "fact-line" }, prompt.node,
      make("span", {}, `${count(chosen.matched_tokens)} of ${plural(decision.prompt_tokens, "prompt token")} estimated cached (${percent(chosen.matched_tokens / decision.prompt_tokens)})${whereOf(chosen)}`)),
    table(decision),
    legend(termsOf(decision)),
    outcome(decision),
    make("p", { class: "note id" }, `${sessionOf(decision)}request ${decision.request_id}, decision ${decision.sequence}, policy ${decision.policy}, ${ago(decision.seconds_ago)}`),
  ];
}

function whereOf({ host_tokens: host, disk_tokens: disk }) {
  const parts = [[host, "in host memory"], [disk, "on disk"]].filter(([tokens]) => tokens > 0);
  return parts.length ? `, ${parts.map(([tokens, where]) => `${count(tokens)} of them ${where}`).join(", ")}` : "";
}

function sessionOf({ session }) {
  if (!session) return "";
  const parts = [["session", session.session], ["agent", session.agent], ["of", session.parent]];
  return parts.filter(([, name]) => name).map(([word, name]) => `${word} ${name}, `).join("");
}

function against(decision) {
  if (decision.runner_up === null) {
    return decision.candidates === 1 && decision.workers > 1 ? "It was the only candidate." : "There was no other worker.";
  }
  const { runner_up: other, margin } = decision;
  return margin < 0 ? `${other} would have cost ${seconds(-margin)} less.` : `The runner-up was ${other}, ${seconds(margin)} behind.`;
}

// A unit for prices of which this is the highest, and a step of which each shown one is so many.
function unitFor(most) {
  if (most >= 100) return { name: "s", step: 0.01, digits: 2, whole: 1 };
  return most >= 0.01 ? { name: "ms", step: 0.001, digits: 0, whole: 0.001 } : { name: "µs", step: 1e-6, digits: 0, whole: 1e-6 };
}

// The terms of a price as they are shown: rounded so that they add up to the rounded total. Rounding each by itself may miss
// it by some steps; those go to the terms that were cut most. A policy's total that is no sum is left alone.
function addingUp(terms, unit, names) {
  const values = names.map(({ name }) => terms[name] / unit.step);
  const total = Math.round(terms.total_seconds / unit.step);
  const sum = values.reduce((a, b) => a + b, 0);
  const isSum = Math.abs(sum - terms.total_seconds / unit.step) < 0.5;
  const shown = values.map(isSum ? Math.floor : Math.round);
  if (isSum) {
    const order = values.map((value, i) => ({ i, cut: value - Math.floor(value) })).sort((a, b) => b.cut - a.cut || a.i - b.i);
    const missing = total - shown.reduce((a, b) => a + b, 0);
    order.slice(0, missing).forEach(({ i }) => (shown[i] += 1));
  }
  const word = (steps) => ((steps * unit.step) / unit.whole).toLocaleString("en-US", { minimumFractionDigits: unit.digits, maximumFractionDigits: unit.digits }).replace(/^-0(?=$|\.0*$)/, "0");
  return { terms: shown.map(word), total: word(total) };
}

function table(decision) {
  const rank = (terms) => (terms.worker === decision.worker ? 0 : terms.candidate ? 1 : 2);
  const rows = [...decision.terms].sort((a, b) => rank(a) - rank(b) || a.score - b.score);
  const most = Math.max(...rows.map((terms) => terms.total_seconds - terms.credit_seconds), 0);
  const scored = rows.some((terms) => terms.score !== terms.total_seconds);
  const priced = termsOf(decision);
  const names = ["Worker", "Cached", ...priced.map(titleOf), "Total", ...(scored ? ["Score"] : []), "", ...BESIDE.map(titleOf)];
  const unit = unitFor(Math.max(...rows.map((terms) => Math.abs(terms.total_seconds)), most));
  const head = make("tr", {}, ...names.map((name) => make("th", { scope: "col" }, name)));
  const shown = rows.slice(0, WORKERS_EXPLAINED).map((terms) => tableRow(terms, decision, { most, scored, unit, names, priced }));
  const caption = make("p", { class: "note" }, `Prices in ${unit.name}; the terms add up to the total.`);
  if (scored) setText(caption, `Prices in ${unit.name}; the policy compared the score.`);
  const box = make("div", { class: "scroll" }, caption, make("table", {}, make("thead", {}, head), make("tbody", {}, ...shown)));
  const rest = rows.length - shown.length;
  if (rest > 0) box.append(make("p", { class: "note" }, `and ${plural(rest, "worker")} that cost more`));
  return box;
}

function titleOf({ title }) {
  return title;
}

// Where the page is narrow each cell says what it is, and its row has several lines.
function tableRow(terms, decision, { most, scored, unit, names, priced }) {
  const shown = addingUp(terms, unit, priced);
  const bar = partsBar();
  bar.update(partsOf(priced.filter(({ kind }) => kind !== "credit"), terms, most));
  const isChosen = terms.worker === decision.worker;
  const note = isChosen ? "chosen" : terms.candidate ? "" : "no candidate";
  const cells = [
    make("td", {}, make("b", { class: "name" }, terms.worker), note ? make("span", { class: `tag ${isChosen ? "chosen" : ""}` }, note) : ""),
    make("td", {}, count(terms.matched_tokens)),
    ...shown.terms.map((word) => make("td", { class: word === "0" || /^0\.0*$/.test(word) ? "nothing" : "" }, word)),
    make("td", {}, make("b", {}, shown.total)),
    ...(scored ? [make("td", {}, terms.score === null ? "∞" : terms.score.toPrecision(4))] : []),
    make("td", { class: "bar" }, bar.node),
    ...BESIDE.map(({ name }) => make("td", { class: "beside" }, seconds(terms[name]))),
  ];
  cells.forEach((cell, i) => cell.setAttribute("data-name", names[i]));
  return make("tr", { class: isChosen ? "is-chosen" : terms.candidate ? "" : "is-out" }, ...cells);
}

function legend(priced) {
  const parts = priced.map(({ kind, title, text }) => make("span", {}, make("i", { class: kind }), make("b", {}, title), ` ${text}`));
  const beside = BESIDE.map(({ title, text }) => make("span", {}, make("b", {}, title), ` ${text}`));
  return make("div", {}, make("p", { class: "legend" }, ...parts), make("p", { class: "legend" }, "Beside the total:", ...beside));
}

function outcome(decision) {
  const { outcome: end, chosen } = decision;
  if (end === null) return make("p", { class: "note" }, "The request has not ended yet.");
  const lines = [["Ended", `${end.ended} after ${seconds(end.seconds)}${end.output_tokens === null ? "" : `, ${plural(end.output_tokens, "output token")}`}`]];
  if (end.first_token_seconds !== null) {
    const sign = decision.late_seconds >= 0 ? "later" : "earlier";
    lines.push(["First token", `${seconds(end.first_token_seconds)}, ${seconds(Math.abs(decision.late_seconds))} ${sign} than predicted`]);
  }
  if (end.cached_tokens !== null) {
    const error = end.cached_tokens - chosen.matched_tokens;
    const word = error === 0 ? "as estimated" : `${count(Math.abs(error))} ${error > 0 ? "more" : "fewer"} than estimated`;
    lines.push(["Cached", `${plural(end.cached_tokens, "token")} by the engine's word, ${word}`]);
  }
  if (decision.regret_seconds !== null) {
    const lost = decision.lost_tokens ? `; ${plural(decision.lost_tokens, "token")} computed that another worker had` : "";
    lines.push(["Regret", `${seconds(decision.regret_seconds)}${lost}`]);
  }
  return make("dl", { class: "outcome" }, ...lines.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value))));
}
