"""The front door: load a model, generate, stream. The composition root of the library."""

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any, overload

from outpace.arguments import (
    Batch,
    Prompt,
    as_batch,
    checked_drafting,
    checked_loading,
    checked_params,
    encoded,
    resolved,
)
from outpace.budget.costs import PassCosts
from outpace.chat import Chat
from outpace.core.events import Generation
from outpace.core.params import SamplingParams
from outpace.core.protocols import Proposer, check_proposer
from outpace.core.settings import LoadSettings, documented_by
from outpace.drafters.options import checked_budget
from outpace.engine.engine import Engine
from outpace.engine.margin import Margin, margin_of
from outpace.engine.session import Session
from outpace.engine.stream import TokenStream
from outpace.kernels.build import warn_without_kernels
from outpace.lib.checks import check_flags, shown
from outpace.lib.errors import InvalidRequest
from outpace.lib.stages import loading, stage
from outpace.lib.threads import warn_of_spinning
from outpace.methods.catalog import MethodLike, MethodSpec, name_of, own_budget, parse_method
from outpace.methods.profile import choose
from outpace.methods.proposer_store import ProposerStore
from outpace.models.costs_file import costs_file
from outpace.models.exactness import probe
from outpace.models.loading.load import load_target
from outpace.models.target import TransformersTarget
from outpace.models.tokenizer import TextCodec, grammar_tokenizer


class Model:
    """A loaded model with a default method. Made by `outpace.load`.

    Attributes:
        target: the model on its slots.
        codec: its tokenizer.
        engine: the engine that all calls share.
        method, method_name: the default method, and what it is called.
        method_from: "named", "the default", or "from the profile of" a day and its file, which `outpace tune` wrote.
        drafter: name of the drafter that was given for all methods, if one was.
        drafters: what the methods draft with.
        exactness: whether tokens keep their bits in any company on this machine, which was probed at load.
    """

    def __init__(
        self,
        name: str,
        target: TransformersTarget,
        codec: TextCodec,
        method: MethodLike | None,
        budget: int | None = None,
        drafter: str | None = None,
        profile: bool = False,
    ) -> None:
        self.name, self.target, self.codec = name, target, codec
        self.exactness = probe(target)
        with stage("preparing the method"):
            choice = choose(name, target, codec, method, drafter, profile)
        self.method, self.drafters, self.drafter = choice.method, choice.drafters, choice.drafter
        self.method_name, self.method_from = name_of(self.method), choice.origin
        self.engine = Engine(
            target,
            codec.new_detokenizer,
            costs=PassCosts(costs_file(target)),
            grammar_tokenizer=lambda: grammar_tokenizer(codec, target.vocab_size, target.eos_token_ids),
        )
        self._budget = checked_budget(budget)
        self._proposers = ProposerStore(self.drafters)
        with stage("preparing the method"):
            self._default = self.proposer(self.method)  # which is always kept

    def proposer(self, method: MethodLike) -> Proposer:
        """The proposer of a method such as "recycle:budget=8", with what it has learned; one made by hand as it is.

        It is the same object as long as anybody has it, as open requests do. The default's is always kept, and the last
        16 that were asked for are until `reset`.

        Raises:
            InvalidRequest: an unknown method or option, a bad value, or an object that proposes nothing.
            MethodError: a proposer that lacks a method or an attribute.
        """
        if not isinstance(method, str | MethodSpec):
            if isinstance(method, type) or not callable(getattr(method, "propose", None)):
                what = f"method={shown(method)} is a {type(method).__name__}"
                raise InvalidRequest(f"{what}: give a name, outpace.method(...) or an object with propose()")
            check_proposer(type(method).__name__, method)
            return method
        return self._proposers.get(parse_method(method) if isinstance(method, str) else method)

    def reset(self) -> None:
        """Make every method forget what it learned from earlier requests, and the engine their prompts; methods that no
        open request has, other than the default, are given up with their memory."""

        def forget(slot: int | None) -> None:
            self._default.reset()  # one made by hand, too
            self._proposers.reset()

        self.engine.forget_prefixes()  # first, for what is left in slots holds proposers
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
        is_single, batch = as_batch(prompts)
        sessions: list[list[Session]] = []
        try:
            for prompt in batch:
                sessions.append(self._add(prompt, params, method, budget, options))
            own = [session for group in sessions for session in group]
            self.engine.run_until(lambda: all(session.has_ended for session in own), own)
        except BaseException:
            open_ones = [session for group in sessions for session in group]
            for session in open_ones:  # all of them before the first step, which a second Ctrl-C may cut short
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
        except BaseException:  # whose traceback may hold it for long
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
        """A conversation whose KV is kept from turn to turn.

        Args:
            system: a system message that opens it.
            params, method, budget, **options: of every answer, as for `generate`.

        Raises:
            InvalidRequest: a bad option, or a model without a chat template.
        """
        params = resolved(checked_params(params, options, one_sample_only="a conversation"), self.codec)
        return Chat(self.engine, self.codec, params, *self._drafting(method, budget), system=system)

    def encode(self, prompt: Prompt) -> list[int]:
        """Ids of text, chat messages or ids; InvalidRequest where it is none of these, or the template refuses it."""
        return encoded(prompt, self.codec)

    def margin(self, ids: Sequence[int], params: SamplingParams, tokens: tuple[int, int], prompt_length: int) -> Margin:
        """How close the choice between two tokens after `ids` was, in this model's precision.

        The first `prompt_length` ids are the prompt.
        """
        return margin_of(self.engine, ids, resolved(params, self.codec), tokens, prompt_length)

    def _add(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        method: MethodLike | None,
        budget: int | None,
        options: dict[str, Any],
        only_one: bool = False,
    ) -> list[Session]:
        params = resolved(checked_params(params, options, "a stream" if only_one else None), self.codec)
        proposer, chosen = self._drafting(method, budget)
        return self.engine.add(self.encode(prompt), params, proposer, chosen)

    def _drafting(self, method: MethodLike | None, budget: int | None) -> tuple[Proposer, int | None]:
        wanted, chosen = self.method if method is None else method, checked_budget(budget)
        proposer = self.proposer(wanted)
        if chosen is None and method in (None, self.method):
            chosen = self._budget
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
    device: Any = LoadSettings.device,
    max_model_len: int | None = None,
    max_num_seqs: int = LoadSettings.max_num_seqs,
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
    options = checked_loading(model, max_model_len, max_num_seqs, dtype, device, quantize)
    check_flags(profile=profile, exact=exact, enable_prefix_caching=enable_prefix_caching)
    if progress is not None:
        check_flags(progress=progress)
    with loading(options["name"], progress):
        target, codec = load_target(**options, exact=exact)
        loaded = Model(options["name"], target, codec, method, budget, named, profile=profile)
    if target.device.type == "cpu":
        warn_of_spinning()
        warn_without_kernels()
    loaded.engine.shares_prefixes = enable_prefix_caching
    return loaded
