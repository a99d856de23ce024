"""Load a model, generate, stream, chat."""

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from os import PathLike
from typing import Any, cast, overload

from outpace.budget.costs import PassCosts
from outpace.chat import Chat
from outpace.core.events import Generation
from outpace.core.params import SamplingParams
from outpace.core.protocols import Proposer
from outpace.core.settings import LoadSettings, documented_by, settings_of
from outpace.engine.engine import Engine
from outpace.engine.margin import Margin, margin_of
from outpace.engine.session import Session
from outpace.engine.stream import TokenStream
from outpace.kernels.build import warn_without_kernels
from outpace.lib.checks import check_flags, check_int, check_range, is_int, items_of, path_of, shown
from outpace.lib.errors import InvalidRequest
from outpace.lib.quick import without_collection
from outpace.lib.stages import loading, stage
from outpace.lib.threads import warn_of_spinning, warn_of_stops
from outpace.methods.catalog import MethodLike, MethodSpec, budget_with, check_own, name_of, own_budget, parse_method
from outpace.methods.profile import choose, from_speculative_config
from outpace.models.costs_file import costs_file
from outpace.models.exactness import probe
from outpace.models.loading.load import load_target
from outpace.models.target import PackedTarget
from outpace.models.tokenizer import ChatMessage, TextCodec, grammar_tokenizer

Prompt = str | Sequence[int] | Sequence[ChatMessage] | ChatMessage | Mapping[str, Any]
Batch = list[str] | tuple[str, ...] | Sequence[Sequence[int]] | Sequence[Sequence[ChatMessage]] | list[Prompt]
_MOST_DEVICES = 128  # torch numbers them in a byte
_KINDS = "give text, token ids or chat messages"


def checked_params(
    params: SamplingParams | None, options: dict[str, Any], one_sample_only: str | None = None
) -> SamplingParams:
    """Sampling parameters, given as such or as options.

    Raises:
        InvalidRequest: both were given, a bad option, several samples of a stream, or a trace of what is none.
    """
    given: Any = params
    if not isinstance(given, SamplingParams | None):
        what = f"params={shown(given)}: is a {type(given).__name__}"
        raise InvalidRequest(f"{what}; give outpace.SamplingParams(...), or its fields as options: temperature=0.7")
    if params is not None and options:
        raise InvalidRequest(f"params and {', '.join(options)} were both given: put everything into one of them")
    params = SamplingParams.from_options(**options) if params is None else params
    if one_sample_only and params.n != 1:
        raise InvalidRequest(f"n={params.n}: {one_sample_only} carries one sample; use generate for several")
    if params.trace and not one_sample_only:
        raise InvalidRequest("trace=True: generate returns no rounds; use stream, whose events hold them")
    return params


def checked_name(field: str, name: Any) -> str:
    """A model's or a drafter's name, given as text or as a path."""
    path = os.fspath(name) if isinstance(name, os.PathLike) else name
    if not isinstance(path, str) or not path or not (path.isprintable() or path_of(path).exists()):
        raise InvalidRequest(f"{field}={shown(name)}: must be a name or a path")
    return path


def checked_drafting(
    method: Any, drafter: Any, budget: Any, speculative_config: Any
) -> tuple[MethodLike | None, str | None]:
    """The method and the drafter of `load`.

    Raises:
        InvalidRequest: an unknown method or option, a bad budget or drafter, or one given twice.
    """
    drafter = None if drafter is None else checked_name("drafter", drafter)
    if speculative_config is not None:
        method, drafter = from_speculative_config(speculative_config, method=method, drafter=drafter, budget=budget)
    budget_with(method, budget)
    if method is not None and not isinstance(method, str | MethodSpec):
        check_own(method)
    return method, drafter


def checked_loading(
    model: Any, device: Any, max_num_seqs: Any, words: Mapping[str, Any], sizes: Mapping[str, Any]
) -> dict[str, Any]:
    """Options of `load_target` in their normal forms; `InvalidRequest` for a wrong type or bound. Sizes may be None."""
    return {
        "name": checked_name("model", model),
        "device": _device(device),
        "max_num_seqs": check_int("max_num_seqs", max_num_seqs, 1),
        **{name: _word(name, word) for name, word in words.items()},
        **{name: None if size is None else check_int(name, size, 1) for name, size in sizes.items()},
    }


def _device(value: Any) -> str:
    """A device as a word; a number is a GPU's, as in torch."""
    return f"cuda:{check_int('device', value, 0, _MOST_DEVICES - 1)}" if is_int(value) else _word("device", value)


