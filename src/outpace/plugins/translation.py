"""What transformers' `generate` has prepared, in our terms: what cannot be said exactly is refused by name."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.logits_process import (
    LogitNormalization,
    LogitsProcessor,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    StoppingCriteria,
    StopStringCriteria,
)

from outpace.lib.errors import InvalidRequest

# The processors that we compute too, in the order in which `generate` applies them: the field of `SamplingParams`, and
# its value read from the processor and the width of the prompts, padding included. Fields that `SamplingParams` does
# not have yet are refused by it, by name.
PROCESSORS: dict[type[LogitsProcessor], tuple[str, Callable[[Any, int], Any]]] = {
    RepetitionPenaltyLogitsProcessor: ("repetition_penalty", lambda processor, width: processor.penalty),
    NoBadWordsLogitsProcessor: ("bad_words_ids", lambda processor, width: processor.bad_word_ids),
    MinLengthLogitsProcessor: ("min_new_tokens", lambda processor, width: max(processor.min_length - width, 0)),
    MinNewTokensLengthLogitsProcessor: ("min_new_tokens", lambda processor, width: processor.min_new_tokens),
    TemperatureLogitsWarper: ("temperature", lambda processor, width: processor.temperature),
    TopKLogitsWarper: ("top_k", lambda processor, width: processor.top_k),
    TopPLogitsWarper: ("top_p", lambda processor, width: processor.top_p),
    MinPLogitsWarper: ("min_p", lambda processor, width: processor.min_p),
}
# Settings of a processor that change its meaning, with the value that we compute.
USUAL_SETTINGS = {"filter_value": -float("inf"), "min_tokens_to_keep": 1, "prompt_ignore_length": None}
# Arguments of the model's forward that change nothing or are honoured here.
KNOWN_ARGUMENTS = frozenset({"attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep"})
RETURNED = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")


@dataclass(frozen=True)
class Stops:
    """Where answers end: width of the whole rectangle, padding included, and the ids and the criteria of stop strings
    that end a row."""

    max_length: int
    eos_token_ids: tuple[int, ...]
    strings: tuple[StopStringCriteria, ...] = ()


def check_config(model: PreTrainedModel, config: GenerationConfig, assistant: object | None) -> None:
    """Refuse ways of generating that are not greedy decoding or sampling, and results that we do not have.

    Raises:
        InvalidRequest: naming the mode or option.
    """
    if model.config.is_encoder_decoder:
        raise InvalidRequest(f"{type(model).__name__} is an encoder-decoder: only decoder-only models are supported")
    text = model.config.get_text_config()
    if getattr(text, "attn_logit_softcapping", None) is not None and text._attn_implementation == "sdpa":
        raise InvalidRequest(
            f"{type(model).__name__} under attn_implementation='sdpa' leaves out its cap on attention scores, which we "
            "compute: load it with attn_implementation='eager', as it was trained"
        )
    mode = config.get_generation_mode(assistant)  # type: ignore[arg-type]
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise InvalidRequest(f"generation mode {mode.value!r}: only greedy decoding and sampling are supported")
    if config.cache_implementation == "quantized":
        raise InvalidRequest("cache_implementation='quantized': it changes the numbers; leave it out")
    if config.return_dict_in_generate:
        for name in RETURNED:
            if getattr(config, name, None):
                raise InvalidRequest(f"{name}=True: not recorded when drafts are verified; leave it out")


def params_of(processors: Iterable[LogitsProcessor], do_sample: bool, width: int) -> dict[str, Any]:
    """Options of `SamplingParams` that say what the processors do.

    Args:
        processors: made by `generate` from its configuration, and the user's own.
        do_sample: false for greedy decoding, at temperature 0.
        width: of the prompts, padding included.

    Raises:
        InvalidRequest: a processor that we do not compute, has unusual settings, or stands in another order.
    """
    options: dict[str, Any] = {}
    order, last = list(PROCESSORS), -1
    for processor in processors:
        kind = type(processor)
        if kind is LogitNormalization:
            continue  # scores are normalised before a token is drawn in any case
        if kind not in PROCESSORS:
            raise InvalidRequest(f"{kind.__name__}: this logits processor is not supported; leave it out")
        unusual = [name for name, value in USUAL_SETTINGS.items() if getattr(processor, name, value) != value]
        if unusual:
            raise InvalidRequest(f"{kind.__name__}: {', '.join(unusual)} cannot be changed; leave it at the default")
        if order.index(kind) <= last:
            raise InvalidRequest(
                f"{kind.__name__} comes twice or after {order[last].__name__}: that order is not supported"
            )
        last = order.index(kind)
        option, read = PROCESSORS[kind]
        value = read(processor, width)
        options[option] = max(value, options.get(option, value))  # both minima may be there: the larger one holds
    return {"temperature": 1.0} | options if do_sample else options | {"temperature": 0.0}


def stops_of(criteria: Iterable[StoppingCriteria]) -> Stops:
    """The limits that stopping criteria stand for.

    Raises:
        InvalidRequest: a criterion other than a length, EOS ids and stop strings, or no length at all.
    """
    lengths: list[int] = []
    eos: list[int] = []
    strings: list[StopStringCriteria] = []
    for criterion in criteria:
        if type(criterion) is MaxLengthCriteria:
            lengths.append(criterion.max_length)
        elif type(criterion) is EosTokenCriteria:
            eos += criterion.eos_token_id.tolist()
        elif type(criterion) is StopStringCriteria:
            strings.append(criterion)
        else:
            raise InvalidRequest(f"{type(criterion).__name__}: this stopping criterion is not supported; leave it out")
    if not lengths:
        raise InvalidRequest("no length limit: give max_new_tokens or max_length")
    return Stops(min(lengths), tuple(eos), tuple(strings))


def unpadded_rows(input_ids: Tensor, arguments: dict[str, Any]) -> list[list[int]]:
    """The prompts [B, P] without their padding.

    Args:
        input_ids: [B, P].
        arguments: what `generate` would pass to the model's forward.

    Raises:
        InvalidRequest: padding elsewhere than on the left, positions of one's own, a cache to go on from or to fill,
            arguments that only the model knows.
    """
    given = {name: value for name, value in arguments.items() if value is not None}
    foreign = sorted(given.keys() - KNOWN_ARGUMENTS)
    if foreign:
        raise InvalidRequest(f"{', '.join(foreign)}: not supported; only input_ids and attention_mask are")
    cache = given.get("past_key_values")
    if cache is not None and (getattr(cache, "_is_user_defined", False) or cache.get_seq_length() > 0):
        raise InvalidRequest("past_key_values: a cache of one's own cannot be used; leave it out")
    mask = given["attention_mask"].bool() if "attention_mask" in given else torch.ones_like(input_ids).bool()  # [B, P]
    if mask.shape != input_ids.shape or not bool(mask[:, -1].all()) or bool((mask[:, :-1] & ~mask[:, 1:]).any()):
        raise InvalidRequest("attention_mask: padding must be on the left (tokenizer.padding_side = 'left')")
    positions = given.get("position_ids")
    usual = mask.long().cumsum(-1) - 1
    if positions is not None and bool(((positions != usual) & mask).any()):
        raise InvalidRequest("position_ids: positions of one's own are not supported; leave them out")
    return [row[keep].tolist() for row, keep in zip(input_ids, mask, strict=True)]
