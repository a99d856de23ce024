"""Speculative decoding inside transformers: `model.generate(..., custom_generate=outpace.custom_generate())`."""

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.configuration_utils import GenerationConfig, GenerationMode
from transformers.generation.logits_process import (
    LogitNormalization,
    LogitsProcessor,
    LogitsProcessorList,
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
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput

from outpace.core.params import MAX_SEED, SamplingParams
from outpace.core.protocols import Proposer
from outpace.drafters.build_context import BuildContext
from outpace.drafters.method import LANGUAGE_MODEL, said_of
from outpace.engine.engine import Engine
from outpace.engine.session import Session
from outpace.lib.checks import check_flags, shown
from outpace.lib.errors import InvalidRequest
from outpace.lib.places import places_of
from outpace.lib.threads import warn_of_spinning
from outpace.methods.catalog import MethodSpec, budget_with, build_proposer, parse_method
from outpace.methods.defaults import with_draft
from outpace.models.borrow import borrow_draft_model, borrow_target
from outpace.models.draft import DraftModel, early_exit
from outpace.models.loading.shipped import Shipment
from outpace.models.target import PackedTarget


def custom_generate(
    *,
    method: str | MethodSpec = "recycle",
    drafter: PreTrainedModel | None = None,
    budget: int | None = None,
    seed: int | None = None,
    pack: bool = False,
) -> "CustomGenerate":
    """A function for transformers' `generate(..., custom_generate=...)`. Make it once: methods learn over its calls.

    `generate` then returns what it would have returned, [B, L] ids or a `GenerateDecoderOnlyOutput` with `sequences`,
    only faster: greedy ids equal its own up to rounding, sampled ids follow the same distribution. The model is not
    changed.

    Args:
        method: how to draft, as for `outpace.load`.
        drafter: the draft model of "linear", "fixed", "dynatree" and "svip", with the model's own tokenizer; None takes
            the model's first layers.
        budget: drafted nodes per round, by default the method's; not with a method that names them.
        seed: key of the sampling noise; None draws one from torch's global generator, so that `torch.manual_seed`
            makes an answer reproducible. Equal prompts of a batch are different samples.
        pack: on CPUs, copy the weights into a faster layout at every call, for as much memory again. Results are then
            also bit-equal between methods.

    Raises:
        InvalidRequest: an unknown method, one with a trained drafter, a bad budget or seed. Later, from `generate`: an
            option, processor, criterion or argument that cannot be honoured exactly, by name.
        UnsupportedModel: from `generate`: a model that cannot be decoded losslessly.
    """
    spec = method if isinstance(method, MethodSpec) else parse_method(method)
    spec = with_draft(spec, None if drafter is None else LANGUAGE_MODEL, Shipment())
    if spec.drafter is not None and not spec.uses_draft_model:
        what = said_of(spec.drafter)
        raise InvalidRequest(f"method={shown(method)}: needs {what}, which only outpace.load reads; choose another")
    if drafter is not None and not spec.uses_draft_model:
        raise InvalidRequest(f"drafter={type(drafter).__name__}: method {shown(method)} uses no draft model")
    if not isinstance(drafter, PreTrainedModel | None):
        raise InvalidRequest(f"drafter={shown(drafter)}: must be a transformers model, loaded")
    check_flags(pack=pack)
    return CustomGenerate(spec, drafter, budget_with(method, budget), SamplingParams(seed=seed).seed, pack)


@dataclass(eq=False)
class CustomGenerate:
    """The callable of `custom_generate`, called by transformers once inputs and options are prepared."""

    method: MethodSpec
    drafter: PreTrainedModel | None
    budget: int | None
    seed: int | None
    pack: bool

    def __post_init__(self) -> None:
        self._proposers: dict[tuple[int, torch.device], Proposer] = {}

    @property
    def __signature__(self) -> inspect.Signature:
        """The signature in which `generate` finds our arguments. Reading it also restores the tokenizer (see below)."""
        _bring_tokenizer_back()
        return inspect.signature(self.__call__)

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        synced_gpus: bool = False,
        streamer: BaseStreamer | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        **model_kwargs: Any,
    ) -> Tensor | GenerateDecoderOnlyOutput:
        """Decode prompts [B, P], padded on the left; returns [B, P + N] as `generate` does. Only `generate` uses the
        tokenizer, for its criterion of stop strings."""
        arguments = _left_behind()
        streamer = streamer or arguments.get("streamer")
        if synced_gpus or arguments.get("synced_gpus"):
            raise InvalidRequest("synced_gpus=True: generation over several processes is not supported")
        check_config(model, generation_config, arguments.get("assistant_model"))
        prompts = unpadded_rows(input_ids, model_kwargs)
        stops = stops_of(stopping_criteria)
        pad = getattr(generation_config, "_pad_token_tensor", None)
        if pad is None and stops.eos_token_ids:
            raise InvalidRequest("pad_token_id=None: rows that end early need one")
        options = params_of(logits_processor, bool(generation_config.do_sample), input_ids.shape[1]) | {
            # transformers counts padding too, and always generates one token.
            "max_new_tokens": max(stops.max_length - input_ids.shape[1], 1)
        }
        check_agreement(logits_processor, stops, options, zip(input_ids.tolist(), prompts, strict=True))
        longest = max(map(len, prompts)) + options["max_new_tokens"]
        target = borrow_target(model, longest, len(prompts), self.pack)
        if target.device.type == "cpu":
            warn_of_spinning()
        # Ids outside the vocabulary end nothing, as in stock `generate`.
        options["eos_token_ids"] = tuple(token for token in stops.eos_token_ids if 0 <= token < target.vocab_size)
        requests = self._requests(prompts, options)
        engine = Engine(target)
        proposer = self._proposer(target)
        rows: dict[int, Session] = {}
        try:
            for members, params in requests:
                sessions = engine.add(prompts[members[0]], params, proposer, self.budget)
                rows |= zip(members, sessions, strict=True)
            ordered = [BatchRow(rows[row], ids, stops.strings) for row, ids in enumerate(input_ids)]
            filler = int(pad) if pad is not None and stops.eos_token_ids else None
            new = BatchRows(ordered, filler, streamer).decode(engine)
        finally:
            for session in rows.values():
                engine.cancel(session)
        sequences = torch.cat([input_ids, new.to(input_ids)], dim=1)
        if generation_config.return_dict_in_generate:
            return GenerateDecoderOnlyOutput(sequences=sequences)  # type: ignore[arg-type]
        return sequences

    def _requests(
        self, prompts: Sequence[Sequence[int]], options: dict[str, Any]
    ) -> list[tuple[list[int], SamplingParams]]:
        """Indices of rows with the same prompt, and their parameters: one request with a sample per row.

        `num_return_sequences` arrives as repeated rows. As separate requests they would share their noise.
        """
        requests, is_drawn = list[tuple[list[int], SamplingParams]](), self.seed is None and options["temperature"] > 0
        for members in places_of(map(tuple, prompts)).values():
            seed = int(torch.randint(MAX_SEED, ())) if is_drawn else self.seed or 0
            requests.append((members, SamplingParams.from_options(**options, seed=seed, n=len(members))))
        return requests

    def _proposer(self, target: PackedTarget) -> Proposer:
        """The method's proposer. One that learns is kept over calls; a draft model lives as long as its target."""

        def draft_model() -> DraftModel:
            return early_exit(target) if self.drafter is None else borrow_draft_model(self.drafter, target)

        context = BuildContext(target.vocab_size, target.device, draft_model)
        if self.method.uses_draft_model:
            return build_proposer(self.method, context)
        key = target.vocab_size, target.device
        if key not in self._proposers:
            self._proposers[key] = build_proposer(self.method, context)
        return self._proposers[key]


