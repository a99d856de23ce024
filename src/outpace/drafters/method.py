"""A method: its options and how its proposer is built; and variants, which are methods with other defaults."""

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from pydantic import BaseModel, create_model

from outpace.core.protocols import Proposer
from outpace.drafters.build_context import BuildContext
from outpace.drafters.model_options import ModelOptions
from outpace.drafters.options import Options
from outpace.lib.checks import shown
from outpace.lib.errors import MethodError

LANGUAGE_MODEL = "draft-lm"
"""The kind of drafters that are language models."""
ANY = "any"
"""In place of a kind: the available drafters decide."""


def said_of(kind: str) -> str:
    """A kind of drafters in words."""
    return "a language model" if kind == LANGUAGE_MODEL else f"a drafter of kind {kind}"


@dataclass(frozen=True)
class Method:
    """A row of the catalog: source x shape x retriever.

    Attributes:
        build: makes its proposer from checked options and a `BuildContext`.
        summary: what it drafts, in words.
        options: the class of its options, an `Options` with a description on each field.
        drafter: kind of the drafter it drafts with, such as "domino"; None if it needs none.
        remark: what it needs, in words, in place of the words that follow from `drafter`.
    """

    build: Callable[[Any, BuildContext], Proposer]
    summary: str
    options: type[Options] = Options
    drafter: str | None = None
    remark: str | None = None

    def __post_init__(self) -> None:
        if not callable(self.build):
            raise MethodError(f"Method: build={shown(self.build)}: must be a function of options and a BuildContext")
        if not (isinstance(self.options, type) and issubclass(self.options, Options)):
            raise MethodError(
                f"Method: options={shown(self.options)}: must be a class derived from outpace.methods.Options"
            )
        for kind in self.options.__mro__[1:]:
            if issubclass(kind, Options):
                _check_reserved(self.options, kind)

    @property
    def needs(self) -> str:
        """What it needs besides the target, in words."""
        if self.remark is not None:
            return self.remark
        if self.drafter is None:
            return "nothing"
        return (
            "a draft model, or the target's first layers" if self.drafter == LANGUAGE_MODEL else said_of(self.drafter)
        )


def variant(
    method: Method,
    summary: str,
    only: tuple[str, ...] = (),
    settings_of: Mapping[str, type[BaseModel]] = MappingProxyType({}),
    about: str = "",
    **defaults: Any,
) -> Method:
    """A copy of a method with other defaults.

    Args:
        method: the method to copy, whose options are a `ModelOptions`.
        summary: in words.
        only: the shapes that it takes, if not all of the copied method's.
        settings_of: classes of settings of a shape, where they are not the shape's own.
        about: what a reader of its options should know.
        defaults: of options, by name.
    """
    base, fields = method.options, dict[str, Any]()
    for name, value in defaults.items():
        field = copy(base.model_fields[name])
        field.default = value
        fields[name] = (field.annotation, field)
    options = create_model(f"{base.__name__}Variant", __base__=base, __doc__=about or None, **fields)
    assert issubclass(options, ModelOptions)
    if only:
        options.only = only
    if settings_of:
        options.settings_of = settings_of
    return replace(method, summary=summary, options=options)


def _check_reserved(options: type[Options], base: type[Options]) -> None:
    """Refuse options that redefine a name of a base class: the engine reads the option of the base by that name."""
    for name, field in options.model_fields.items():
        inherited = base.model_fields.get(name)
        is_taken = hasattr(base, name) if inherited is None else field.annotation != inherited.annotation
        if is_taken:
            raise MethodError(
                f"Method: {options.__name__}.{name}: {name} is a reserved name, with a meaning of its own in "
                f"{base.__name__}; choose another name for this option"
            )
