"""What is recorded: the counts of a prompt's turns, and the times of the group it was decoded in."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

PHASES = ("draft_ms", "forward_ms", "verify_ms", "commit_ms", "observe_ms")


@dataclass(frozen=True)
class TurnRun:
    """One method's answer to one turn. Where a server tells no ids, `new_tokens` among the counters counts them."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: str
    counters: dict[str, Any]

    @property
    def new_tokens(self) -> int:
        """How many tokens were said."""
        return len(self.token_ids) or int(self.counters.get("new_tokens", 0))


def prompt_figures(turns: Sequence[TurnRun]) -> dict[str, Any]:
    """Counts and times of one prompt's turns. In a batch its times are those of steps it shared."""

    def total(name: str) -> Any:
        return sum(turn.counters.get(name, 0) for turn in turns)

    depths = [turn.counters.get("accepted_per_depth", []) for turn in turns]
    steps, decoded = total("steps"), sum(_decoded(turn) for turn in turns)
    decode_ms, ttft_ms = total("decode_ms"), total("ttft_ms")
    return {
        "turns": len(turns),
        "prompt_tokens": total("prompt_tokens"),
        "new_tokens": total("new_tokens"),
        "steps": steps,
        "drafted": total("drafted"),
        "draft_passes": total("draft_passes"),
        "accepted": total("accepted"),
        "retrieved": total("retrieved"),
        "accepted_retrieved": total("accepted_retrieved"),
        "accepted_per_depth": [sum(column) for column in _columns(depths)],
        "tokens_per_step": decoded / steps if steps else 1.0,
        "accepted_per_step": total("accepted") / steps if steps else 0.0,
        "ttft_ms": ttft_ms / len(turns),
        "tpot_ms": decode_ms / decoded if decoded else None,
        "decode_ms": decode_ms,
        "end_to_end_ms": decode_ms + ttft_ms,
        **{phase: total(phase) for phase in (*PHASES, "graft_ms")},
        "finish_reasons": [turn.finish_reason for turn in turns],
        "token_ids": [list(turn.token_ids) for turn in turns],
    }


def group_figures(turns: Sequence[Sequence[TurnRun]]) -> dict[str, Any]:
    """Tokens and wall times of prompts decoded together: their requests share steps, so that their times do not add up.

    A group decodes from the first token of any of its requests to the last token of any; end to end it begins at their
    admission, which is that of all. Tokens decoded are those after each request's first, all emitted within that time.
    A prompt of more chunks than another's is partly written in it; requests that end early leave the others alone, or
    make room for those that wait, whose prompts are then written in it too. For one prompt these are its own times.
    Requests to a server say when they were sent, in `sent_ms` after the group began, and wait from then on.

    Args:
        turns: turn by turn, a run per prompt of the group.
    """
    decode_ms = end_to_end_ms = 0.0
    for runs in turns:
        firsts = [float(run.counters.get("sent_ms", 0.0) + run.counters["ttft_ms"]) for run in runs]
        lasts = [first + float(run.counters["decode_ms"]) for first, run in zip(firsts, runs, strict=True)]
        decode_ms += max(lasts) - min(firsts)
        end_to_end_ms += max(lasts)
    decoded = sum(_decoded(run) for runs in turns for run in runs)
    return {
        "size": len(turns[0]),
        "new_tokens": sum(run.new_tokens for runs in turns for run in runs),
        "decoded": decoded,
        "decode_ms": decode_ms,
        "end_to_end_ms": end_to_end_ms,
        "tokens_per_second": 1e3 * decoded / decode_ms if decoded and decode_ms else None,
    }


def _decoded(run: TurnRun) -> int:
    """Tokens after the first, which the prompt's pass brings."""
    return max(run.new_tokens - 1, 0)


def _columns(rows: Sequence[Sequence[int]]) -> list[list[int]]:
    width = max((len(row) for row in rows), default=0)
    return [[row[column] for row in rows if column < len(row)] for column in range(width)]
