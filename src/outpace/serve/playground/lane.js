// One answer on the page: its clock, its track, its tokens.

import { ORIGINS } from "./answer.js";

const TICK = 50; // milliseconds between two looks at the clock

export class Lane {
  /**
   * @param {string} title The method's title.
   * @param {(round: number | null) => void} look Called with the round of a token that the visitor points at.
   */
  constructor(title, look) {
    this.element = document.getElementById("lane-template").content.firstElementChild.cloneNode(true);
    this.#of("h3").textContent = title;
    this.element.setAttribute("aria-label", title);
    this.#answer.setAttribute("aria-label", `Answer of ${title}; arrow keys walk through its tokens`);
    this.#listen(look);
  }

  /** Start the clock of an answer. `rival`: an earlier answer, shown as a mark on the track. */
  begin(answer, limit, rival) {
    this.answer = answer;
    this.#limit = rival?.tokens.length || limit;
    this.#rival = rival;
    this.element.dataset.state = "running";
    this.#of(".ghost").hidden = !rival;
    this.#timer = setInterval(() => this.#tick(answer.elapsed), TICK);
  }

  /** Show new tokens. */
  add(tokens) {
    for (const { text, origin, round } of tokens) {
      if (!text) continue;
      const token = document.createElement("span");
      token.className = "token";
      token.dataset.origin = origin;
      if (round !== null) token.dataset.round = String(round);
      token.tabIndex = -1;
      token.textContent = text;
      this.#answer.append(token);
    }
    this.#told();
  }

  /** Stop the clock. `state`: "done", "stopped" or "failed"; `trouble`: why, in words. */
  end(state, trouble = "") {
    clearInterval(this.#timer);
    this.element.dataset.state = state;
    this.#of(".trouble").hidden = !trouble;
    this.#of(".trouble").textContent = trouble;
    if (!this.answer) return;
    this.#tick(this.answer.took);
    if (state === "done") this.#of(".bar").style.width = "100%";
    this.#of(".ghost").hidden = true;
    this.#told();
  }

  /** Mark the tokens of a round. */
  mark(round) {
    for (const token of this.#answer.children) {
      token.classList.toggle("same-round", round !== null && token.dataset.round === String(round));
    }
  }

  #limit = 1;
  #rival = null;
  #timer = 0;

  #of(selector) {
    return this.element.querySelector(selector);
  }

  get #answer() {
    return this.#of(".answer");
  }

  #tick(ms) {
    this.#of(".clock").textContent = `${(ms / 1e3).toFixed(2)} s`;
    const share = (count) => `${Math.min(100, (100 * count) / this.#limit)}%`;
    this.#of(".bar").style.width = share(this.answer.tokens.length);
    if (this.#rival) this.#of(".ghost").style.left = share(this.#rival.at(ms));
  }

  #told() {
    const { tokens, tokensPerStep, speed, report } = this.answer;
    const figures = [`${tokens.length} tokens`, `${tokensPerStep.toFixed(2)} per step`, `${speed.toFixed(0)} tokens/s`];
    if (report?.ttft_ms !== undefined) figures.push(`first in ${report.ttft_ms.toFixed(0)} ms`);
    this.#of(".figures").textContent = figures.join(" · ");
  }

  #listen(look) {
    const pointed = ({ target }) => {
      if (!target.classList.contains("token")) return;
      look(target.dataset.round === undefined ? null : Number(target.dataset.round));
    };
    for (const kind of ["mouseover", "focusin", "click"]) this.#answer.addEventListener(kind, pointed);
    this.#answer.addEventListener("keydown", (event) => {
      if (event.altKey || event.ctrlKey || event.metaKey || event.shiftKey) return; // back, or a selection
      const tokens = [...this.#answer.children];
      const here = tokens.indexOf(document.activeElement);
      const to = { ArrowRight: here + 1, ArrowLeft: here < 0 ? tokens.length - 1 : here - 1, Home: 0, End: tokens.length - 1 };
      const next = tokens[to[event.key]];
      if (!next) return;
      event.preventDefault();
      next.focus();
    });
  }
}

/** The legend: what each mark of a token means, and how many tokens have it. */
export function drawLegend(list, counts) {
  list.replaceChildren(
    ...Object.entries(ORIGINS).map(([origin, { name, about }]) => {
      const item = document.createElement("li");
      item.dataset.origin = origin;
      const [mark, text, count] = ["span", "span", "b"].map((tag) => document.createElement(tag));
      mark.className = "token";
      mark.dataset.origin = origin;
      mark.textContent = name;
      text.textContent = about;
      count.textContent = String(counts[origin] ?? 0);
      item.append(mark, text, count);
      return item;
    }),
  );
}
