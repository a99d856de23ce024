"""Settings classes: default, description, unit, bounds and choices of a field are written once, in its class."""

from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, TypeVar, get_args

from outpace.lib.checks import check_flags, check_int, check_range, shown
from outpace.lib.errors import InvalidRequest

Kind = TypeVar("Kind", bound=Any)


@dataclass(frozen=True)
class Setting:
    """What Python's documentation, the command line, the server and the docs read of a field.

    Attributes:
        choices: words that it takes; all of them where `check_fields` checks the class.
        is_open: whether `low` itself is excluded.
        note: added to the error about a number out of bounds.
        flag: of the command line, where it is not made from the field's name.
        variable: the environment variable that the command line reads, if any.
    """

    description: str
    unit: str = ""
    choices: tuple[str, ...] = ()
    low: float | None = None
    high: float | None = None
    is_open: bool = False
    note: str = ""
    flag: str | None = None
    variable: str | None = None

    @property
    def wanted(self) -> str:
        """The numbers that are allowed, in words."""
        if self.high is None:
            text = f"a finite number {'>' if self.is_open else '>='} {self.low:g}"
        else:
            text = f"a number in {'(' if self.is_open else '['}{self.low:g}, {self.high:g}]"
        return f"{text} ({self.note})" if self.note else text


def setting(default: Any, description: str, **details: Any) -> Any:
    """A field of a settings class. `...` as default makes it required; the details are those of `Setting`."""
    metadata = {"setting": Setting(description, **details)}
    return field(default=MISSING if default is ... else default, metadata=metadata)


def settings_of(kind: type) -> dict[str, Setting]:
    """The settings of a class by the names of its fields."""
    return {one.name: one.metadata["setting"] for one in fields(kind)}


def default_of(kind: type, name: str) -> Any:
    """The default of a field; `...` where it is required."""
    found = next(one.default for one in fields(kind) if one.name == name)
    return ... if found is MISSING else found


def documented_by(kind: type, heading: str = "Args") -> Callable[[Kind], Kind]:
    """Append the descriptions of a settings class to a docstring, before its section of exceptions."""

    def decorate(target: Kind) -> Kind:
        lines = [f"        {name}: {one.description}" for name, one in settings_of(kind).items()]
        before, raises, after = (target.__doc__ or "").partition("\n    Raises:")
        target.__doc__ = f"{before.rstrip()}\n\n    {heading}:\n" + "\n".join(lines) + f"\n{raises}{after}"
        return target

    return decorate


def documented(kind: Kind) -> Kind:
    """Append the fields of a settings class to its docstring."""
    return documented_by(kind, "Attributes")(kind)  # type: ignore[no-any-return]


def check_fields(settings: Any) -> None:
    """Check flags, numbers and choices of a settings object, and put numbers into their normal form."""
    for one in fields(settings):
        name, value, about = one.name, getattr(settings, one.name), one.metadata["setting"]
        kinds = [kind for kind in get_args(one.type) or (one.type,) if kind is not type(None)]
        if value is None and one.default is None:
            continue
        if kinds == [bool]:
            check_flags(**{name: value})
        elif about.choices:
            if not isinstance(value, str) or value not in about.choices:
                raise InvalidRequest(f"{name}={shown(value)}: choose {' or '.join(map(repr, about.choices))}")
        elif kinds == [int]:
            object.__setattr__(settings, name, check_int(name, value, about.low, about.high))
        elif kinds == [float]:
            high = float("inf") if about.high is None else about.high
            number = check_range(name, value, about.low, high, about.wanted, open_low=about.is_open)
            object.__setattr__(settings, name, number)


@documented
@dataclass(frozen=True, kw_only=True)
class LoadSettings:
    """How a model is loaded, and how it drafts where a request names no method."""

    model: str = setting(
        ...,
        "A folder, a GGUF file, a pulled model (`outpace models pull smollm2-135m`), a hub id or REPO:QUANT.",
        unit="MODEL",
    )
    method: Any = setting(
        None,
        "A name of `outpace methods`, with options as in recycle:budget=8. By default the method that `outpace tune` "
        "found for this model on this machine, else the best one for the drafter.",
        unit="NAME",
    )
    drafter: str | None = setting(
        None,
        "Folder or hub id of a trained drafter, a shipped one such as smollm2-135m/domino, or, for linear, fixed, "
        "dynatree and svip, a draft model with the same tokenizer, or early-exit:LAYERS for the target's first layers. "
        "By default the drafter that ships for model and method, else the first layers.",
        unit="NAME",
    )
    budget: int | None = setting(
        None,
        "Drafted nodes per round, for a method whose options name none; by default the method's own for the device.",
        unit="NODES",
        low=0,
    )
    speculative_config: Any = setting(None, "vLLM's option, instead of method, drafter and budget.", unit="JSON")
    profile: bool = setting(
        True, "Use the method that `outpace tune` found for this model where no method and no drafter is given."
    )
    dtype: Any = setting(
        "auto",
        "Number format of the weights: float32, bfloat16 or float16; auto is bfloat16 where the hardware or compiled "
        "kernels compute with it, else float32.",
        unit="DTYPE",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    quantize: str = setting(
        "auto",
        "Format of the weights in products, on a CPU: auto keeps a GGUF file's own formats, elsewhere it is none; file "
        "keeps them or refuses to load; none is the dtype; int8 is 8-bit integers; int4 is 4 to 6 bits in the formats "
        "of GGUF files. Every method equals plain decoding of the same weights.",
        unit="auto|file|none|int8|int4",
        choices=("auto", "file", "none", "int8", "int4"),
    )
    kv_cache_dtype: str = setting(
        "auto",
        "Format of stored keys and values: auto is the dtype; on a CPU with compiled kernels also float32, bfloat16 or "
        "int8, 8-bit integers with a scale per position and head. Every method equals plain decoding with the same "
        "format.",
        unit="auto|int8|bfloat16|float32",
        choices=("auto", "int8", "bfloat16", "float32"),
    )
    device: Any = setting(
        "auto",
        "Where to compute: auto, cpu, cuda, or cuda:NUMBER.",
        unit="DEVICE",
        choices=("auto", "cpu", "cuda"),
    )
    max_model_len: int | None = setting(
        None,
        "Tokens per request, prompt and answer together; by default the model's limit, or what memory holds.",
        unit="TOKENS",
        low=1,
    )
    max_num_seqs: int = setting(8, "Requests decoded at a time; more wait in a queue.", unit="REQUESTS", low=1)
    kv_cache_memory_bytes: int | None = setting(
        None,
        "Memory for the keys and values of all requests together, a draft model's included; requests that do not fit "
        "wait. By default 80 % of what is free after loading.",
        unit="BYTES",
        low=1,
    )
    prompt_slowdown: float = setting(
        2.5,
        "Factor by which new prompts, written in the same pass, may lengthen a round of running requests: lower for "
        "steadier streams, higher for earlier first tokens.",
        unit="TIMES",
        low=1,
        high=100,
        is_open=True,
    )
    exact: bool = setting(
        False,
        "On a GPU, compute in fixed shapes and a fixed order, so that results are batch-invariant, at some cost in "
        "speed. CPUs always do.",
    )
    enable_prefix_caching: bool = setting(True, "Compute a common prefix of prompts once for all requests.")
    progress: bool | None = setting(
        None,
        "Show the stages of loading on stderr, and then their times in one line. By default only on a terminal; bars "
        "appear only there.",
    )
