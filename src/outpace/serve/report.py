"""What speculation did for an answer, and what it used."""

from collections.abc import Iterable
from typing import Any

from outpace.core.events import Sample
from outpace.core.origins import ORIGINS


def report(sample: Sample, method: str) -> dict[str, Any]:
    """The extension of a choice: `choices[i].outpace`."""
    metrics = sample.metrics
    return {
        "method": method,
        "steps": metrics.steps,
        "tokens_per_step": metrics.tokens_per_step,
        "drafted": metrics.drafted,
        "accepted": metrics.accepted,
        "accepted_per_depth": metrics.accepted_per_depth,
        "by_origin": {origin: metrics.accepted_by_origin.get(origin, 0) for origin in ORIGINS if origin != "pending"}
        | {"bonus": metrics.new_tokens - metrics.accepted},
        "plain_steps": metrics.plain_steps,
        "reused_tokens": metrics.reused_tokens,
        "ttft_ms": metrics.ttft_ms,
        "decode_ms": metrics.decode_ms,
        "seed": sample.seed,
    }


def usage(samples: Iterable[tuple[int, Sample]], n: int) -> dict[str, Any]:
    """Tokens of a request: each prompt once, each answer.

    Args:
        samples: with the index of their choice.
        n: answers to each prompt.
    """
    everything = list(samples)
    firsts = [sample.metrics for index, sample in everything if index % n == 0]
    prompt = sum(metrics.prompt_tokens for metrics in firsts)
    completion = sum(sample.metrics.new_tokens for _, sample in everything)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(metrics.reused_tokens for metrics in firsts)},
    }
