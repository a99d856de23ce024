"""The methods by name, and the parsing of texts such as "recycle:budget=8".

A method of our own is one file and one line here; one of another package is one file and one line there, an entry point
of the group "outpace.methods" that names a `Method`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from pydantic import BaseModel, ValidationError

from outpace.core.protocols import Proposer, check_proposer
from outpace.drafters.build_context import BuildContext
from outpace.drafters.kinds import KINDS, kinds
from outpace.drafters.method import LANGUAGE_MODEL, Method
from outpace.drafters.model_options import ModelOptions
from outpace.drafters.options import Options, checked_value, first_complaint, written
from outpace.lib.checks import check_text, shown
from outpace.lib.errors import InvalidRequest
from outpace.lib.plugins import plugins
from outpace.methods import retrieval, union
from outpace.methods.drafter_store import DrafterStore
from outpace.methods.presets import OPTION, preset_options
from outpace.methods.retrieval import with_retrieval
from outpace.models.loading.shipped import shipped_for

BUILT_IN: dict[str, Method] = {
    **retrieval.METHODS,
    **{name: method for kind in KINDS.values() for name, method in kind.methods.items()},
    **union.METHODS,
}
BEST = {"smollm2-135m": "outpace"}
"""What targets with shipped drafters draft with by default: the fastest on prompts kept for it (docs/log.md)."""
WITHOUT_DRAFTER = "outpace:draft=none"


@lru_cache(maxsize=1)
def methods() -> Mapping[str, Method]:
    """All methods by name: our own, and those of installed packages and of their drafter kinds."""
    others = {name: one for kind in kinds().values() for name, one in kind.methods.items() if name not in BUILT_IN}
    known = BUILT_IN | others
    return MappingProxyType(known | plugins("outpace.methods", Method, tuple(known)))


@dataclass(frozen=True)
class MethodSpec:
    """A method with its options, as in "recycle:budget=8,shape=chain": a name of `methods` and its checked options."""

    name: str
    options: Options

    def __str__(self) -> str:
        given = {name: value for name, value in self.options if name in self.options.model_fields_set}
        options = ",".join(f"{name}={None if value is None else written(value)}" for name, value in given.items())
        return f"{self.name}:{options}" if options else self.name

    @property
    def budget(self) -> int | None:
        return self.options.budget

    @property
    def drafter(self) -> str | None:
        """Kind of the drafter it drafts with; None if it needs none."""
        return methods()[self.options.drafts_with or self.name].drafter

    @property
    def uses_draft_model(self) -> bool:
        return self.drafter == LANGUAGE_MODEL


def method_named(name: str) -> Method:
    """A method."""
    if not isinstance(name, str):
        raise InvalidRequest(f"method={shown(name)}: is a {type(name).__name__}; give a name, as in 'recycle:budget=8'")
    if name not in methods():
        near = get_close_matches(name, methods(), n=1)
        hint = f"did you mean {near[0]!r}? There are" if near else "choose one of"
        raise InvalidRequest(f"method={shown(name)}: unknown; {hint} {', '.join(methods())}")
    return methods()[name]


MethodLike = str | MethodSpec | Proposer
"""How a method is named: by a text, by `method(...)`, or by a proposer made by hand."""


def own_budget(method: MethodLike) -> int | None:
    """The budget that a method names itself, which follows no prices; None where it leaves it open."""
    return (parse_method(method) if isinstance(method, str) else method).budget


def parse_method(text: str) -> MethodSpec:
    """Read "name" or "name:option=value,option=value".

    Raises:
        InvalidRequest: unknown method or option, or a bad value.
    """
    check_text("method", text)
    name, _, rest = text.strip().partition(":")
    kind = method_named(name).options
    items = [item.partition("=") for item in filter(None, rest.split(","))]
    shape = next((value for option, _, value in items if option == "shape"), None)
    known = _known(kind, shape)
    given: dict[str, str] = {}
    for option, equals, value in items:
        item = option + equals + value
        if not equals or option not in (*known, OPTION):
            near = [f"did you mean {one}? " for one in get_close_matches(option, known, n=1)]
            takes = f"takes {', '.join(known)} (name:option=value)"
            raise InvalidRequest(
                f"method={shown(text)}: {''.join(near)}{name} {takes}, not {shown(item)}{_shapes_with(kind, option)}"
            )
        if option in given:
            raise InvalidRequest(f"method={shown(text)}: {option} is given twice")
        given[option] = value
    return _checked(text, name, given)


def method(name: str, /, **options: Any) -> MethodSpec:
    """A method with typed options, as in `method("domino", shape="beam", budget=15)`: as a text,
    but typed, so that an editor can complete it."""
    kind, options = method_named(name).options, {key: checked_value(key, value) for key, value in options.items()}
    known = _known(kind, options.get("shape"))
    for option in options:
        if option not in (*known, OPTION):
            raise InvalidRequest(f"method={name!r}: takes {', '.join(known)}, not {option}={shown(options[option])}")
    return _checked(name, name, options)


def _known(kind: type[Options], shape: Any) -> list[str]:
    """The options that a method takes with a shape."""
    kinds = option_kinds(kind, shape if isinstance(shape, str) else None)
    return [option for part in kinds for option in part.model_fields]


def _checked(what: str, name: str, given: Mapping[str, Any]) -> MethodSpec:
    """A method with its options and the preset that they name; options override the preset. Settings of the preset's
    shape are left out for another shape that does not have them."""
    kind, own = methods()[name].options, {option: value for option, value in given.items() if option != OPTION}
    preset = preset_options(what, name, given[OPTION]) if OPTION in given else {}
    known = _known(kind, own.get("shape"))
    try:
        return MethodSpec(name, kind.model_validate({key: preset[key] for key in preset if key in known} | own))
    except ValidationError as error:
        raise InvalidRequest(f"method={shown(what)}: {first_complaint(error)}") from error


def _shapes_with(kind: type[Options], option: str) -> str:
    """Which shapes of a method have a setting of that name, in words; nothing if none does."""
    names = kind.shape_names() if issubclass(kind, ModelOptions) else ()
    having = [name for name in names if any(option in part.model_fields for part in option_kinds(kind, name)[1:])]
    return f"; {option} is a setting of shape={', '.join(having)}" if having else ""


def name_of(method: MethodLike) -> str:
    """A method in words: as a text names it, or a proposer's class."""
    return str(method) if isinstance(method, str | MethodSpec) else type(method).__name__


