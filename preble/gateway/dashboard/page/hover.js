// The bubble that says what is under the pointer, on charts and strips: one for the page. Owns its place and its life; what
// it says is theirs who own the picture. It follows the pointer, and new numbers while the pointer rests.

import { make, setText } from "./dom.js";

const bubble = make("div", { id: "bubble", "aria-hidden": "true" });
bubble.hidden = true;
document.body.append(bubble);
let under = null; // { node, describe, share }

// Let `describe(share)` say what is at a place of a node, `share` being of its width from the left: { text, at } with `at`
// where that is, or null for nothing.
export function describeUnder(node, describe) {
  const hair = make("i", { class: "hair" });
  hair.hidden = true;
  node.append(hair);
  const follow = (event) => {
    const box = node.getBoundingClientRect();
    under = { node, describe, hair, share: Math.min(Math.max((event.clientX - box.left) / Math.max(box.width, 1), 0), 1) };
    describeAgain();
  };
  node.addEventListener("pointermove", follow);
  node.addEventListener("pointerdown", follow);
  node.addEventListener("pointerleave", hide);
  node.addEventListener("pointercancel", hide);
}

function hide() {
  if (under !== null) under.hair.hidden = true;
  under = null;
  bubble.hidden = true;
}

// Say it again with the numbers of now.
export function describeAgain() {
  if (under === null) return;
  const said = under.node.isConnected ? under.describe(under.share) : null;
  bubble.hidden = under.hair.hidden = said === null;
  if (said === null) return;
  setText(bubble, said.text);
  under.hair.style.left = `${100 * said.at}%`;
  const box = under.node.getBoundingClientRect();
  const middle = box.left + said.at * box.width;
  const most = document.documentElement.clientWidth - bubble.offsetWidth - 4;
  bubble.style.left = `${Math.max(4, Math.min(middle - bubble.offsetWidth / 2, most))}px`;
  const above = box.top - bubble.offsetHeight - 5;
  bubble.style.top = `${above >= 4 ? above : box.bottom + 5}px`;
  // A modal dialog lies above all else, and so must what speaks of it.
  const home = under.node.closest("dialog") ?? document.body;
  if (bubble.parentNode !== home) home.append(bubble);
}