def _word(field: str, value: Any) -> str:
    """A word such as "float32", given as text or as torch's own object."""
    word = str(value).removeprefix("torch.") if type(value).__module__ == "torch" else value
    if not isinstance(word, str):
        raise InvalidRequest(f"{field}={shown(value)}: must be text, and is a {type(value).__name__}")
    return word


def as_batch(prompts: Any) -> tuple[bool, list[Prompt]]:
    """Whether this is one prompt, and the prompts. Ids of one dimension are one prompt, a rectangle is a batch.

    Raises:
        InvalidRequest: it is neither a prompt nor a list of prompts.
    """
    if _is_encoding(prompts):
        prompts = _unpadded(prompts)
    if isinstance(prompts, str | Mapping):
        return True, [cast(Prompt, prompts)]
    items = _items(prompts)
    is_batch = items and (isinstance(items[0], str) or _is_encoding(items[0]) or items_of(items[0]) is not None)
    return (False, items) if is_batch else (True, [cast(Prompt, items)])


def encoded(prompt: Any, codec: TextCodec) -> list[int]:
    """Ids of text, of chat messages, or ids; `InvalidRequest` for anything else, or if the template refuses it."""
    if _is_encoding(prompt):
        prompt = _unpadded(prompt)
    if isinstance(prompt, str):
        return codec.encode(prompt)
    items: list[Any] = [prompt] if isinstance(prompt, Mapping) else _items(prompt)
    if len(items) == 1 and isinstance(items[0], list):  # the only row of a rectangle
        items = items[0]
    if all(is_int(item) for item in items):
        return [int(item) for item in items]
    if all(isinstance(item, Mapping) for item in items):
        return codec.encode_chat(items)
    wrong = next(item for item in items if not is_int(item))
    if isinstance(wrong, str):
        raise InvalidRequest(f"prompt={shown(items)}: this call takes one prompt, not a list of texts; give one text")
    raise InvalidRequest(f"prompt of type {type(wrong).__name__}, {shown(wrong)}: {_KINDS}")


def _items(prompt: Any) -> list[Any]:
    """The items of a prompt or a batch that is no text and no mapping."""
    if isinstance(prompt, bytes | bytearray | memoryview):
        raise InvalidRequest(f"prompt={shown(prompt)}: bytes are neither text nor ids; decode them: prompt.decode()")
    # A dictionary's keys have order, a set's items have none.
    is_list = not isinstance(prompt, set | frozenset) and getattr(prompt, "ndim", 1) <= 2
    items = items_of(prompt) if is_list else None
    if items is None:
        raise InvalidRequest(f"prompt={shown(prompt)}, a {type(prompt).__name__}: {_KINDS}, or a list of these")
    return list(items)


def _is_encoding(prompt: Any) -> bool:
    """Whether this is what tokenizers return; another mapping is a message."""
    return isinstance(prompt, Mapping) and "input_ids" in prompt


def _unpadded(encoding: Mapping[str, Any]) -> list[Any]:
    """Ids of a tokenizer's answer, in rows if it is of several texts, without those that its mask leaves out."""
    ids, mask = _items(encoding["input_ids"]), encoding.get("attention_mask")
    if mask is None:
        return ids
    rows, masks = (_items(both) for both in ((ids, mask) if _is_table(ids) else ([ids], [mask])))
    kept = [_items(row) for row in masks]
    if [len(row) for row in kept] != [len(_items(row)) for row in rows]:
        raise InvalidRequest("attention_mask: must have a number for each of input_ids")
    found = [[token for token, keep in zip(*pair) if keep] for pair in zip(rows, kept)]
    return found if _is_table(ids) else found[0]


def _is_table(items: Sequence[Any]) -> bool:
    return bool(items) and items_of(items[0]) is not None


