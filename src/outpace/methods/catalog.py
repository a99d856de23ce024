"""The methods by name, and the parsing of texts such as "recycle:budget=8".

A method of our own is one file and one line here; one of another package is one file and one line there, an entry point
of the group "outpace.methods" that names a `Method`.

Presets are what `NAME:as=paper` stands for. Defaults are chosen for speed on the machine at hand; presets are the
papers' constants, for rows that are compared with a paper's. A row names what a method's defaults, or those on a CPU,
have otherwise. What holds for all rows:

- The budget is stated, so that nothing but the tree decides: without one it follows prices in batches.
- `vocabulary=all`: drafters that ship bring a ranked vocabulary, which is FR-Spec's idea.
- `noise=false`: at temperature > 0 the authors' trees are made of the likeliest tokens. At 0 both do the same.
- EAGLE's names of a tree are translated as in `BeamConfig`.
- Warm files are not constants: where a paper warms up, add `warm=FILE` to the preset.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from types import MappingProxyType
from typing import Any
from warnings import warn

from pydantic import BaseModel, ValidationError

from outpace.core.method_checks import check_proposer
from outpace.core.protocols import Proposer
from outpace.drafters.build_context import NOTHING, SHIPPED, BuildContext
from outpace.drafters.kinds import KINDS, kinds
from outpace.drafters.method import ANY, LANGUAGE_MODEL, Method
from outpace.drafters.model_options import ModelOptions
from outpace.drafters.options import Options, checked_budget, checked_value, first_complaint, written
from outpace.drafters.ranked_vocabulary import EVERY_ID
from outpace.drafters.self_draft import methods as self_draft
from outpace.lib.checks import check_text, plain, shown
from outpace.lib.errors import InvalidRequest
from outpace.lib.plugins import plugins
from outpace.methods import retrieval, union
from outpace.methods.retrieval import with_retrieval

PLAIN, OPTION = "plain", "as"
OF_FILES: Mapping[str, tuple[str, ...]] = {
    "corpus": (),
    "ngrams": (),
    "vocabulary": (EVERY_ID,),
    "warm": (SHIPPED, NOTHING),
}
"""Options that name files, and the words that they take instead."""
_LIKELIEST: dict[str, Any] = {"vocabulary": "all", "noise": False}

PRESETS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "paper": {
        # Prompt lookup: a chain of 10 after the last 3, 2 or 1 tokens.
        "lookup": {"budget": 10},
        # Token Recycling (arXiv 2408.08696): a static tree of 80 nodes, 72 of them its authors'; the matrix starts
        # empty, as by default, and learns from prompts too, which their code does not.
        "recycle": {"budget": 80},
        # Lookahead (arXiv 2402.02057): LEVEL 5, WINDOW 7, GUESS 7, which are 55 nodes.
        "lookahead": {"budget": 55},
        # SAM-Decoding (arXiv 2411.10666): a tree of 61 nodes with its root, else a chain of at most 40.
        "samd": {"budget": 60},
        # DynaTree, table 1: K = 8 on WikiText-2; K = 5 on PG-19 is budget=5. Graft states no K for "Sps". Noise is left
        # as it is: under rejection it draws from the drafter's distribution, as classic speculative sampling does.
        "linear": {"budget": 8, "vocabulary": "all"},
        # DynaTree, appendix A and C.1: N_max = 256, D = 8, B = 3, tau = 0.1. N_max counts the tree's root, a draft.
        "fixed": {"budget": 256, "vocabulary": "all"},
        # DynaTree, appendix A: N_max = 256, on WikiText-2; D_max = 9 on PG-19 is depth=9. The paper leaves open B_mid,
        # rho_stop, rho_deep, tau, W, a* and the step sizes (section 3.3 refers to an appendix B without them): these
        # are values after the authors' code, but for the steps. a* = 0.7 is on that code's scale, accepted tokens
        # over a depth; section 3.3's, over all that is drafted, is statistic=committed. The pending token branches, as
        # in section 3.3; Algorithm 1 roots the tree in the draft's first token, which is root_breadth=1.
        "dynatree": {"budget": 256, **_LIKELIEST},
        # SVIP (arXiv 2411.18462): h = 0.3 and at most 40 tokens. Its chains are drawn, hence the default noise.
        "svip": {"budget": 40, "vocabulary": "all"},
        # EAGLE's (60, 7, 10), which is Domino's "EAGLE-3 (60)" (table 1); its "(16)" is budget=15. Graft's C.3 gives
        # EAGLE-3 "depth 8, top-k = 10, and total candidate budget 60", and leaves open whether the root counts: for
        # its rows add budget=60,depth=9, so that EAGLE-3, ECHO and Graft have one tree.
        "eagle3": {"budget": 59, "depth": 8, **_LIKELIEST},
        # FR-Spec (arXiv 2502.14856): EAGLE-2's tree of 60 and 6 drafting steps, which is ambiguous: 6 levels are taken,
        # the first step's included. Domino (table 3) has 32K of 152K ids: the vocabulary is the drafter's, or named.
        "fr-spec": {"budget": 59, "depth": 6, "noise": False},
        # DDD (arXiv 2409.00142): EAGLE-2's beam, at most 11 levels, judged at 5, 7 and 9; its threshold is not public.
        "ddd": {"budget": 59, "depth": 11, **_LIKELIEST},
        # Graft, C.3, as for "eagle3". ECHO's own gates are not public: their depths are Graft's.
        "echo": {"budget": 60, "depth": 9, **_LIKELIEST},
        # Graft, 3.2, A.1 and C.3: 60 candidates, of which 8, 24 or 40 are drafted where checkpoint d0, d1 or d5 ends
        # the draft. "Depth 8" (C.3) and templates of 9 levels (table 7) agree in EAGLE's count only: depth=9. Gates are
        # not stated here, for the paper's are calibrated by a warm-up: warm=FILE. Without one they are table 11's for
        # Qwen3-8B, by default.
        "graft": {"budget": 60, "depth": 9, **_LIKELIEST},
        # DART (arXiv 2601.19278): 60 nodes of its search; name ngrams=FILE for its n-grams.
        "dart": {"budget": 60, **_LIKELIEST},
        # Medusa: a tree of 63 nodes, 51 of them its authors'. Typical acceptance changes the output, and is left out.
        "medusa": {"budget": 63, **_LIKELIEST},
        # TokenSwift (arXiv 2502.18890): [1, 3, 3, 3], which are 40 nodes, and 60 retrieved ones: theirs are the 20 most
        # frequent 4-grams that begin with each first candidate, here matches and transitions after the pending token.
        # It states a contextual penalty, theta = 1.2 and W = 1024, which is the request's: penalty_window.
        "tokenswift": {"budget": 100, **_LIKELIEST},
        # DFlash: the block, of 16 in Domino's and Graft's tables, is the drafter's, so that no budget is stated here.
        "dflash": {**_LIKELIEST},
        # Domino, 4.1: all ids are corrected, and the block [x_t, MASK, ...] drafts B - 1 tokens; the authors' code
        # drafts B with shifted labels. How it drafts at T = 1 the paper leaves open; the runtime of section 4.3 takes
        # the most likely after the first token.
        "domino": {"pool": 0, **_LIKELIEST},
        # Graft, appendix F: a chain cut where it is uncertain, retrieval at its tail, no more rows than the block.
        # It gives no number for the cut: min_prob is the default, which is ours.
        "graft-dflash": {"shape": "cut", "place": "tail", **_LIKELIEST},
    },
}
"""By preset and method. Nothing here is Graft on Domino's or the union's: no paper has them."""


def presets_of(method: str) -> dict[str, Mapping[str, Any]]:
    """The presets of a method, each with its options."""
    return {preset: rows[method] for preset, rows in PRESETS.items() if method in rows}


def preset_options(what: str, method: str, preset: Any) -> Mapping[str, Any]:
    """The options that a preset of a method stands for."""
    known = presets_of(method)
    if not isinstance(preset, str) or preset not in known:
        remedy = (
            f"choose {' or '.join(f'{OPTION}={one}' for one in known)}" if known else f"{method} has none, leave it out"
        )
        raise InvalidRequest(f"method={plain(what)}: {OPTION}={plain(preset)}: unknown preset; {remedy}")
    return known[preset]


BUILT_IN: dict[str, Method] = {
    **retrieval.METHODS,
    **{name: method for kind in KINDS.values() for name, method in kind.methods.items()},
    **self_draft.METHODS,
    **union.METHODS,
}
WITHOUT_DRAFTER = "outpace:draft=none"


@lru_cache(maxsize=1)
def methods() -> Mapping[str, Method]:
    """All methods by name: our own, and those of installed packages and of their drafter kinds."""
    known = dict(BUILT_IN)
    for kind in kinds().values():
        for name, one in kind.methods.items():
            if known.setdefault(name, one) is not one:
                text = f"drafter kind {kind.name!r}: its method {name!r} is left out: there is one already; rename it"
                warn(text, stacklevel=2)
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
    def takes_budget(self) -> bool:
        """Whether a budget given next to it takes effect: it names none itself, does not ask for prices, and drafts."""
        return self.budget is None and not self.asks_for_prices and self.name != PLAIN

    @property
    def asks_for_prices(self) -> bool:
        """Whether it states that its rounds follow prices."""
        return isinstance(self.options, union.OutpaceOptions) and self.options.priced is True

    @property
    def files(self) -> dict[str, str]:
        """The files that its options name."""
        found = {name: getattr(self.options, name) for name in OF_FILES if name in self.options.model_fields_set}
        return {name: file for name, file in found.items() if file is not None and file not in OF_FILES[name]}

    @property
    def drafter(self) -> str | None:
        """Kind of the drafter it drafts with; None if it needs none, `ANY` where that is left open."""
        return methods()[self.options.drafts_with or self.name].drafter

    @property
    def is_open(self) -> bool:
        """Whether the drafters at hand decide what drafts; see `methods.defaults.with_draft`."""
        return self.drafter == ANY

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


def check_own(proposer: Any) -> None:
    """Refuse an object that is no proposer: InvalidRequest if it proposes nothing, MethodError if it lacks a part."""
    if isinstance(proposer, type) or not callable(getattr(proposer, "propose", None)):
        what = f"method={shown(proposer)} is a {type(proposer).__name__}"
        raise InvalidRequest(f"{what}: give a name, outpace.method(...) or an object with propose()")
    check_proposer(type(proposer).__name__, proposer)


def own_budget(method: MethodLike) -> int | None:
    """The budget that a method names itself, which follows no prices; None where it leaves it open."""
    return (parse_method(method) if isinstance(method, str) else method).budget


def budget_with(method: Any, budget: Any, default: Any = None) -> int | None:
    """The budget that is given together with a method or, where none is named, for the `default`, whose own budget it
    replaces. InvalidRequest if it is not a whole number within bounds, if the method's text cannot be read, or if the
    method names a budget itself, asks for prices or is plain decoding."""
    given, spec = checked_budget(budget), parse_method(method) if isinstance(method, str) else method
    if given is not None and isinstance(spec, MethodSpec) and spec.budget is not None:
        raise InvalidRequest(f"budget={given} and method={str(spec)!r} were both given: leave one of them out")
    if given and isinstance(spec, MethodSpec) and spec.asks_for_prices:
        raise InvalidRequest(
            f"budget={given} and method={str(spec)!r} were both given, but priced=true chooses the number of drafts "
            f"itself: leave the budget out, or set it as a maximum in the method: {spec},budget={given}"
        )
    if given and method is None:
        spec = parse_method(default) if isinstance(default, str) else default
    if given and isinstance(spec, MethodSpec) and spec.name == PLAIN:
        raise InvalidRequest(f"budget={given}: plain decoding drafts nothing; leave it out, or name another method")
    return given


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


def build_proposer(spec: MethodSpec, context: BuildContext) -> Proposer:
    """The proposer of a method, with state of its own."""
    base = methods()[spec.name].build(spec.options, context)
    check_proposer(spec.name, base)
    return with_retrieval(base, spec.options, context)
