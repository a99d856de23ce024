"""The front door: load a model, generate, stream. The composition root of the library."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from threading import Lock
from typing import Any, cast

from outpace.chat import Chat
from outpace.core.errors import InvalidRequest
from outpace.core.events import Generation
from outpace.core.params import SamplingParams
from outpace.core.protocols import Proposer
from outpace.core.threads import tell_of_spinning
from outpace.drafters.catalog import default_method, parse_method, shelved_proposer
from outpace.drafters.common_options import MAX_BUDGET
from outpace.drafters.shelf import Shelf
from outpace.drafters.speculative_config import from_speculative_config
from outpace.engine.engine import Engine
from outpace.engine.margin import Margin, decision_margin
from outpace.engine.session import Session
from outpace.engine.stream import TokenStream
from outpace.models.exactness import probe
from outpace.models.load import load_target
from outpace.models.target import TransformersTarget
from outpace.models.text import ChatMessage, TextCodec

Prompt = str | Sequence[int] | Sequence[ChatMessage]


class Model:
    """A loaded model with a default method. Made by `outpace.load`.

    Attributes:
        target: the model on its slots.
        codec: its tokenizer.
        engine: the engine that all calls share.
        method: the default method.
        drafter: name of the drafter that was given for all methods, if one was.
        drafters: what the methods draft with.
        exactness: whether tokens keep their bits in any company on this machine, which was probed at load.
    """

    def __init__(
        self,
        name: str,
        target: TransformersTarget,
        codec: TextCodec,
        method: str | None,
        budget: int | None = None,
        drafter: str | None = None,
    ) -> None:
        self.name, self.target, self.codec, self.drafter = name, target, codec, drafter
        self.drafters = Shelf(name, target, codec, drafter)
        self.method = default_method(name, self.drafters) if method is None else method
        self.engine = Engine(target, codec.new_detokenizer)
        self.exactness = probe(target)
        self._budget = _checked_budget(budget)
        self._proposers: dict[str, Proposer] = {}
        self._building = Lock()
        self.proposer(self.method)

    def proposer(self, method: str) -> Proposer:
        """The proposer of a method such as "recycle:budget=8", built once and kept, with what it has learned."""
        with self._building:  # by one thread, or a draft model would be read twice
            if method not in self._proposers:
                self._proposers[method] = shelved_proposer(parse_method(method), self.drafters)
        return self._proposers[method]

    def reset(self) -> None:
        """Make every method forget what it learned from earlier requests."""

        def forget(slot: int | None) -> None:
            for proposer in self._proposers.values():
                proposer.reset()

        self.engine.between_steps(forget)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | None = None,
        *,
        method: str | None = None,
        budget: int | None = None,
        **options: Any,
    ) -> Any:
        """Generate answers; several prompts share the engine as one batch.

        Args:
            prompts: text, token ids or chat messages, or a list of any of these. Text is taken as it is; chat
                messages go through the model's chat template.
            params: sampling parameters; or give them as keyword options.
            method: the method for these prompts, by default the model's.
            budget: drafted nodes per round, by default the method's.
            **options: fields of `SamplingParams`; `min_tokens` is another name of `min_new_tokens`.

        Returns:
            A `Generation` for one prompt, a list of them for a list of prompts.

        Raises:
            InvalidRequest: a prompt or option that cannot be served, or options that leave no token to choose.
            NonFiniteLogits: the target produced NaN or infinity.
        """
        is_single, batch = _as_batch(prompts)
        sessions: list[list[Session]] = []
        try:
            for prompt in batch:
                sessions.append(self._add(prompt, params, method, budget, options))
            own = [session for group in sessions for session in group]
            self.engine.run_until(lambda: all(session.has_ended for session in own), own)
        except BaseException:
            for group in sessions:
                for session in group:
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
        method: str | None = None,
        budget: int | None = None,
        **options: Any,
    ) -> TokenStream:
        """Generate one answer piece by piece; closing the stream early cancels the request.

        Arguments are those of `generate`, for one prompt and n = 1.
        """
        (session,) = self._add(prompt, params, method, budget, options, only_one=True)
        return TokenStream(self.engine, session)

    def chat(
        self,
        system: str | None = None,
        params: SamplingParams | None = None,
        *,
        method: str | None = None,
        budget: int | None = None,
        **options: Any,
    ) -> Chat:
        """A conversation whose KV is kept from turn to turn.

        Args:
            system: a system message that opens it.
            params: sampling parameters of every answer; or give them as keyword options, as for `generate`.
            method: the method, by default the model's.
            budget: drafted nodes per round, by default the method's.
            **options: fields of `SamplingParams`.

        Raises:
            InvalidRequest: a bad option, or a model without a chat template.
        """
        params = self._resolved(_checked_params(params, options, one_sample_only="a conversation"))
        return Chat(self.engine, self.codec, params, *self._drafting(method, budget), system=system)

    def encode(self, prompt: Prompt) -> list[int]:
        """Ids of text, chat messages or ids.

        Raises:
            InvalidRequest: it is none of these, or the template refuses it.
        """
        if isinstance(prompt, str):
            return self.codec.encode(prompt)
        if prompt and all(isinstance(item, int) and not isinstance(item, bool) for item in prompt):
            return list(cast(Sequence[int], prompt))
        if prompt and all(isinstance(item, dict) for item in prompt):
            return self.codec.encode_chat(cast(Sequence[ChatMessage], prompt))
        if not prompt:
            return []
        raise InvalidRequest(f"prompt of type {type(prompt[0]).__name__}: give text, token ids or chat messages")

    def margin(self, ids: Sequence[int], params: SamplingParams, tokens: tuple[int, int], prompt_length: int) -> Margin:
        """How close the choice between two tokens after `ids` was, in this model's precision.

        The first `prompt_length` ids are the prompt.
        """
        params = self._resolved(params)

        def compare(slot: int | None) -> Margin:
            if slot is None:
                raise InvalidRequest("all slots are taken: wait for a request to end or load with more max_num_seqs")
            return decision_margin(self.target, ids, params, params.seed or 0, 0, tokens, prompt_length, slot)

        return self.engine.between_steps(compare)

    def _resolved(self, params: SamplingParams) -> SamplingParams:
        """The parameters with bad words as ids."""
        if not params.bad_words:
            return params
        banned = [ids for word in params.bad_words for ids in self.codec.encode_word(word)]
        return replace(params, bad_words=(), bad_words_ids=(*params.bad_words_ids, *banned))

    def _add(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        method: str | None,
        budget: int | None,
        options: dict[str, Any],
        only_one: bool = False,
    ) -> list[Session]:
        params = self._resolved(_checked_params(params, options, "a stream" if only_one else None))
        proposer, chosen = self._drafting(method, budget)
        return self.engine.add(self.encode(prompt), params, proposer, chosen)

    def _drafting(self, method: str | None, budget: int | None) -> tuple[Proposer, int | None]:
        proposer = self.proposer(method or self.method)
        chosen = _checked_budget(budget)
        if chosen is None and (method or self.method) == self.method:
            chosen = self._budget
        return proposer, chosen


def load(
    model: str,
    method: str | None = None,
    *,
    drafter: str | None = None,
    budget: int | None = None,
    speculative_config: Mapping[str, Any] | None = None,
    dtype: str = "auto",
    device: str = "auto",
    max_model_len: int | None = None,
    max_num_seqs: int = 8,
) -> Model:
    """Load a model for fast, lossless generation.

    Args:
        model: a local folder or GGUF file, the name of a pulled model (`outpace models pull smollm2-135m`), or a
            hub id, looked for in this order.
        method: how to draft: a name of `drafters/catalog.py`, with options as in "recycle:budget=8"; None is the best
            for the drafter that is named, or ships for this model (`outpace models list`), or for none.
        drafter: folder or hub id of a trained drafter, or the name of one that ships, as in "smollm2-135m/domino"; for
            "linear", "fixed", "dynatree" and "svip" a draft model, named as `model` is, with the same tokenizer, or
            "early-exit:LAYERS" for the target's own first layers. None takes what ships for this model and method, and
            the first layers where that is no draft model.
        budget: drafted nodes per round; None takes the method's default for the device.
        speculative_config: vLLM's, instead of method, drafter and budget.
        dtype: "auto" (bfloat16 where the hardware computes in it), "float32", "bfloat16" or "float16".
        device: "auto", "cpu" or "cuda".
        max_model_len: tokens per request, prompt and answer; None takes the model's limit up to 4096.
        max_num_seqs: requests decoded at a time; more wait their turn.

    Raises:
        ModelError: the model cannot be found or read.
        UnsupportedModel: its architecture cannot be decoded losslessly.
        InvalidRequest: a bad option.
    """
    if speculative_config is not None:
        method, drafter = from_speculative_config(speculative_config, method=method, drafter=drafter, budget=budget)
    if method is not None:
        parse_method(method)
    _checked_budget(budget)
    target, codec = load_target(model, dtype, device, max_model_len, max_num_seqs)
    if target.device.type == "cpu":
        tell_of_spinning()
    return Model(model, target, codec, method, budget, drafter)


def _checked_params(
    params: SamplingParams | None, options: dict[str, Any], one_sample_only: str | None = None
) -> SamplingParams:
    if params is not None and options:
        raise InvalidRequest(f"params and {', '.join(options)} were both given: put everything into one of them")
    params = params or SamplingParams.from_options(**options)
    if one_sample_only and params.n != 1:
        raise InvalidRequest(f"n={params.n}: {one_sample_only} carries one sample; use generate for several")
    return params


def _checked_budget(budget: int | None) -> int | None:
    if budget is not None and not 0 <= budget <= MAX_BUDGET:
        raise InvalidRequest(f"budget={budget}: must be from 0 to {MAX_BUDGET} drafted nodes")
    return budget


def _as_batch(prompts: Prompt | Sequence[Prompt]) -> tuple[bool, list[Prompt]]:
    if isinstance(prompts, str):
        return True, [prompts]
    if hasattr(prompts, "tolist"):  # ids as a tensor or an array, one prompt or a rectangle of them
        prompts = prompts.tolist()
    items = list(prompts)
    if not items or isinstance(items[0], int | dict):
        return True, [cast(Prompt, items)]
    return False, cast(list[Prompt], items)
