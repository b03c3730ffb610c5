// Inserts what the server has drawn. An event carries the whole main part, so nothing is drawn twice.
"use strict";
const part = document.getElementById("part");
const state = document.getElementById("state");

function say(text, isLive) {
  state.textContent = text;
  state.className = isLive ? "tag live" : "tag warn";
}

const source = new EventSource(part.dataset.events + "?seen=" + part.dataset.seen);
source.addEventListener("open", () => say("live", true));
source.addEventListener("error", () => say("not connected, retrying", false));
source.addEventListener("part", (event) => {
  const unfolded = [...part.querySelectorAll("details")].map((box) => box.open);
  part.innerHTML = event.data;
  part.querySelectorAll("details").forEach((box, index) => { box.open = unfolded[index] ?? box.open; });
});
