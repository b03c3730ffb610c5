// Puts in place what the server has drawn. An event is the whole part that changed, so none is ever drawn twice.
"use strict";
const part = document.getElementById("part");
const state = document.getElementById("state");

function say(text, isLive) {
  state.textContent = text;
  state.className = isLive ? "tag live" : "tag warn";
}

const source = new EventSource(part.dataset.events + "?seen=" + part.dataset.seen);
source.addEventListener("open", () => say("live", true));
source.addEventListener("error", () => say("not connected, trying again", false));
source.addEventListener("part", (event) => {
  const unfolded = [...part.querySelectorAll("details")].map((box) => box.open);
  part.innerHTML = event.data;
  part.querySelectorAll("details").forEach((box, index) => { box.open = unfolded[index] ?? box.open; });
});