def option_kinds(kind: type[Options], shape: str | None = None) -> list[type[BaseModel]]:
    """What holds the options that a method takes with a shape: its own, and the shape's if it has any."""
    kinds: list[type[BaseModel]] = [kind]
    if issubclass(kind, ModelOptions):
        settings = kind.settings_kind(shape or kind.model_fields["shape"].default)
        kinds += [] if settings is None else [settings]
    return kinds


def default_method(target: str, drafters: DrafterStore, passes_are_cheap: bool = False) -> str:
    """The method to take where none is named: the best for the drafter net that was named, or for those that ship with
    the target, else what needs none. Chosen by speed on a CPU (docs/log.md).

    Args:
        passes_are_cheap: the target's passes are one call to compiled kernels; a small model's drafter then costs more
            than it gains (docs/results.md).
    """
    if drafters.named_kind is not None:
        return kinds()[drafters.named_kind].default_method
    best = None if passes_are_cheap else BEST.get(target)
    return WITHOUT_DRAFTER if best is None or parse_method(best).drafter not in shipped_for(target) else best


def build_proposer(spec: MethodSpec, context: BuildContext) -> Proposer:
    """The proposer of a method, with state of its own.

    Raises:
        MethodError: what the method built is no proposer.
    """
    base = methods()[spec.name].build(spec.options, context)
    check_proposer(spec.name, base)
    return with_retrieval(base, spec.options, context)


def stored_proposer(spec: MethodSpec, drafters: DrafterStore) -> Proposer:
    """The proposer of a method with the drafter of its kind.

    Raises:
        InvalidRequest: there is none, or the one that was named is of another kind.
    """
    if drafters.named_kind is not None:
        drafters.check_kind(spec.drafter, str(spec), kinds()[drafters.named_kind].default_method)
    return build_proposer(spec, drafters.context_for(spec.drafter))