def _left_behind() -> dict[str, Any]:
    """Arguments of `generate` that matter here but that it does not pass on to a callable.

    Up to transformers 5.17 at least, `streamer`, `assistant_model` and `synced_gpus` stay in `generate` when
    `custom_generate` is a callable. Ignored, they would fail silently: a streamer never ends, an assistant is unused.
    """
    frame = inspect.currentframe()
    caller = frame.f_back.f_back if frame is not None and frame.f_back is not None else None
    if caller is None or caller.f_code.co_name != "generate" or "custom_generate" not in caller.f_locals:
        return {}
    return {name: caller.f_locals.get(name) for name in ("streamer", "assistant_model", "synced_gpus")}


def _bring_tokenizer_back() -> None:
    """Put `tokenizer=` back among the arguments that `generate` passes to a callable.

    Up to transformers 5.17 at least it is removed before and lost for callables, and stop strings are then refused
    because it is missing.
    """
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_name != "_extract_generation_mode_kwargs":
        frame = frame.f_back
    found = {} if frame is None else frame.f_locals
    tokenizer = found.get("generation_mode_kwargs", {}).get("tokenizer")
    if tokenizer is not None:
        found["kwargs"].setdefault("tokenizer", tokenizer)


class BatchRow:
    """A prompt and the ids generated after it. With padding, which stock `generate` also searches for stop strings.

    Attributes:
        new: generated ids.
        end: number of ids at which the row ended; None before.
    """

    def __init__(self, session: Session, prompt: Tensor, criteria: Sequence[StopStringCriteria]) -> None:
        self.session, self.new = session, list[int]()
        self.end: int | None = None
        self._ids, self._criteria = prompt.tolist(), criteria

    def follow(self) -> None:
        """Take what the session generated since the last call."""
        for token in self.session.generated[len(self.new) :]:
            self.new.append(token)
            self._ids.append(token)
            if self.end is None and self._criteria:
                ids = torch.tensor([self._ids])  # [1, P + N]
                if any(bool(criterion(ids, None)) for criterion in self._criteria):
                    self.end = len(self.new)
        if self.end is None and self.session.finish_reason is not None:
            self.end = len(self.new)


