"""Grammars and sampling parameters: the options of one request."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Protocol

from outpace.core.settings import check_fields, documented, setting
from outpace.lib.checks import as_bias_pairs, as_id_sequences, as_ids, as_strings, check_text, shown
from outpace.lib.errors import InvalidRequest

if TYPE_CHECKING:
    from torch import Tensor


_KINDS = ("json", "regex", "lark")
_SHOWN = 60  # characters of a text in an error


@dataclass(frozen=True)
class Grammar:
    """What an answer must match as a whole. Made by one of the methods below; equal texts make equal grammars.

    It is compiled for a model's tokenizer when a request is added (llguidance, https://github.com/guidance-ai/llguidance);
    one that cannot be compiled or satisfied is refused then.

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
        """JSON that a schema validates: properties in the schema's order, one space after commas and colons and none
        elsewhere, so that as much as possible is forced. A schema's own `x-guidance` overrides that."""
        text = schema
        if isinstance(text, str):
            try:
                schema = json.loads(text)
            except (ValueError, RecursionError) as error:
                raise InvalidRequest(f"grammar: the JSON schema {_shown(text)} is not JSON: {error}") from error
        if not isinstance(schema, dict | bool):
            raise InvalidRequest(f"grammar: a JSON schema must be an object, found {type(schema).__name__}")
        try:
            text = json.dumps(_as_object(schema), ensure_ascii=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidRequest(f"grammar: the JSON schema cannot be written as JSON: {error}") from error
        return Grammar("json", text)

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
        """One of several texts."""
        is_list = isinstance(options, list | tuple) and len(options) > 0
        if not is_list or not all(isinstance(option, str) and option for option in options):
            raise InvalidRequest(
                f"grammar: choice={shown(options)}: give a list of one or more texts, none of them empty"
            )
        # One terminal: of alternatives in a rule llguidance follows 2,000, and more slowly.
        return Grammar("lark", "start: TEXT\nTEXT: " + " | ".join(json.dumps(one) for one in dict.fromkeys(options)))

    def __str__(self) -> str:
        return f"{self.kind} {_shown(self.text)}"


def _as_object(schema: dict[str, Any] | bool) -> dict[str, Any]:
    """A schema that is true validates everything, one that is false nothing."""
    return schema if isinstance(schema, dict) else {} if schema else {"enum": []}


def _shown(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else text[:_SHOWN] + "...")


class Constraint(Protocol):
    """The grammar of one request, at any node of any path. Each call matches its own ids, so that an exception cannot
    leave it in a wrong state. If it fails, it allows nothing more; other requests continue."""

    error: str | None

    def allows(self, generated: Sequence[int], token: int) -> bool:
        """Whether a token may follow generated ids. Cheaper than `mask`."""

    def mask(self, generated: Sequence[int], vocab_size: int) -> "Tensor | None":
        """[V] bool, on the host, the tokens that may follow generated ids; None after an EOS id, where all may."""


MAX_SEED = 2**63 - 1
MAX_LOGPROBS = 20
LEAST_TEMPERATURE = 1e-8
"""Below it a request is greedy. Logits of float32 that differ at all differ by more than noise could make up for, and
quotients by it would keep no digits for the noise, or leave float32."""
MAX_TEMPERATURE = 1e6
"""Beyond it nothing is left of the logits but rounding."""
MAX_SAMPLES = 4096

# Other names for options of ours.
ALIASES = {"min_tokens": "min_new_tokens"}


@documented
@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are chosen and when it ends."""

    max_new_tokens: int = setting(128, "Maximum number of tokens per answer.", unit="TOKENS", low=0)
    temperature: float = setting(
        0.0,
        "Sampling temperature, by which the logits are divided; 0 is greedy, and so is anything below 1e-8.",
        unit="TEMPERATURE",
        low=0.0,
        high=MAX_TEMPERATURE,
        note=f"below {LEAST_TEMPERATURE:g} is greedy",
    )
    top_k: int = setting(
        0,
        "Keep the k most likely tokens; 0 keeps all. Ties with the k-th stay, as in transformers.",
        unit="TOKENS",
        low=0,
    )
    top_p: float = setting(
        1.0,
        "Keep the smallest set of tokens whose probability reaches this; 1 keeps all.",
        unit="PROBABILITY",
        low=0.0,
        high=1.0,
        is_open=True,
    )
    min_p: float = setting(
        0.0,
        "Drop tokens whose probability is below this fraction of the most likely one's; 0 keeps all.",
        unit="PROBABILITY",
        low=0.0,
        high=1.0,
    )
    seed: int | None = setting(
        None,
        "Key of the sampling noise; by default the engine picks one, which the result reports.",
        unit="SEED",
        low=0,
        high=MAX_SEED,
    )
    n: int = setting(
        1, "Samples per prompt; the noise of each is keyed by its index.", unit="SAMPLES", low=1, high=MAX_SAMPLES
    )
    stop: tuple[str, ...] = setting(
        (),
        "String that ends the answer and is not part of it; the name of a special token stands for that token.",
        unit="TEXT",
    )
    eos_token_ids: tuple[int, ...] | None = setting(None, "Token ids that end the answer; by default the model's own.")
    verification: str = setting(
        "match",
        "match generates the tokens of plain decoding, seed for seed; rejection samples from the same distribution, "
        "and the draft influences which tokens are drawn. Such a request shares nothing learned with other requests, "
        "so that its answer depends on itself, its method and its seed alone.",
        choices=("match", "rejection"),
    )
    repetition_penalty: float = setting(
        1.0,
        "Logits of tokens in prompt or answer are divided by this where positive, multiplied where negative; 1 changes "
        "nothing.",
        unit="PENALTY",
        low=0.0,
        is_open=True,
        note="1 is none",
    )
    penalty_window: int | None = setting(
        None, "How many of the last tokens `repetition_penalty` looks at; by default all.", unit="TOKENS", low=1
    )
    presence_penalty: float = setting(
        0.0, "Subtracted once from the logits of tokens in the answer.", unit="PENALTY", low=-2.0, high=2.0
    )
    frequency_penalty: float = setting(
        0.0,
        "Subtracted from the logits of tokens in the answer once per occurrence.",
        unit="PENALTY",
        low=-2.0,
        high=2.0,
    )
    logit_bias: tuple[tuple[int, float], ...] = setting(
        (), "Added to the logit of a token id, from -100 to 100; in Python a mapping.", unit="ID=VALUE"
    )
    bad_words: tuple[str, ...] = setting(
        (),
        "String that may not be generated, as the tokenizer spells it with and without a space before it; other "
        "spellings remain possible.",
        unit="TEXT",
    )
    bad_words_ids: tuple[tuple[int, ...], ...] = setting(
        (), "Sequences of ids of which the last may not follow the others, in prompt or answer."
    )
    min_new_tokens: int = setting(
        0, "Number of tokens before an EOS may be chosen; stop strings still end the answer.", unit="TOKENS", low=0
    )
    ignore_eos: bool = setting(False, "Continue to the token limit: an EOS is a token like any other.")
    logprobs: int | None = setting(
        None,
        "Report the log-probability of each token under the model, before any option, and those of this many most "
        "likely tokens.",
        unit="TOKENS",
        low=0,
        high=MAX_LOGPROBS,
    )
    trace: bool = setting(
        False, "Report each round's tree, the origin of its tokens and which were accepted (`StepEvent.rounds`)."
    )
    grammar: Grammar | None = setting(
        None,
        "What the answer must match: a token may be chosen only if the grammar allows it, an EOS only where the answer "
        "may end. Penalties and truncation act on what is left.",
    )
    draft_forced: bool = setting(
        True, "Draft what the grammar forces; this changes the speed, never the answer or its distribution."
    )

    def __post_init__(self) -> None:
        normal = {
            "stop": as_strings("stop", self.stop, "stop string"),
            "eos_token_ids": None if self.eos_token_ids is None else as_ids("eos_token_ids", self.eos_token_ids),
            "logit_bias": as_bias_pairs("logit_bias", self.logit_bias),
            "bad_words": as_strings("bad_words", self.bad_words, "bad word"),
            "bad_words_ids": as_id_sequences("bad_words_ids", self.bad_words_ids),
        }
        for name, value in normal.items():
            object.__setattr__(self, name, value)
        check_fields(self)
        if not isinstance(self.grammar, Grammar | None):
            raise InvalidRequest(
                f"grammar={shown(self.grammar)}: must be a Grammar: outpace.Grammar.json_schema({{...}}), "
                ".json_object(), .regex(text), .lark(text) or .choice([...])"
            )
        if self.penalty_window is not None and self.repetition_penalty == 1.0:
            raise InvalidRequest(
                f"penalty_window={shown(self.penalty_window)}: does nothing without repetition_penalty; set that "
                "one too, as in repetition_penalty=1.2, or leave it out"
            )
        if self.grammar is not None and self.ignore_eos:
            raise InvalidRequest("grammar with ignore_eos=True: an answer ends where its grammar does; leave out one")
        if self.min_new_tokens > self.max_new_tokens:
            least, most = shown(self.min_new_tokens), shown(self.max_new_tokens)
            raise InvalidRequest(f"min_new_tokens={least}: must be at most max_new_tokens={most}")

    @property
    def is_greedy(self) -> bool:
        return self.temperature < LEAST_TEMPERATURE

    @property
    def is_rejection(self) -> bool:
        """Whether drafts are accepted by rejection sampling instead of the target's keyed draw."""
        return self.verification == "rejection" and not self.is_greedy

    @property
    def is_tempered(self) -> bool:
        """Whether it is sampled, and nothing but the temperature changes the distribution."""
        return not (self.is_greedy or self.has_processors or self.top_k or self.top_p < 1 or self.min_p)

    @property
    def has_processors(self) -> bool:
        """Whether options other than temperature and truncation change the distribution."""
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
        named = {
            "logit_bias": (token for token, _ in self.logit_bias),
            "bad_words_ids": (token for sequence in self.bad_words_ids for token in sequence),
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
            if name not in known:  # an ignored option is a wrong answer that looks right
                listed = ", ".join(sorted(known))
                raise InvalidRequest(f"{name}={shown(value)}: unknown option, or not supported; options are {listed}")
        return cls(**options)
