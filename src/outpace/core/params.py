"""What a user may ask of one request."""

from dataclasses import dataclass, field, fields
from typing import Any

from outpace.core.errors import InvalidRequest

MAX_SEED = 2**63 - 1

# Options of transformers and vLLM that change the output and that this engine does not implement yet.
# They are refused by name: an ignored option is a wrong answer that looks right.
KNOWN_UNSUPPORTED = frozenset(
    {
        "allowed_token_ids",
        "bad_words",
        "bad_words_ids",
        "begin_suppress_tokens",
        "best_of",
        "constraints",
        "do_sample",
        "dola_layers",
        "encoder_repetition_penalty",
        "epsilon_cutoff",
        "eta_cutoff",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "frequency_penalty",
        "guidance_scale",
        "ignore_eos",
        "length_penalty",
        "logit_bias",
        "logits_processor",
        "logits_processors",
        "logprobs",
        "min_new_tokens",
        "min_tokens",
        "no_repeat_ngram_size",
        "num_beam_groups",
        "num_beams",
        "penalty_alpha",
        "prefix_allowed_tokens_fn",
        "presence_penalty",
        "prompt_logprobs",
        "renormalize_logits",
        "repetition_penalty",
        "response_format",
        "sequence_bias",
        "stopping_criteria",
        "structured_outputs",
        "suppress_tokens",
        "top_a",
        "top_h",
        "typical_p",
        "watermarking_config",
    }
)


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are chosen and when it ends.

    Attributes:
        max_new_tokens: upper limit on generated tokens, at least 0.
        temperature: 0 is greedy; above 0 the logits are divided by it.
        top_k: keep the k most likely tokens; 0 keeps all. Ties with the k-th stay, as in transformers.
        top_p: keep the smallest set of tokens whose probability reaches this value; 1 keeps all.
        min_p: drop tokens whose probability is below this fraction of the most likely one's; 0 keeps all.
        seed: key of the request's noise; None lets the engine pick one, which the result reports.
        n: samples per prompt; sample i differs from the others by its index in the noise key.
        stop: strings that end the text; the text stops before the first of them.
        eos_token_ids: ids that end the request; None means the model's own.
        verification: "match" (same tokens as plain decoding, seed for seed) or "rejection" (same law).
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    n: int = 1
    stop: tuple[str, ...] = field(default=())
    eos_token_ids: tuple[int, ...] | None = None
    verification: str = "match"

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        if self.eos_token_ids is not None:
            object.__setattr__(self, "eos_token_ids", tuple(self.eos_token_ids))
        _check_int("max_new_tokens", self.max_new_tokens, 0)
        _check_int("top_k", self.top_k, 0)
        _check_int("n", self.n, 1)
        _check_range("temperature", self.temperature, 0.0, float("inf"), "a finite number >= 0 (0 is greedy)")
        _check_range("top_p", self.top_p, 0.0, 1.0, "a number in (0, 1]", open_low=True)
        _check_range("min_p", self.min_p, 0.0, 1.0, "a number in [0, 1]")
        if self.seed is not None:
            _check_int("seed", self.seed, 0, MAX_SEED)
        if any(not isinstance(text, str) or not text for text in self.stop):
            raise InvalidRequest(f"stop={self.stop!r}: every stop string must be a non-empty string")
        if self.verification not in ("match", "rejection"):
            raise InvalidRequest(f"verification={self.verification!r}: choose 'match' or 'rejection'")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @classmethod
    def from_options(cls, **options: Any) -> "SamplingParams":
        """Build from keyword options, refusing by name what is not supported.

        Raises:
            InvalidRequest: an option is unknown, not supported, or out of range.
        """
        known = {f.name for f in fields(cls)}
        for name, value in options.items():
            if name in KNOWN_UNSUPPORTED:
                raise InvalidRequest(f"{name}={value!r}: not supported by this version; leave it out")
            if name not in known:
                raise InvalidRequest(f"{name}={value!r}: unknown option; known options are {', '.join(sorted(known))}")
        return cls(**options)


def _check_int(name: str, value: Any, low: int, high: int | None = None) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < low or (high is not None and value > high):
        limit = f"an integer >= {low}" if high is None else f"an integer from {low} to {high}"
        raise InvalidRequest(f"{name}={value!r}: must be {limit}")


def _check_range(name: str, value: Any, low: float, high: float, wanted: str, open_low: bool = False) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not low <= value <= high or value == float("inf") or (open_low and value == low):
        raise InvalidRequest(f"{name}={value!r}: must be {wanted}")
