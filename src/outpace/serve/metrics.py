"""Counters and times under the names that vLLM gives them, so that its dashboards work."""

from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from outpace.api import Model
from outpace.core.events import Sample, StepEvent
from outpace.engine.session import Session

LABELS = ("model_name", "engine")
MAX_POSITIONS = 16
"""Number of depths whose acceptance is counted separately."""
FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
               80.0, 160.0, 640.0, 2560.0)  # fmt: skip
PER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5,
             10.0, 20.0, 40.0, 80.0)  # fmt: skip
PER_REQUEST = (0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0,
               240.0, 480.0, 960.0, 1920.0, 7680.0)  # fmt: skip
COUNTS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)


class Metrics:
    """The metrics of one server, in a registry of their own."""

    def __init__(self, name: str, occupancy: Callable[[], tuple[int, int, float]]) -> None:
        self.registry = CollectorRegistry()
        self._values = (name, "0")
        self._last: dict[Session, float] = {}  # time of its last tokens
        gauges = {
            "num_requests_running": "Samples that are decoded.",
            "num_requests_waiting": "Samples that wait for a slot.",
            "kv_cache_usage_perc": "Part of the cache in use, 1 is all of it.",
        }
        for index, (key, text) in enumerate(gauges.items()):
            self._of(Gauge, key, text).set_function(partial(lambda index: occupancy()[index], index))
        counts = {
            "prompt_tokens": "Tokens of prompts.",
            "generation_tokens": "Tokens of answers.",
            "prefix_cache_queries": "Tokens of prompts that were looked for in the cache.",
            "prefix_cache_hits": "Tokens of prompts that were there.",
            "num_preemptions": "Always 0: nothing is preempted.",
            "spec_decode_num_drafts": "Rounds with drafts.",
            "spec_decode_num_draft_tokens": "Drafted tokens that were verified.",
            "spec_decode_num_accepted_tokens": "Drafted tokens that were emitted.",
        }
        self._counters = {key: self._of(Counter, key, text) for key, text in counts.items()}
        self._success = Counter(
            "vllm:request_success", "Requests by how they ended.", (*LABELS, "finished_reason"), registry=self.registry
        )
        self._positions = Counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Drafted tokens that were emitted, by depth.",
            (*LABELS, "position"),
            registry=self.registry,
        )
        times = {
            "time_to_first_token_seconds": ("From admission to the first token.", FIRST_TOKEN),
            "inter_token_latency_seconds": ("Between tokens; those of a round share its time.", PER_TOKEN),
            "request_time_per_output_token_seconds": ("Mean time of a token after the first.", PER_TOKEN),
            "e2e_request_latency_seconds": ("From admission to the end.", PER_REQUEST),
            "request_queue_time_seconds": ("Waiting for a slot.", PER_REQUEST),
            "request_prefill_time_seconds": ("From a slot to the first token.", PER_REQUEST),
            "request_decode_time_seconds": ("From the first token to the last.", PER_REQUEST),
            "request_inference_time_seconds": ("From a slot to the end.", PER_REQUEST),
            "request_prompt_tokens": ("Tokens of a prompt.", COUNTS),
            "request_generation_tokens": ("Tokens of an answer.", COUNTS),
        }
        self._histograms = {
            key: self._of(Histogram, key, text, buckets=buckets) for key, (text, buckets) in times.items()
        }

    def open(self, model: Model) -> None:
        """Publish the slots and the maximal length of the loaded model."""
        info = Gauge(
            "vllm:cache_config_info",
            "Slots of the cache.",
            (*LABELS, "num_slots", "max_model_len"),
            registry=self.registry,
        )
        info.labels(*self._values, str(model.target.max_slots), str(model.target.max_length)).set(1)

    def stepped(self, session: Session, event: StepEvent) -> None:
        """Count the new tokens of a session after a step."""
        now, new = perf_counter(), len(event.tokens)
        if not new:
            return
        self._counters["generation_tokens"].inc(new)
        last = self._last.get(session)
        if last is None:
            self._counters["prompt_tokens"].inc(len(session.prompt_ids))
            self._counters["prefix_cache_queries"].inc(len(session.prompt_ids))
            self._counters["prefix_cache_hits"].inc(session.metrics.reused_tokens)
            self._observe("time_to_first_token_seconds", now - session.added_at)
            self._observe("request_prefill_time_seconds", now - session.placed_at)
        else:
            for _ in range(new):
                self._histograms["inter_token_latency_seconds"].observe((now - last) / new)
        self._last[session] = now

    def ended(self, session: Session, outcome: Sample | Exception) -> None:
        """Count a session that has ended."""
        self._last.pop(session, None)
        now = perf_counter()
        self._observe("request_queue_time_seconds", (session.placed_at or now) - session.added_at)
        if isinstance(outcome, Exception) or outcome.finish_reason == "error":
            self._success.labels(*self._values, "error").inc()
            return
        reason = {"cancelled": "abort"}.get(outcome.finish_reason, outcome.finish_reason)
        self._success.labels(*self._values, reason).inc()
        self._spec_decode(outcome)
        metrics = outcome.metrics
        self._observe("e2e_request_latency_seconds", now - session.added_at)
        self._observe("request_prompt_tokens", metrics.prompt_tokens)
        self._observe("request_generation_tokens", metrics.new_tokens)
        self._observe("request_inference_time_seconds", now - (session.placed_at or now))
        if metrics.new_tokens:
            self._observe("request_decode_time_seconds", now - session.first_token_at)
        if metrics.new_tokens > 1:
            self._observe("request_time_per_output_token_seconds", metrics.tpot_ms / 1e3)

    def _spec_decode(self, outcome: Sample) -> None:
        metrics = outcome.metrics
        self._counters["spec_decode_num_drafts"].inc(metrics.steps - metrics.plain_steps)
        self._counters["spec_decode_num_draft_tokens"].inc(metrics.drafted)
        self._counters["spec_decode_num_accepted_tokens"].inc(metrics.accepted)
        for depth, accepted in enumerate(metrics.accepted_per_depth[:MAX_POSITIONS]):
            self._positions.labels(*self._values, str(depth)).inc(accepted)

    def _observe(self, key: str, value: float) -> None:
        self._histograms[key].observe(value)

    def _of(self, kind: Any, key: str, text: str, **options: Any) -> Any:
        return kind(f"vllm:{key}", text, LABELS, registry=self.registry, **options).labels(*self._values)
