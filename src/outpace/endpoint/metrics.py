"""What a server counts of its speculation, in vLLM's metric names."""

from dataclasses import dataclass
from itertools import zip_longest
from typing import Self

from outpace.endpoint.client import Endpoint
from outpace.lib.errors import ModelError

DRAFTED, ACCEPTED, BY_POSITION = (
    f"vllm:spec_decode_num_{what}_total" for what in ("draft_tokens", "accepted_tokens", "accepted_tokens_per_pos")
)


@dataclass(frozen=True)
class SpeculationCounts:
    """Counters of a server, for all its requests since it started, or their growth.

    Attributes:
        drafted, accepted: tokens.
        accepted_per_depth: accepted tokens by their position in the draft.
    """

    drafted: int
    accepted: int
    accepted_per_depth: tuple[int, ...]

    def __sub__(self, before: Self) -> "SpeculationCounts":
        pairs = zip_longest(self.accepted_per_depth, before.accepted_per_depth, fillvalue=0)
        depths = tuple(now - then for now, then in pairs)
        return SpeculationCounts(self.drafted - before.drafted, self.accepted - before.accepted, depths)


def read_counts(text: str) -> SpeculationCounts | None:
    """The counters in a page of metrics, in Prometheus's text format; None where speculation is not counted.

    Raises:
        ModelError: the page is in another format.
    """
    from prometheus_client.parser import text_string_to_metric_families

    totals = {DRAFTED: 0.0, ACCEPTED: 0.0}
    depths: dict[int, float] = {}
    is_counted = False
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name in totals:
                    totals[sample.name] += sample.value
                    is_counted = True
                elif sample.name == BY_POSITION:
                    position = int(sample.labels["position"])
                    depths[position] = depths.get(position, 0.0) + sample.value
    except (ValueError, KeyError) as error:
        raise ModelError(f"metrics: not in Prometheus's text format: {error!r}") from error
    if not is_counted:
        return None
    per_depth = tuple(int(depths.get(depth, 0)) for depth in range(max(depths, default=-1) + 1))
    return SpeculationCounts(int(totals[DRAFTED]), int(totals[ACCEPTED]), per_depth)


def speculation_counts(endpoint: Endpoint) -> SpeculationCounts | None:
    """The counters of a server now; None where it has no metrics, or does not count speculation."""
    response = endpoint.probe("metrics", at_root=True)
    return None if response is None else read_counts(response.text)