class Model:
    """A loaded model with a default method. Made by `outpace.load`.

    Attributes:
        target: the model on its slots.
        codec: its tokenizer.
        engine: the engine that all calls share.
        method, method_name: the default method, and what it is called.
        method_from: "named", "the default" and what ships for it, or "from the profile of" a date and the file that
            `outpace tune` wrote.
        drafter: name of the drafter that was given for all methods, if any.
        drafters: the drafters of the methods.
        exactness: whether results are batch-invariant on this machine, which is probed at load.
    """

    def __init__(
        self,
        name: str,
        target: PackedTarget,
        codec: TextCodec,
        method: MethodLike | None,
        budget: int | None = None,
        drafter: str | None = None,
        profile: bool = False,
        prompt_slowdown: float = LoadSettings.prompt_slowdown,
    ) -> None:
        self.name, self.target, self.codec = name, target, codec
        self.exactness = probe(target)
        with stage("preparing the method"):
            choice = choose(name, target, codec, method, drafter, profile)
        self.method, self.drafter, self._proposers = choice.method, choice.drafter, choice.proposers
        self.drafters = self._proposers.drafters
        self.method_name, self.method_from = name_of(self.method), choice.origin
        self.engine = Engine(
            target,
            codec.new_detokenizer,
            costs=PassCosts(costs_file(target)),
            grammar_tokenizer=lambda: grammar_tokenizer(codec, target.vocab_size, target.eos_token_ids),
            prompt_slowdown=prompt_slowdown,
        )
        self._budget = budget_with(None, budget, self.method)
        with stage("preparing the method"):
            self._default = self.proposer(self.method)  # which is always kept
        with stage("measuring"):
            self.drafting(None, None)  # times passes, if the method follows prices

    def proposer(self, method: MethodLike) -> Proposer:
        """The proposer of a method such as "recycle:budget=8", with its learned state; your own proposer is returned.

        The same object is returned while anything, such as an open request, refers to it. The default method's proposer
        is always kept, and the last 16 others until `reset`.

        Raises:
            InvalidRequest: an unknown method or option, a bad value, or an object that proposes nothing.
            MethodError: a proposer that lacks a method or an attribute.
        """
        if not isinstance(method, str | MethodSpec):
            check_own(method)
            return method
        return self._proposers.get(parse_method(method) if isinstance(method, str) else method)

    def reset(self) -> None:
        """Reset what every method learned from earlier requests, and the prefix cache. Methods that no open request
        uses are freed, except the default."""

        def forget() -> None:
            self._default.reset()  # also a proposer of the caller's
            self._proposers.reset()

        self.engine.forget_prefixes()  # first: cached slots hold proposers
        self.engine.between_steps(forget)

    @overload
    def generate(
        self,
        prompts: Prompt,
        params: SamplingParams | None = None,
        *,
        method: MethodLike | None = None,
        budget: int | None = None,
        **options: Any,
    ) -> Generation: ...

    @overload
    def generate(
        self,
        prompts: Batch,
        params: SamplingParams | None = None,
        *,
        method: MethodLike | None = None,
        budget: int | None = None,
        **options: Any,
    ) -> list[Generation]: ...

    def generate(
        self,
        prompts: Prompt | Batch,
        params: SamplingParams | None = None,
        *,
        method: MethodLike | None = None,
        budget: int | None = None,
        **options: Any,
    ) -> Generation | list[Generation]:
        """Generate answers; several prompts share the engine as one batch.

        Args:
            prompts: text, token ids or chat messages, or a list of any of these. Text is encoded as it is; chat
                messages are rendered by the model's chat template.
            params: sampling parameters; or give them as keyword options.
            method: the method for these prompts, by default the model's.
            budget: drafted nodes per round, by default the method's; not with a method that names them.
            **options: fields of `SamplingParams`; `min_tokens` is another name of `min_new_tokens`.

        Returns:
            A `Generation` for one prompt, a list of them for a list of prompts.

        Raises:
            InvalidRequest: a prompt or option that cannot be served, or options that leave no token to choose.
            NonFiniteLogits: the target produced NaN or infinity.
        """
        is_single, batch = as_batch(prompts)
        sessions: list[list[Session]] = []
        try:
            for prompt in batch:
                sessions.append(self._add(prompt, params, method, budget, options))
            own = [session for group in sessions for session in group]
            self.engine.run_until(lambda: all(session.has_ended for session in own), own)
        except BaseException:
            open_ones = [session for group in sessions for session in group]
            for session in open_ones:  # all of them before the first step, which a second Ctrl-C may interrupt
                session.is_cancelled = True
            for session in open_ones:
                self.engine.cancel(session)
            raise
        generations = [
            Generation(tuple(group[0].prompt_ids), tuple(self.engine.result(session) for session in group))
            for group in sessions
        ]
        return generations[0] if is_single else generations

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        method: MethodLike | None = None,
        budget: int | None = None,
        **options: Any,
    ) -> TokenStream:
        """Generate one answer piece by piece; closing or dropping the stream early cancels the request.

        Arguments are those of `generate`, for one prompt and n = 1.
        """
        (session,) = self._add(prompt, params, method, budget, options, only_one=True)
        try:
            return TokenStream(self.engine, session)
        except BaseException:  # whose traceback may keep the session alive
            session.is_cancelled = True
            raise

    def chat(
        self,
        system: str | None = None,
        params: SamplingParams | None = None,
        *,
        method: MethodLike | None = None,
        budget: int | None = None,
        **options: Any,
    ) -> Chat:
        """A conversation, which the prefix cache holds from turn to turn.

        Args:
            system: a system message that opens it.
            params, method, budget, **options: of every answer, as for `generate`.

        Raises:
            InvalidRequest: a bad option, or a model without a chat template.
        """
        params = self.resolved(checked_params(params, options, one_sample_only="a conversation"))
        return Chat(self.engine, self.codec, params, *self.drafting(method, budget), system=system)

    def encode(self, prompt: Prompt) -> list[int]:
        """Ids of text, chat messages or ids; `InvalidRequest` for anything else, or if the template refuses it."""
        return encoded(prompt, self.codec)

    def resolved(self, params: SamplingParams) -> SamplingParams:
        """The parameters with bad words as ids, and with special tokens of `stop` among the EOS ids."""
        return self.codec.resolved(params, self.target.eos_token_ids, self.target.vocab_size)

    def margin(self, ids: Sequence[int], params: SamplingParams, tokens: tuple[int, int], prompt_length: int) -> Margin:
        """How close the choice between two tokens after `ids` was; the first `prompt_length` ids are the prompt.
        `InvalidRequest` for parameters that sample without a seed, or under rejection."""
        return margin_of(self.engine, ids, self.resolved(params), tokens, prompt_length)

    def _add(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        method: MethodLike | None,
        budget: int | None,
        options: dict[str, Any],
        only_one: bool = False,
    ) -> list[Session]:
        params = self.resolved(checked_params(params, options, "a stream" if only_one else None))
        proposer, chosen = self.drafting(method, budget)
        return self.engine.add(self.encode(prompt), params, proposer, chosen)

    def drafting(self, method: MethodLike | None, budget: int | None) -> tuple[Proposer, int | None]:
        """The proposer of a method, by default the model's, and the budget for `Engine.add`: that of the call, of
        `load` for the model's own method, or of the method's text."""
        wanted = self.method if method is None else method
        chosen = budget_with(method, budget, self.method)
        proposer = self.proposer(wanted)
        if chosen is None and proposer is self._default:  # however it is spelled
            chosen = self._budget
        if chosen is None and proposer.needs.prices:  # before an answer begins, whose time it would count in
            with suppress(InvalidRequest):  # where all slots are taken, the first round does it
                self.engine.time_passes()
        is_open = chosen is None and not proposer.needs.prices
        return proposer, own_budget(wanted) if is_open else chosen


