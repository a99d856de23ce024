"""What a user may request: grammars and sampling parameters."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Protocol

from outpace.lib.checks import (
    as_bias_pairs,
    as_id_sequences,
    as_ids,
    as_strings,
    check_flags,
    check_int,
    check_range,
    check_text,
    shown,
)
from outpace.lib.errors import InvalidRequest

if TYPE_CHECKING:
    from torch import Tensor


_KINDS = ("json", "regex", "lark")
_SHOWN = 60  # characters of a text in an error


@dataclass(frozen=True)
class Grammar:
    """What an answer must match as a whole. Made by one of the methods below; equal texts make equal grammars.

    It is compiled for a model's tokenizer when a request is added (llguidance, https://github.com/guidance-ai/llguidance),
    and refused there if it cannot be or if nothing satisfies it.

    Attributes:
        kind: "json", "regex" or "lark".
        text: a JSON schema, a regular expression, or a grammar in llguidance's variant of Lark.
    """

    kind: str
    text: str

    def __post_init__(self) -> None:
        if not isinstance(self.kind, str) or self.kind not in _KINDS:
            raise InvalidRequest(f"grammar kind={shown(self.kind)}: choose {', '.join(map(repr, _KINDS))}")
        check_text("grammar", self.text)

    @staticmethod
    def json_schema(schema: dict[str, Any] | bool | str) -> "Grammar":
        """JSON that a schema validates: properties in the schema's order, one space behind commas and colons and none
        elsewhere, so that as much as possible is forced. A schema's own `x-guidance` says otherwise.

        Args:
            schema: as an object or as its JSON text.

        Raises:
            InvalidRequest: it is neither.
        """
        text = schema
        if isinstance(text, str):
            try:
                schema = json.loads(text)
            except (ValueError, RecursionError) as error:
                raise InvalidRequest(f"grammar: the JSON schema {_shown(text)} is not JSON: {error}") from error
        if not isinstance(schema, dict | bool):
            raise InvalidRequest(f"grammar: a JSON schema must be an object, found {type(schema).__name__}")
        try:
            return Grammar("json", json.dumps(_as_object(schema)))
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidRequest(f"grammar: the JSON schema cannot be written as JSON: {error}") from error

    @staticmethod
    def json_object() -> "Grammar":
        """Any JSON object."""
        return Grammar.json_schema({"type": "object"})

    @staticmethod
    def regex(text: str) -> "Grammar":
        """Text that a regular expression matches from beginning to end (Rust's syntax: no look-around, no
        back-references)."""
        return Grammar("regex", text)

    @staticmethod
    def lark(text: str) -> "Grammar":
        """Text of a context-free grammar; its first rule is `start`."""
        return Grammar("lark", text)

    @staticmethod
    def choice(options: Sequence[str]) -> "Grammar":
        """One of several texts.

        Raises:
            InvalidRequest: there are none, or one is no text or empty.
        """
        is_list = isinstance(options, list | tuple) and len(options) > 0
        if not is_list or not all(isinstance(option, str) and option for option in options):
            raise InvalidRequest(
                f"grammar: choice={shown(options)}: give a list of one or more texts, none of them empty"
            )
        return Grammar("lark", "start: " + " | ".join(json.dumps(option) for option in dict.fromkeys(options)))

    def __str__(self) -> str:
        return f"{self.kind} {_shown(self.text)}"


def _as_object(schema: dict[str, Any] | bool) -> dict[str, Any]:
    """A schema that is true validates everything, one that is false nothing."""
    return schema if isinstance(schema, dict) else {} if schema else {"enum": []}


def _shown(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else text[:_SHOWN] + "...")


class Constraint(Protocol):
    """What one request may say: its grammar, at any place of any path. It follows whatever ids it is asked about, so
    that it is right after any exception, and it fails for its request alone: then it allows nothing more.

    Attributes:
        error: why it failed; None if it did not.
    """

    error: str | None

    def allows(self, said: Sequence[int], token: int) -> bool:
        """Whether a token may follow generated ids. Cheaper than `mask`."""

    def mask(self, said: Sequence[int], vocab_size: int) -> "Tensor | None":
        """[V] bool, on the host, the tokens that may follow generated ids; None behind an EOS id, where all may."""


MAX_SEED = 2**63 - 1
MAX_LOGPROBS = 20
LEAST_TEMPERATURE = 1e-8
"""Below it a request is greedy. Logits of float32 that differ at all differ by more than noise could make up for, and
quotients by it would keep no digits for the noise, or leave float32."""
MAX_TEMPERATURE = 1e6
"""Beyond it nothing is left of the logits but rounding."""
MAX_SAMPLES = 4096

# Options of transformers and vLLM that change the output and that this engine does not implement yet.
# They are refused by name: an ignored option is a wrong answer that looks right.
KNOWN_UNSUPPORTED = frozenset(
    {
        "allowed_token_ids",
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
        "guidance_scale",
        "length_penalty",
        "logits_processor",
        "logits_processors",
        "no_repeat_ngram_size",
        "num_beam_groups",
        "num_beams",
        "penalty_alpha",
        "prefix_allowed_tokens_fn",
        "prompt_logprobs",
        "renormalize_logits",
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
# Other names for options of ours.
ALIASES = {"min_tokens": "min_new_tokens"}


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are chosen and when it ends.

    Attributes:
        max_new_tokens: upper limit on generated tokens, at least 0.
        temperature: from 0 to 1e6. 0 is greedy, and so is whatever lies below 1e-8; from there on the logits are
            divided by it.
        top_k: keep the k most likely tokens; 0 keeps all. Ties with the k-th stay, as in transformers.
        top_p: keep the smallest set of tokens whose probability reaches this value; 1 keeps all.
        min_p: drop tokens whose probability is below this fraction of the most likely one's; 0 keeps all.
        seed: key of the request's noise; None lets the engine pick one, which the result reports.
        n: samples per prompt, at most 4096; sample i differs from the others by its index in the noise key.
        stop: strings that end the text; the text stops before the first of them.
        eos_token_ids: an id, or several, that end the request; None means the model's own.
        verification: "match" (same tokens as plain decoding, seed for seed) or "rejection" (same distribution). There
            the tree has a say in what is said. A sampled request that is verified by rejection therefore shares nothing
            with others by which its trees would change, learns for itself from nothing, and starts every turn of a
            conversation afresh: its answer depends on itself, its method and its seed alone.
        repetition_penalty: above 0; logits of tokens in prompt or answer are divided by it where positive and
            multiplied where negative, so that 1 changes nothing and more discourages. As in vLLM and transformers.
        presence_penalty: from -2 to 2, subtracted once from the logits of tokens in the answer (OpenAI, vLLM).
        frequency_penalty: from -2 to 2, subtracted once per occurrence in the answer (OpenAI, vLLM).
        logit_bias: added to the logits; pairs (id, bias from -100 to 100), given as a mapping with integer or
            numeric-string keys.
        bad_words: strings that may not be said, as the tokenizer spells them with and without a space before them;
            other spellings of the same characters remain possible. Only `Model` can serve them: they need a tokenizer.
        bad_words_ids: sequences of ids of which the last may not follow the others, which may lie in the prompt.
        min_new_tokens: the EOS ids cannot be chosen before this many tokens were; stop strings still end the answer.
        ignore_eos: EOS ids do not end the request and are emitted like any other token.
        logprobs: None for none; n from 0 to 20 reports each token's log-probability under the model, before any
            option, and those of the n most likely tokens.
        trace: report every round's tree, who named its tokens and which were accepted (`StepEvent.rounds`).
        grammar: what the answer must match. A token may be chosen only if the grammar allows it after those before it,
            and an EOS id only where the answer may end; bans, penalties and truncation act on what is left.
        draft_forced: whether what the grammar forces is drafted. It changes the speed, never the answer; under
            rejection, never its distribution.
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
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[str, ...] = ()
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    min_new_tokens: int = 0
    ignore_eos: bool = False
    logprobs: int | None = None
    trace: bool = False
    grammar: Grammar | None = None
    draft_forced: bool = True

    def __post_init__(self) -> None:
        self._set(stop=as_strings("stop", self.stop, "stop string"))
        if self.eos_token_ids is not None:
            self._set(eos_token_ids=as_ids("eos_token_ids", self.eos_token_ids))
        wanted = f"a number from 0 to {MAX_TEMPERATURE:g} (below {LEAST_TEMPERATURE:g} is greedy)"
        self._set(
            max_new_tokens=check_int("max_new_tokens", self.max_new_tokens, 0),
            top_k=check_int("top_k", self.top_k, 0),
            n=check_int("n", self.n, 1, MAX_SAMPLES),
            temperature=check_range("temperature", self.temperature, 0.0, MAX_TEMPERATURE, wanted),
            top_p=check_range("top_p", self.top_p, 0.0, 1.0, "a number in (0, 1]", open_low=True),
            min_p=check_range("min_p", self.min_p, 0.0, 1.0, "a number in [0, 1]"),
            seed=None if self.seed is None else check_int("seed", self.seed, 0, MAX_SEED),
        )
        if not isinstance(self.verification, str) or self.verification not in ("match", "rejection"):
            raise InvalidRequest(f"verification={shown(self.verification)}: choose 'match' or 'rejection'")
        self._check_grammar()
        self._check_processors()

    def _set(self, **values: Any) -> None:
        """Fields in their normal forms."""
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def _check_grammar(self) -> None:
        if not isinstance(self.grammar, Grammar | None):
            raise InvalidRequest(
                f"grammar={shown(self.grammar)}: must be a Grammar: outpace.Grammar.json_schema({{...}}), "
                ".json_object(), .regex(text), .lark(text) or .choice([...])"
            )
        if self.grammar is not None and self.ignore_eos:
            raise InvalidRequest("grammar with ignore_eos=True: an answer ends where its grammar does; leave out one")
        check_flags(draft_forced=self.draft_forced)

    def _check_processors(self) -> None:
        wanted = "a finite number > 0 (1 is none)"
        self._set(
            logit_bias=as_bias_pairs("logit_bias", self.logit_bias),
            bad_words=as_strings("bad_words", self.bad_words, "bad word"),
            bad_words_ids=as_id_sequences("bad_words_ids", self.bad_words_ids),
            repetition_penalty=check_range(
                "repetition_penalty", self.repetition_penalty, 0.0, float("inf"), wanted, open_low=True
            ),
            presence_penalty=check_range("presence_penalty", self.presence_penalty, -2.0, 2.0, "a number in [-2, 2]"),
            frequency_penalty=check_range(
                "frequency_penalty", self.frequency_penalty, -2.0, 2.0, "a number in [-2, 2]"
            ),
            min_new_tokens=check_int("min_new_tokens", self.min_new_tokens, 0),
            logprobs=None if self.logprobs is None else check_int("logprobs", self.logprobs, 0, MAX_LOGPROBS),
        )
        if self.min_new_tokens > self.max_new_tokens:
            least, most = shown(self.min_new_tokens), shown(self.max_new_tokens)
            raise InvalidRequest(f"min_new_tokens={least}: must be at most max_new_tokens={most}")
        check_flags(ignore_eos=self.ignore_eos, trace=self.trace)

    @property
    def is_greedy(self) -> bool:
        return self.temperature < LEAST_TEMPERATURE

    @property
    def is_rejection(self) -> bool:
        """Whether chance of its own, not the target's keyed draw, accepts a draft: rejection at temperature > 0."""
        return self.verification == "rejection" and not self.is_greedy

    @property
    def is_tempered(self) -> bool:
        """Whether it is sampled, and nothing but the temperature changes the distribution."""
        return not (self.is_greedy or self.has_processors or self.top_k or self.top_p < 1 or self.min_p)

    @property
    def has_processors(self) -> bool:
        """Whether options other than temperature and truncation change the distribution, most of them along the
        history."""
        return bool(
            self.repetition_penalty != 1.0
            or self.presence_penalty
            or self.frequency_penalty
            or self.logit_bias
            or self.bad_words
            or self.bad_words_ids
            or self.min_new_tokens
        )

    def check_vocabulary(self, vocab_size: int) -> None:
        """Refuse token ids that a model does not have.

        Raises:
            InvalidRequest: naming the option and the id.
        """
        banned = (token for sequence in self.bad_words_ids for token in sequence)
        named = {
            "logit_bias": (token for token, _ in self.logit_bias),
            "bad_words_ids": banned,
            "eos_token_ids": self.eos_token_ids or (),
        }
        for name, tokens in named.items():
            outside = next((token for token in tokens if token >= vocab_size), None)
            if outside is not None:
                raise InvalidRequest(f"{name}: token id {shown(outside)} is outside the vocabulary of {vocab_size}")

    @classmethod
    def from_options(cls, **options: Any) -> "SamplingParams":
        """Build from keyword options, refusing by name what is not supported.

        Raises:
            InvalidRequest: an option is unknown, not supported, or out of range.
        """
        known = {f.name for f in fields(cls)}
        for alias, name in ALIASES.items():
            if alias in options and name in options:
                raise InvalidRequest(f"{alias}={shown(options[alias])}: another name of {name}; give one of them")
        options = {ALIASES.get(name, name): value for name, value in options.items()}
        for name, value in options.items():
            if name in KNOWN_UNSUPPORTED:
                raise InvalidRequest(f"{name}={shown(value)}: not supported by this version; leave it out")
            if name not in known:
                listed = ", ".join(sorted(known))
                raise InvalidRequest(f"{name}={shown(value)}: unknown option; known options are {listed}")
        return cls(**options)
