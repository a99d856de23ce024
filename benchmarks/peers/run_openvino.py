"""OpenVINO GenAI: plain, or with its prompt lookup; each needs a pipeline."""

from importlib.metadata import version
from typing import Any

import numpy as np
import openvino
import openvino_genai

DRAFTED, NGRAM = 5, 3
"""`num_assistant_tokens` and `max_ngram_size` of its sample."""


class _Streamer(openvino_genai.StreamerBase):  # type: ignore[misc]
    """Passes arriving ids to the clock."""

    def __init__(self, clock: Any) -> None:
        super().__init__()
        self._clock = clock

    def write(self, token: Any) -> Any:
        has_ended = self._clock.put([token] if isinstance(token, int) else list(token))
        return openvino_genai.StreamingStatus.STOP if has_ended else openvino_genai.StreamingStatus.RUNNING

    def end(self) -> None:
        pass


class Contender:
    """A pipeline for each method.

    Args:
        settings: as `serve` describes; "weights" is a GGUF file, and the products are in float32 if "precision" is.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        self._eos = settings["eos"]
        hint = "f32" if settings["precision"] == "float32" else "bf16"
        properties = {"INFERENCE_PRECISION_HINT": hint, "INFERENCE_NUM_THREADS": settings["threads"]}
        self._pipelines = {
            method: openvino_genai.LLMPipeline(
                settings["weights"],
                "CPU",
                scheduler_config=self._scheduler(),
                **properties,
                **({"prompt_lookup": True} if method == "lookup" else {}),
            )
            for method in settings["methods"]
        }
        self.facts = {
            "versions": {name: version(name) for name in ("openvino-genai", "openvino")},
            "threads": settings["threads"],
            "note": f"inference precision {hint}",
        }

    @staticmethod
    def _scheduler() -> Any:
        """A configuration that keeps nothing from prompt to prompt."""
        config = openvino_genai.SchedulerConfig()
        config.enable_prefix_caching, config.cache_size = False, 1  # GB
        return config

    def generate(self, method: str, prompt: list[int], max_new_tokens: int, clock: Any) -> None:
        """Decode greedily."""
        config = openvino_genai.GenerationConfig(max_new_tokens=max_new_tokens, do_sample=False)
        config.stop_token_ids = set(self._eos)
        if method == "lookup":
            config.num_assistant_tokens, config.max_ngram_size = DRAFTED, NGRAM
        ids = openvino.Tensor(np.array([prompt], dtype=np.int64))
        self._pipelines[method].generate(ids, config, _Streamer(clock))