class BatchRows:
    """The rows of one call, and a streamer that gets a column as soon as all rows have it.

    `pad` fills up rows that ended before others; with None they continue instead, as in stock `generate` if only a stop
    string or a length ends a row.
    """

    def __init__(self, rows: Sequence[BatchRow], pad: int | None, streamer: BaseStreamer | None) -> None:
        self._rows, self._pad, self._streamer, self._streamed = rows, pad, streamer, 0

    def decode(self, engine: Engine) -> Tensor:
        """[B, N] new ids."""
        while not self._are_done():
            engine.step()
            for row in self._rows:
                row.follow()
                if row.session.error is not None:
                    engine.result(row.session)  # raises its error: rows without an EOS would wait for it forever
                if row.end is not None and self._pad is not None:
                    engine.cancel(row.session)
            self._stream()
        for row in self._rows:
            engine.cancel(row.session)
        if self._streamer is not None:
            self._streamer.end()
        return self._table(self._width())

    def _width(self) -> int:
        return max(row.end or 0 for row in self._rows)

    def _are_done(self) -> bool:
        if any(row.end is None for row in self._rows):
            return False
        return self._pad is not None or all(len(row.new) >= self._width() for row in self._rows)

    def _stream(self) -> None:
        if self._streamer is None:
            return
        lengths = [len(row.new) for row in self._rows if row.end is None or self._pad is None]
        ready = min(lengths, default=self._width())
        if all(row.end is not None for row in self._rows):
            ready = min(ready, self._width())
        table = self._table(ready)
        for column in range(self._streamed, ready):
            self._streamer.put(table[:, column])
        self._streamed = max(self._streamed, ready)

    def _table(self, width: int) -> Tensor:
        """[B, width] ids of all rows, padded after their ends."""
        rows = []
        for row in self._rows:
            ids = row.new if self._pad is None else row.new[: row.end]
            rows.append((ids + [self._pad or 0] * width)[:width])
        return torch.tensor(rows, dtype=torch.int64)


# The processors that we compute too, in the order in which `generate` applies them: the field of `SamplingParams`, and
# its value read from the processor and the width of the prompts, padding included. `SamplingParams` refuses fields that
# it does not have, by name.
PROCESSORS: dict[type[LogitsProcessor], tuple[str, Callable[[Any, int], Any]]] = {
    RepetitionPenaltyLogitsProcessor: ("repetition_penalty", lambda processor, width: processor.penalty),
    # Without bad words of a single EOS id, which the processor drops.
    NoBadWordsLogitsProcessor: ("bad_words_ids", lambda processor, width: list(processor.sequence_bias)),
    MinLengthLogitsProcessor: ("min_new_tokens", lambda processor, width: max(processor.min_length - width, 0)),
    MinNewTokensLengthLogitsProcessor: (
        "min_new_tokens",
        lambda processor, width: max(processor.prompt_length_to_skip + processor.min_new_tokens - width, 0),
    ),
    TemperatureLogitsWarper: ("temperature", lambda processor, width: processor.temperature),
    TopKLogitsWarper: ("top_k", lambda processor, width: processor.top_k),
    TopPLogitsWarper: ("top_p", lambda processor, width: processor.top_p),
    MinPLogitsWarper: ("min_p", lambda processor, width: processor.min_p),
}
# Settings of a processor that change its meaning, with the value that we compute.
USUAL_SETTINGS = {"filter_value": -float("inf"), "min_tokens_to_keep": 1, "prompt_ignore_length": None}
# Arguments of the model's forward that change nothing or are honoured here.
CACHES = ("cache", "past_key_values")  # its names in transformers from 5.24 on, and before
KNOWN_ARGUMENTS = frozenset({"attention_mask", "position_ids", "use_cache", "logits_to_keep", *CACHES})
RETURNED = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")


