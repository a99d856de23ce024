// One streamed answer: its tokens and rounds, and counts of both.

export const ORIGINS = {
  drafted: { name: "drafted", about: "by a draft model or head" },
  retrieved: { name: "retrieved", about: "the model's runners-up" },
  matched: { name: "matched", about: "repeats text from before" },
  forced: { name: "forced", about: "by the grammar" },
  bonus: { name: "the model's own", about: "said, not guessed" },
};

export class Answer {
  /** @param {string} method The method that generates it. */
  constructor(method) {
    this.method = method;
    this.tokens = []; // { id, text, origin, round: index or null }
    this.rounds = []; // { tokens, parents, origins, path, said: texts of the tokens that the round decided }
    this.text = "";
    this.marks = []; // [milliseconds, tokens] after each chunk
    this.report = null;
    this.finish = null;
    this.began = null; // when the server accepted the request, after loading or compiling for it
    this.took = 0; // milliseconds until the last chunk with tokens
  }

  /** Milliseconds since the server accepted the request. */
  get elapsed() {
    return this.began === null ? 0 : performance.now() - this.began;
  }

  /** Add one chunk. Returns its new tokens, possibly none. */
  take(chunk) {
    this.began ??= performance.now();
    const choice = chunk.choices?.[0];
    if (!choice) return [];
    if (choice.finish_reason) this.finish = choice.finish_reason;
    const about = choice.outpace ?? {};
    if (about.tokens_per_step !== undefined) this.report = about;
    const content = choice.delta?.content ?? "";
    this.text += content;
    const fresh = about.tokens ? this.#placed(about) : [];
    if (fresh.map((token) => token.text).join("") !== content) {
      // A character may consist of several tokens: the last one gets its text.
      fresh.forEach((token) => (token.text = ""));
      if (fresh.length) fresh.at(-1).text = content;
      else if (content) fresh.push({ id: null, text: content, origin: "bonus", round: null });
    }
    this.tokens.push(...fresh);
    if (fresh.length) {
      this.took = this.elapsed;
      this.marks.push([this.took, this.tokens.length]);
    }
    return fresh;
  }

  #placed({ tokens, rounds = [] }) {
    const fresh = tokens.map((token) => ({ ...token, round: null }));
    let next = 0;
    for (const round of rounds) {
      const own = fresh.slice(next, next + round.path.length);
      own.forEach((token) => (token.round = this.rounds.length));
      next += own.length;
      this.rounds.push({ ...round, said: own.map((token) => token.text) });
    }
    return fresh;
  }

  get tokensPerStep() {
    if (this.report) return this.report.tokens_per_step;
    return this.rounds.length ? (this.tokens.length - 1) / this.rounds.length : 1;
  }

  /** Tokens per second after the first one, by the engine's clock if the server reports it. */
  get speed() {
    const ms = this.report?.decode_ms ?? this.took - (this.marks[0]?.[0] ?? 0);
    return ms > 0 ? ((this.tokens.length - 1) * 1e3) / ms : 0;
  }

  /** Number of tokens after `ms` milliseconds. */
  at(ms) {
    const mark = this.marks.findLast(([when]) => when <= ms);
    return mark ? mark[1] : 0;
  }

  /** Number of tokens by origin. */
  byOrigin() {
    const counts = Object.fromEntries(Object.keys(ORIGINS).map((origin) => [origin, 0]));
    for (const { origin } of this.tokens) counts[origin] = (counts[origin] ?? 0) + 1;
    return counts;
  }

  /** For each position after the pending token: rounds with drafts of this depth, and accepted drafts by origin. */
  byPosition() {
    const positions = [];
    for (const { parents, origins, path, said } of this.rounds) {
      const depths = [];
      parents.forEach((parent, node) => (depths[node] = node ? depths[parent] + 1 : 0));
      const deepest = Math.max(...depths);
      while (positions.length < deepest) positions.push({ offered: 0, accepted: {} });
      for (let depth = 1; depth <= deepest; depth++) positions[depth - 1].offered += 1;
      path.slice(1, said.length + 1).forEach((node, place) => {
        const { accepted } = positions[place];
        accepted[origins[node]] = (accepted[origins[node]] ?? 0) + 1;
      });
    }
    return positions;
  }
}

/** Where two answers first differ; null if they are equal. */
export function firstDifference(one, other) {
  const length = Math.max(one.tokens.length, other.tokens.length);
  for (let place = 0; place < length; place++) {
    const [left, right] = [one.tokens[place], other.tokens[place]];
    if (left?.id !== right?.id || left?.id === undefined) return place;
  }
  return one.text === other.text ? null : length;
}