@documented_by(LoadSettings)
def load(
    model: str | PathLike[str],
    method: MethodLike | None = None,
    *,
    drafter: str | PathLike[str] | None = None,
    budget: int | None = None,
    speculative_config: Mapping[str, Any] | None = None,
    profile: bool = LoadSettings.profile,
    dtype: Any = LoadSettings.dtype,
    quantize: str = LoadSettings.quantize,
    kv_cache_dtype: Any = LoadSettings.kv_cache_dtype,
    device: Any = LoadSettings.device,
    max_model_len: int | None = None,
    max_num_seqs: int = LoadSettings.max_num_seqs,
    kv_cache_memory_bytes: int | None = None,
    prompt_slowdown: float = LoadSettings.prompt_slowdown,
    exact: bool = LoadSettings.exact,
    enable_prefix_caching: bool = LoadSettings.enable_prefix_caching,
    progress: bool | None = None,
) -> Model:
    """Load a model for fast, lossless generation. The method may also be `outpace.method("recycle", budget=8)` or a
    proposer of your own; dtype and device may be torch's.

    Raises:
        ModelError: the model cannot be found or read.
        UnsupportedModel: its architecture cannot be decoded losslessly.
        InvalidRequest: a bad option.
    """
    method, named = checked_drafting(method, drafter, budget, speculative_config)
    words = {"dtype": dtype, "quantize": quantize, "kv_cache_dtype": kv_cache_dtype}
    sizes = {"max_model_len": max_model_len, "kv_cache_memory_bytes": kv_cache_memory_bytes}
    options = checked_loading(model, device, max_num_seqs, words, sizes)
    about = settings_of(LoadSettings)["prompt_slowdown"]
    slowdown = check_range("prompt_slowdown", prompt_slowdown, 1, 100, about.wanted, about.is_open)
    check_flags(profile=profile, exact=exact, enable_prefix_caching=enable_prefix_caching)
    if progress is not None:
        check_flags(progress=progress)
    with without_collection(), loading(options["name"], progress):
        target, codec = load_target(**options, exact=exact)
        loaded = Model(
            options["name"], target, codec, method, budget, drafter=named, profile=profile, prompt_slowdown=slowdown
        )
    if target.device.type == "cpu":
        warn_of_spinning()
        warn_of_stops()
        warn_without_kernels()
    loaded.engine.shares_prefixes = enable_prefix_caching
    return loaded