@dataclass(frozen=True)
class Stops:
    """Conditions that end answers: the width of all rows, padding included, and the ids and stop-string criteria that
    end one."""

    max_length: int
    eos_token_ids: tuple[int, ...]
    strings: tuple[StopStringCriteria, ...] = ()


def check_config(model: PreTrainedModel, config: GenerationConfig, assistant: object | None) -> None:
    """Refuse modes other than greedy decoding and sampling, and results that we cannot return."""
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
    """Options of `SamplingParams` equivalent to logits processors. `width`: of the prompts, padding included.

    Raises:
        InvalidRequest: a processor that we do not compute, has unusual settings, or stands in another order.
    """
    options, order, last = dict[str, Any](), list(PROCESSORS), -1
    for processor in processors:
        kind = type(processor)
        if kind is LogitNormalization:
            continue  # scores are always normalised before a token is drawn
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
        options[option] = max(value, options.get(option, value))  # if both minima are given, the larger one holds
    return {"temperature": 1.0} | options if do_sample else options | {"temperature": 0.0}


def check_agreement(
    processors: Iterable[LogitsProcessor],
    stops: "Stops",
    options: dict[str, Any],
    rows: Iterable[tuple[list[int], list[int]]],
) -> None:
    """Refuse what our options cannot express (InvalidRequest): a minimal length that bans other ids than those that end
    the answer, a repetition penalty on padding. `rows`: ids of each row, with padding and without."""
    for processor in processors:
        if isinstance(processor, MinLengthLogitsProcessor | MinNewTokensLengthLogitsProcessor):
            ids, ends = processor.eos_token_id.flatten().tolist(), list(stops.eos_token_ids)
            if set(ids) != set(ends):
                name = f"{type(processor).__name__}: its eos_token_id={ids}"
                raise InvalidRequest(f"{name} are not those that end the answer, {ends}; give the same")
    if "repetition_penalty" in options and any(set(padded) != set(prompt) for padded, prompt in rows):
        raise InvalidRequest(
            f"repetition_penalty={options['repetition_penalty']}: stock `generate` penalises the padding token too; "
            "give prompts of one length, or one at a time"
        )


def stops_of(criteria: Iterable[StoppingCriteria]) -> Stops:
    """The conditions in stopping criteria that end answers."""
    lengths, eos, strings = list[int](), list[int](), list[StopStringCriteria]()
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
    """The prompts [B, P] without their padding; `arguments` are those of the model's forward.

    Raises:
        InvalidRequest: padding that is not on the left, the caller's positions, a cache to continue from or fill,
            arguments that only the model knows.
    """
    given = {name: value for name, value in arguments.items() if value is not None}
    foreign = sorted(given.keys() - KNOWN_ARGUMENTS)
    if foreign:
        raise InvalidRequest(f"{', '.join(foreign)}: not supported; only input_ids and attention_mask are")
    for name in CACHES:
        cache = given.get(name)
        if cache is not None and (getattr(cache, "_is_user_defined", False) or cache.get_seq_length() > 0):
            raise InvalidRequest(f"{name}: your own cache cannot be used; leave it out")
    mask = given["attention_mask"].bool() if "attention_mask" in given else torch.ones_like(input_ids).bool()  # [B, P]
    if mask.shape != input_ids.shape or not bool(mask[:, -1].all()) or bool((mask[:, :-1] & ~mask[:, 1:]).any()):
        raise InvalidRequest("attention_mask: padding must be on the left (tokenizer.padding_side = 'left')")
    positions = given.get("position_ids")
    usual = mask.long().cumsum(-1) - 1
    if positions is not None and bool(((positions != usual) & mask).any()):
        raise InvalidRequest("position_ids: your own positions are not supported; leave them out")
    return [row[keep].tolist() for row, keep in zip(input_ids, mask, strict=True)]
