// Where servers are looked for: each source of discovery, how long ago it answered, what it named, what became of that.
// Owns the part's markup and words; it is not shown where servers are not discovered.

import { $, ago, count, keepList, make, plural, setAttribute, setText } from "./dom.js";

const STATES = {
  "in step": "ready", doubted: "suspect", "no answer": "lost", "kept list": "suspect", asking: "connecting",
};
const READINESS = { ready: "ready", not_ready: "not ready", terminating: "terminating" };

export function showDiscovery(state) {
  const sources = state.gateway.discovery ?? [];
  $("discovery").hidden = sources.length === 0;
  setText($("discovery-note"), sources.length > 1 ? plural(sources.length, "source") : "");
  keepList($("sources"), sources, (source) => source.source, sourceRow);
}

function wordOf(source) {
  if (!source.has_answered) return source.age_seconds !== null ? "kept list" : source.failing ? "no answer" : "asking";
  return source.failing ? "no answer" : source.is_doubted ? "doubted" : "in step";
}

// "3 ready, 1 lost"; nothing for numbers that are all 0.
function parts(counts, words = {}) {
  const some = Object.entries(counts).filter(([, number]) => number > 0);
  return some.map(([name, number]) => `${count(number)} ${words[name] ?? name}`).join(", ");
}

function sourceRow() {
  const chip = make("span", { class: "state" });
  const name = make("b", { class: "name" });
  const age = make("span", { class: "note" });
  const found = make("b");
  const foundParts = make("span", { class: "note" });
  const taken = make("b");
  const takenParts = make("span", { class: "note" });
  const refused = make("b");
  const refusedParts = make("span", { class: "note" });
  const whys = make("ul", { class: "whys" });
  const node = make(
    "div", { class: "source sources-grid", role: "listitem" },
    make("div", { class: "which" }, chip, make("div", {}, name, age)),
    number("Found", found, foundParts), number("Taken", taken, takenParts), number("Refused", refused, refusedParts), whys,
  );
  const update = (source) => {
    const word = wordOf(source);
    setText(chip, word);
    setAttribute(chip, "class", `state ${STATES[word]}`);
    setText(name, source.source);
    setText(age, source.age_seconds === null ? "has not answered yet" : `answered ${ago(source.age_seconds)}`);
    const unusable = source.left_out;
    setText(found, source.has_answered ? count(source.named) : "–");
    setText(foundParts, parts(source.found, READINESS));
    const { withheld, draining } = source.servers;
    setText(taken, count(Object.values(source.servers).reduce((sum, one) => sum + one, 0)));
    setText(takenParts, [parts(source.workers), parts({ withheld, draining })].filter(Boolean).join(", "));
    const down = (source.workers.refused ?? 0) + unusable;
    setText(refused, count(down));
    setAttribute(refused, "class", down ? "is-bad" : "");
    setText(refusedParts, parts({ "left out": unusable, "at the handshake": source.workers.refused ?? 0 }));
    keepList(whys, reasons(source), ([who]) => who, reasonRow);
    whys.hidden = whys.children.length === 0;
  };
  return { node, update };
}

function number(word, value, more) {
  return make("div", { class: "number-of" }, make("span", { class: "label" }, word), value, more);
}

// Who is not used and why, and what keeps the source from answering.
function reasons(source) {
  const found = [...Object.entries(source.unusable), ...Object.entries(source.refused)];
  if (source.keep_failing) found.unshift(["not kept", source.keep_failing]);
  if (source.failing) found.unshift([`failed ${count(source.failures)} times`, source.failing]);
  return found;
}

function reasonRow() {
  const who = make("code");
  const why = make("span");
  const update = ([name, text]) => {
    setText(who, name);
    setText(why, text);
  };
  return { node: make("li", {}, who, " ", why), update };
}
