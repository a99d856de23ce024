"""What is recorded: the counts of a prompt's turns, and the times of the group it was decoded in."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, zip_longest
from pathlib import Path
from typing import Any

from outpace.core.timing import DRAFT_PARTS
from outpace.data.answers import write_whole
from outpace.lib.checks import check_same
from outpace.lib.errors import InvalidRequest

COUNTS = (
    *("prompt_tokens", "new_tokens", "steps", "drafted", "draft_passes", "accepted"),
    *("retrieved", "accepted_retrieved"),
)
DRAFT_MS = tuple(f"{name}_ms" for name in DRAFT_PARTS)  # parts of draft_ms
GRAFT_MS = DRAFT_MS[-3:]  # retrieval and merging
PHASES = ("draft_ms", "forward_ms", "verify_ms", "commit_ms", "observe_ms")


@dataclass(frozen=True)
class TurnRun:
    """One method's answer to one turn. For a server that reports no ids, the counter `new_tokens` has their number;
    `answer` is its text without thoughts, as which a conversation goes on."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: str
    counters: dict[str, Any]
    answer: str = ""

    @property
    def new_tokens(self) -> int:
        """How many tokens were generated."""
        return len(self.token_ids) or int(self.counters.get("new_tokens", 0))


def prompt_figures(turns: Sequence[TurnRun]) -> dict[str, Any]:
    """Counts and times of one prompt's turns. In a batch its times are those of steps it shared."""

    def total(name: str) -> Any:
        return sum(turn.counters.get(name, 0) for turn in turns)

    steps, decoded = total("steps"), sum(_decoded(turn) for turn in turns)
    decode_ms, ttft_ms = total("decode_ms"), total("ttft_ms")
    return {
        "turns": len(turns),
        **{name: total(name) for name in COUNTS},
        "accepted_per_depth": summed(turn.counters.get("accepted_per_depth", ()) for turn in turns),
        "rounds": [turn.counters.get("rounds", []) for turn in turns],
        "tokens_per_step": decoded / steps if steps else 1.0,
        "accepted_per_step": total("accepted") / steps if steps else 0.0,
        "ttft_ms": ttft_ms / len(turns),
        "tpot_ms": decode_ms / decoded if decoded else None,
        "decode_ms": decode_ms,
        "end_to_end_ms": decode_ms + ttft_ms,
        **{phase: total(phase) for phase in (*PHASES, *DRAFT_MS)},
        "finish_reasons": [turn.finish_reason for turn in turns],
        "token_ids": [list(turn.token_ids) for turn in turns],
    }


def group_figures(turns: Sequence[Sequence[TurnRun]]) -> dict[str, Any]:
    """Tokens and wall times of prompts decoded together: their requests share steps, so that their times do not add up.

    Decode time is from the first token of any request to the last token of any; end-to-end time begins when the
    requests are admitted, all at once. Decoded tokens are those after each request's first, all emitted within the
    decode time. It may include chunks of longer prompts, and the prefill of requests that waited for a slot. For one
    prompt these are its own times. Requests to a server have `sent_ms`, the time from the group's start to their
    sending, and wait from then on; time before the first of them, when requests arrive at random, does not count.
    """
    decode_ms = end_to_end_ms = 0.0
    for runs in turns:
        sent = [float(run.counters.get("sent_ms", 0.0)) for run in runs]
        firsts = [at + float(run.counters["ttft_ms"]) for at, run in zip(sent, runs, strict=True)]
        lasts = [first + float(run.counters["decode_ms"]) for first, run in zip(firsts, runs, strict=True)]
        decode_ms += max(lasts) - min(firsts)
        end_to_end_ms += max(lasts) - min(sent)
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
    """The number of tokens after the first, which comes from the prompt's pass."""
    return max(run.new_tokens - 1, 0)


def summed(rows: Iterable[Sequence[int]]) -> list[int]:
    """The sums by position of rows of different lengths."""
    return [sum(column) for column in zip_longest(*rows, fillvalue=0)]


SETTINGS, RECORDS = "settings.json", "records.jsonl"


class RunFolder:
    """A folder of records, all made with the same settings.

    Args:
        settings: what the records depend on; must be JSON.

    Raises:
        InvalidRequest: its records were made with other settings, or do not state them; a file that cannot be read.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self.path = folder
        wanted = json.loads(json.dumps(settings))
        if not text_of(folder / RECORDS):
            folder.mkdir(parents=True, exist_ok=True)
            write_whole(folder / SETTINGS, json.dumps(wanted, indent=1).encode())
        elif (folder / SETTINGS).is_file():
            made = object_of(folder / SETTINGS, text_of(folder / SETTINGS))
            check_same(made, wanted, f"out={str(folder)!r}: its records were made")
        else:
            raise InvalidRequest(f"out={str(folder)!r}: its records do not state their settings; choose a new folder")

    def read(self, sizes: Sequence[int]) -> list[dict[str, Any]]:
        """Records of the complete groups; a group that a kill left incomplete is cut off. `sizes`: the number of
        records of each group, in the order of writing."""
        path = self.path / RECORDS
        text = text_of(path)
        lines = text.split("\n")[:-1]  # after the last line break: nothing, or a line that was cut off
        whole = max((end for end in accumulate(sizes) if end <= len(lines)), default=0)
        kept = "".join(line + "\n" for line in lines[:whole])
        if kept != text:
            write_whole(path, kept.encode())
        return [object_of(path, line) for line in lines[:whole]]

    def append(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Add the records of a group."""
        with (self.path / RECORDS).open("a", encoding="utf-8") as file:
            file.write("".join(json.dumps(record) + "\n" for record in records))


def object_of(path: Path, text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _unreadable(path, error) from error
    if not isinstance(found, dict):
        raise _unreadable(path, f"an object is expected, not {type(found).__name__}")
    return found


def text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8") if path.is_file() else ""
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, reason: object) -> InvalidRequest:
    return InvalidRequest(f"{path}: cannot be read: {reason}; choose a new folder")
