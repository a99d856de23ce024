"""The process of one contender: reads prompts as JSON lines from standard input, answers on standard output.

It runs in the contender's own environment, so it imports nothing but the standard library: `python -P serve.py RUNNER
SETTINGS`, where RUNNER is a file in this folder and SETTINGS are JSON. A runner has a class `Contender`, made of the
settings, with

    facts                                       what records say of it: "versions", "threads", a "note"
    generate(method, prompt, max_new_tokens, clock)   decodes greedily and shows the clock ids as they arrive; it may
                                                return times of its own that replace the clock's

The first line out is the facts; then each line in is a request and each line out its answer.
"""

import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from time import perf_counter
from typing import Any


class Clock:
    """Records which ids have arrived, and when.

    Args:
        eos: ids that end an answer; ids that arrive after one are dropped.
        most: ids of an answer at most.
    """

    def __init__(self, eos: Sequence[int], most: int) -> None:
        self._eos, self._most = set(eos), most
        self.ids: list[int] = []
        self.first = 0
        self.has_ended = False
        self._times = [perf_counter()]
        self._sizes: list[int] = []

    def put(self, ids: Sequence[int]) -> bool:
        """Add ids that have just arrived. Returns whether the answer is complete."""
        if self.has_ended or not ids:
            return self.has_ended
        before = len(self.ids)
        for token in ids:
            self.ids.append(token)
            self.has_ended = token in self._eos or len(self.ids) == self._most
            if self.has_ended:
                break
        self.first = self.first or len(self.ids)
        self._times.append(perf_counter())
        self._sizes.append(len(self.ids) - before)
        return self.has_ended

    def answer(self) -> dict[str, Any]:
        """The ids, how many of them came with the prompt's pass, the seconds until then and after it, the number of
        arrivals, and each arrival's seconds and number of ids."""
        start, first, last = self._times[0], self._times[min(1, len(self._times) - 1)], self._times[-1]
        said = {"token_ids": self.ids, "first": self.first, "arrivals": len(self._times) - 1}
        chunks = [(time - start, size) for time, size in zip(self._times[1:], self._sizes, strict=True)]
        return said | {"prompt_seconds": first - start, "decode_seconds": last - first, "chunks": chunks}


def main() -> None:
    """Serve until standard input ends."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # prints of libraries go to standard error, as standard output is for answers
    settings = json.loads(sys.argv[2])
    spec = importlib.util.spec_from_file_location("runner", sys.argv[1])
    assert spec is not None
    assert spec.loader is not None
    runner = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(runner)
    contender = runner.Contender(settings)
    print(json.dumps(contender.facts), file=out, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        clock = Clock(settings["eos"], request["max_new_tokens"])
        measured = contender.generate(request["method"], request["prompt"], request["max_new_tokens"], clock)
        print(json.dumps(clock.answer() | (measured or {})), file=out, flush=True)


if __name__ == "__main__":
    main()
