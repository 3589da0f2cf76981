// The live page: asks the gateway once a tick how everything stands and hands the answer to the parts. Owns the polling,
// the key, the history, and what is shown while the gateway does not answer; what the parts look like is theirs.

import { $, duration, make, setAttribute, setText } from "./dom.js";
import { showDecisions } from "./decisions.js";
import { showDiscovery } from "./discovery.js";
import { describeAgain } from "./hover.js";
import { showEvents, showFleet, showPrefixes } from "./views.js";
import { showWorkers } from "./workers.js";

const SHOWN_MIN = 60; // ticks that a chart is wide, at the least
const KEY = "preble-admin-key";
const WAIT_MS = 10000;

const history = { tick: 0, fleet: {}, workers: new Map() };
let lastAnswer = null; // when it came
let timer = null;
let asking = false;

// --- asking ---

export async function ask(path) {
  const key = sessionStorage.getItem(KEY);
  const headers = key ? { authorization: `Bearer ${key}` } : {};
  return fetch(path, { headers, cache: "no-store", signal: AbortSignal.timeout(WAIT_MS) });
}

async function poll() {
  if (asking) return;
  asking = true;
  clearTimeout(timer);
  let next = 1000;
  try {
    const answer = await ask(`v1/preble/state?after=${history.tick}`);
    if (answer.status === 401 || answer.status === 403) {
      askForKey(answer.status);
      return;
    }
    if (!answer.ok) throw new Error(`the gateway answered with status ${answer.status}`);
    const state = await answer.json();
    next = 1000 * state.tick_seconds;
    lastAnswer = Date.now();
    take(state);
  } catch (error) {
    showTrouble(error);
  } finally {
    asking = false;
  }
  if (!document.hidden) timer = setTimeout(poll, next);
}

function askForKey(status) {
  const known = sessionStorage.getItem(KEY) !== null;
  sessionStorage.removeItem(KEY);
  const why = known ? "The key was refused." : "Enter one of its admin keys.";
  setText($("key-why"), status === 403 ? "That is a key for requests. Enter one of the admin keys." : why);
  $("key-text").value = "";
  $("key").showModal();
}

$("key").addEventListener("close", () => {
  const text = $("key-text").value.trim();
  if (text) sessionStorage.setItem(KEY, text);
  poll();
});

document.addEventListener("visibilitychange", () => {
  if (!document.hidden) poll();
});

// --- taking ---

function take(state) {
  if (state.tick < history.tick) {
    // Another process answers now: what was shown of the old one is not its history.
    Object.assign(history, { tick: 0, fleet: {}, workers: new Map() });
    return;
  }
  history.tick = state.tick;
  append(history.fleet, state.fleet_history, state.history_ticks);
  const workers = new Map();
  for (const worker of state.workers) {
    const kept = history.workers.get(worker.address) ?? {};
    append(kept, worker.history, state.history_ticks);
    workers.set(worker.address, kept);
  }
  history.workers = workers;
  show(state);
}

function append(kept, fresh, most) {
  for (const [name, values] of Object.entries(fresh)) {
    kept[name] = [...(kept[name] ?? []), ...values].slice(-most);
  }
}

// --- showing ---

function show(state) {
  const ticks = Object.values(history.fleet)[0].length;
  const shown = Math.min(state.history_ticks, Math.max(SHOWN_MIN, ticks));
  $("main").hidden = false;
  $("trouble").hidden = true;
  document.body.classList.remove("stale");
  showHeader(state);
  showFleet($("fleet"), state, history.fleet, shown);
  showWorkers(state, history.workers, shown);
  showDiscovery(state);
  showDecisions(state, ask);
  showPrefixes(state);
  showEvents(state);
  describeAgain();
}

function showHeader(state) {
  const { ready, draining } = state.gateway;
  const lost = state.workers.filter((worker) => worker.state === "lost" || worker.state === "refused").length;
  const word = draining ? "draining" : !ready ? "no workers" : lost ? "ready, degraded" : "ready";
  showState(word, draining ? "draining" : !ready ? "lost" : lost ? "suspect" : "ready");
  document.title = `${lost ? `${lost} down · ` : ""}Preble`;
  const details = [
    ["policy", state.totals.policy],
    ["model", state.gateway.models.join(", ") || "–"],
    ["up", duration(state.uptime_seconds)],
    ["version", state.gateway.version],
  ];
  const list = $("details");
  if (!list.children.length) details.forEach(() => list.append(make("div", {}, make("dt"), make("dd"))));
  details.forEach(([name, value], i) => {
    setText(list.children[i].firstChild, name);
    setText(list.children[i].lastChild, value);
    setAttribute(list.children[i], "title", `${name}: ${value}`);
  });
}

function showState(word, kind) {
  setText($("gateway-state"), word);
  setAttribute($("gateway-state"), "class", `state ${kind}`);
}

function showTrouble(error) {
  const age = lastAnswer === null ? "" : ` What you see is ${duration((Date.now() - lastAnswer) / 1000)} old.`;
  const why = error instanceof TypeError || error.name === "TimeoutError" ? "The gateway does not answer." : `${error.message}.`;
  setText($("trouble"), `${why}${age}`);
  $("trouble").hidden = false;
  document.body.classList.add("stale");
  showState("no answer", "lost");
}

poll();
