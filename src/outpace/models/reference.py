"""Stock transformers `generate` with the same weights, dtype and threads: the baseline of a benchmark."""

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from outpace.core.params import SamplingParams
from outpace.lib.errors import InvalidRequest
from outpace.models.loading.config import read_config
from outpace.models.loading.precision import DTYPES, choose_device
from outpace.models.loading.registry import resolve
from outpace.models.loading.weights import read_model, stock_attention


@dataclass(frozen=True)
class ReferenceRun:
    """Ids and times of one `generate` call; ttft_ms to the first token, decode_ms from there to the last."""

    token_ids: tuple[int, ...]
    ttft_ms: float
    decode_ms: float


class _Clock:
    """A streamer of transformers that records when each token arrives; the first call delivers the prompt."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        self.times.append(perf_counter())

    def end(self) -> None:
        pass


class TransformersReference:
    """A second copy of the model, unmodified, decoded by transformers' own loop.

    Args:
        name: as for `outpace.load`.
        dtype: torch's name of the dtype of the weights, the same as the engine's.
        device: the engine's.
    """

    def __init__(self, name: str, dtype: str, device: str) -> None:
        location = resolve(name)
        config = read_config(location)
        self._model = read_model(location, config, DTYPES[dtype], choose_device(device), stock_attention(config))

    @torch.inference_mode()
    def generate(self, ids: Sequence[int], params: SamplingParams, eos_token_ids: Sequence[int]) -> ReferenceRun:
        """Decode greedily or by sampling; a sampled run uses transformers' own random stream.

        Raises:
            InvalidRequest: an option that stock `generate` does not have, or has with another meaning.
        """
        _refuse_unsupported(params)
        clock = _Clock()
        prompt = torch.tensor([list(ids)], device=self._model.device)
        sampling = (
            {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
            if params.is_greedy
            else {
                "do_sample": True,
                "temperature": params.temperature,
                "top_p": params.top_p,
                "top_k": params.top_k,
                "min_p": params.min_p or None,
            }
        )
        # None would mean the model's own ids; no token has id -1.
        eos = [-1] if params.ignore_eos else list(eos_token_ids) or None
        if params.seed is not None:
            torch.manual_seed(params.seed)
        started = perf_counter()
        output: Any = self._model.generate(  # type: ignore[operator]
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=params.max_new_tokens,
            repetition_penalty=params.repetition_penalty,
            eos_token_id=eos,
            pad_token_id=eos_token_ids[0] if eos_token_ids else 0,
            streamer=clock,
            **sampling,
        )
        arrivals = clock.times[1:]
        ttft = (arrivals[0] - started) * 1e3 if arrivals else 0.0
        decode = (arrivals[-1] - arrivals[0]) * 1e3 if arrivals else 0.0
        return ReferenceRun(tuple(output[0, len(ids) :].tolist()), ttft, decode)


def _refuse_unsupported(params: SamplingParams) -> None:
    """Refuse options that `generate` lacks: a baseline that ignores an option would measure another task."""
    penalties = ("penalty_window", "presence_penalty", "frequency_penalty")
    others = ("logit_bias", "bad_words", "bad_words_ids", "min_new_tokens", "stop", "eos_token_ids", "grammar")
    for name in (*penalties, *others):
        value = getattr(params, name)
        if value or (name == "eos_token_ids" and value is not None):
            raise InvalidRequest(f"{name}={value!r}: not for stock generate; leave 'transformers' out of the methods")
