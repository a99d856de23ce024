"""Transformers' own `generate`: plain, with prompt lookup, and with an assistant model."""

from importlib.metadata import version
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.generation.streamers import BaseStreamer

LOOKUP_TOKENS = 10
"""`prompt_lookup_num_tokens` of its documentation's example."""


class _Streamer(BaseStreamer):
    """Passes arriving ids to the clock; the first call has the prompt."""

    def __init__(self, clock: Any) -> None:
        self._clock, self._has_prompt = clock, False

    def put(self, value: torch.Tensor) -> None:
        if self._has_prompt:
            self._clock.put(value.flatten().tolist())
        self._has_prompt = True

    def end(self) -> None:
        pass


class Contender:
    """A stock model, and an assistant where there is one.

    Args:
        settings: as `serve` describes; "weights" and "draft" are folders.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        torch.set_num_threads(settings["threads"])
        self._eos = settings["eos"]
        self._model = self._read(settings["weights"], settings["precision"])
        self._assistant = None
        if "assisted" in settings["methods"]:
            self._assistant = self._read(settings["draft"], settings["precision"])
        self.facts = {
            "versions": {name: version(name) for name in ("transformers", "torch")},
            "threads": torch.get_num_threads(),
            "note": f"prompt_lookup_num_tokens={LOOKUP_TOKENS}",
        }

    @staticmethod
    def _read(folder: str, precision: str) -> Any:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, precision)).eval()

    @torch.inference_mode()
    def generate(self, method: str, prompt: list[int], max_new_tokens: int, clock: Any) -> None:
        """Decode greedily."""
        options: dict[str, dict[str, Any]] = {
            "plain": {},
            "lookup": {"prompt_lookup_num_tokens": LOOKUP_TOKENS},
            "assisted": {"assistant_model": self._assistant},
        }
        ids = torch.tensor([prompt])
        self._model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            temperature=None,
            top_p=None,
            top_k=None,
            repetition_penalty=1.0,  # a model's generation_config.json may set one that no other peer uses
            eos_token_id=self._eos or [-1],
            pad_token_id=self._eos[0] if self._eos else 0,
            streamer=_Streamer(clock),
            **options[method],
        )
