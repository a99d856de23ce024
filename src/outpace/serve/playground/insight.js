// The panel next to the conversation: origins of tokens, acceptance by depth, and one round's tree.

import { drawChart } from "./chart.js";
import { drawLegend } from "./lane.js";
import { described, drawTree } from "./tree.js";

const by = (id) => document.getElementById(id);

export class Insight {
  #lane = null;
  #round = null; // null: the last one
  #isQueued = false;

  constructor() {
    by("before").addEventListener("click", () => this.#step(-1));
    by("after").addEventListener("click", () => this.#step(1));
  }

  /** Follow a lane as it grows. */
  follow(lane) {
    this.#lane?.mark(null);
    [this.#lane, this.#round] = [lane, null];
    by("insight").hidden = false;
    this.refresh(lane);
  }

  /** Show one round of a lane; null for the token that no round decided. */
  look(lane, round) {
    if (this.#lane !== lane) this.#lane?.mark(null);
    [this.#lane, this.#round] = [lane, round ?? -1];
    by("insight").hidden = false;
    this.refresh(lane);
  }

  /** Draw again, at most once per frame, if this lane is shown. */
  refresh(lane) {
    if (lane !== this.#lane || this.#isQueued) return;
    this.#isQueued = true;
    requestAnimationFrame(() => {
      this.#isQueued = false;
      if (this.#lane?.answer) this.#draw(this.#lane.answer);
    });
  }

  clear() {
    [this.#lane, this.#round] = [null, null];
    by("insight").hidden = true;
  }

  #draw(answer) {
    drawLegend(by("legend"), answer.byOrigin());
    drawChart(by("chart"), answer);
    const last = answer.rounds.length - 1;
    const shown = this.#round ?? last;
    by("round").ariaLive = this.#round === null ? "off" : "polite"; // do not announce every new round
    by("before").disabled = shown <= 0;
    by("after").disabled = shown >= last;
    this.#lane.mark(this.#round === null ? null : shown);
    by("round-title").textContent = shown < 0 ? "Round" : `Round ${shown + 1} of ${last + 1}`;
    if (shown < 0) {
      by("round").textContent = "The first token comes with the prompt, before any round.";
      by("tree").replaceChildren();
      return;
    }
    by("round").textContent = described(answer.rounds[shown]);
    drawTree(by("tree"), answer.rounds[shown]);
  }

  #step(by) {
    const last = this.#lane.answer.rounds.length - 1;
    this.#round = Math.max(0, Math.min(last, (this.#round ?? last) + by));
    this.refresh(this.#lane);
  }
}
