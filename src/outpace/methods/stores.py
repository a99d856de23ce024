"""The drafters of one target, each loaded once, and the proposers of its methods, each built once."""

import ctypes
import gc
import sys
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Any
from weakref import WeakValueDictionary

from torch import nn

from outpace.core.protocols import Proposer
from outpace.drafters.build_context import BuildContext
from outpace.drafters.kinds import kind_of, kinds
from outpace.drafters.load import fingerprint, fingerprint_of, is_net, load_net, locate
from outpace.drafters.method import LANGUAGE_MODEL, said_of
from outpace.drafters.packing import pack_net
from outpace.drafters.ranked_vocabulary import FILE_NAME
from outpace.lib.errors import InvalidRequest, NoDrafter
from outpace.methods.catalog import MethodLike, MethodSpec, build_proposer, parse_method
from outpace.methods.defaults import default_method, with_draft
from outpace.models.draft import EARLY_EXIT, DraftModel, load_draft_model, warn_if_shorter
from outpace.models.loading.registry import resolve
from outpace.models.loading.shipped import find_drafter, shipped_for, shipped_names
from outpace.models.target import PackedTarget
from outpace.models.tokenizer import TextCodec
from outpace.trees.grafting import GraftedProposer
from outpace.trees.proposer import GrowingProposer, StaticProposer
from outpace.trees.retrieval.samd import SamDecoding
from outpace.trees.retrieval.transition_matrix import MatrixLearner, TransitionMatrix
from outpace.trees.shapes.dynatree import DynaTreeShape
from outpace.trees.union.proposer import UnionProposer


@dataclass(frozen=True)
class Place:
    """Where a drafter is."""

    name: str
    folder: Path | None


class DrafterStore:
    """Drafters of one target, each loaded when first asked for and kept.

    Args:
        drafter: folder, hub id, shipped name or early exit, which then serves every method; None takes what ships for
            a method's kind, and the target's own first layers where no language model does.

    Attributes:
        shipment: what ships for the target.
        has_kernels: whether the target's passes are one call to compiled kernels.

    Raises:
        ModelError: there is no such drafter, or it cannot be read.
    """

    def __init__(self, name: str, target: PackedTarget, codec: TextCodec, drafter: str | None) -> None:
        self._target, self._codec, self._drafter = target, codec, drafter
        self.shipment = shipped_for(name, target.config, codec)
        self.has_kernels = target.compiled is not None
        self._named = None if drafter is None else _place_of(drafter)
        self._model: DraftModel | None = None
        self._nets: dict[str, tuple[nn.Module, str]] = {}
        if self._named is not None:  # a wrong name fails now, not at the first request
            self._read(self._named) if _is_net(self._named) else self.language_model()

    @property
    def named_kind(self) -> str | None:
        """What kind of drafter was named; None if none was. What ships is not used where one was."""
        if self._named is None:
            return None
        return kind_of(self._read(self._named)[0]).name if _is_net(self._named) else LANGUAGE_MODEL

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of drafters at hand: of the one that was named, or of those that ship and the target's own first
        layers."""
        return (
            tuple({**self.shipment.drafters, LANGUAGE_MODEL: None}) if self.named_kind is None else (self.named_kind,)
        )

    def default_method(self) -> str:
        """The method to take where none is named."""
        return default_method(self.named_kind, self.shipment, self.has_kernels)

    def with_draft(self, method: str | MethodSpec) -> MethodSpec:
        """A method with its draft, where it leaves that to the drafters at hand."""
        spec = parse_method(method) if isinstance(method, str) else method
        return with_draft(spec, self.named_kind, self.shipment, self.has_kernels)

    def completed(self, method: MethodLike) -> MethodLike:
        """A method as it was given, unless it leaves its draft to the drafters at hand: then with that draft."""
        if not isinstance(method, str | MethodSpec):
            return method
        spec = parse_method(method) if isinstance(method, str) else method
        if (found := self.with_draft(spec)) is spec:
            return method
        return str(found) if isinstance(method, str) else found

    def check_kind(self, spec: MethodSpec) -> None:
        """Refuse a drafter that was named, and is not of the kind that a method drafts with."""
        named, wanted = self.named_kind, spec.drafter
        if named is None or wanted is None or wanted not in kinds():
            return
        if wanted != named and wanted not in kinds()[named].serves:
            raise NoDrafter(
                f"drafter={self._drafter!r} is {said_of(named)}, and method {str(spec)!r} needs {said_of(wanted)}: "
                f"name another drafter, or use this one with method {kinds()[named].default_method!r}"
            )

    def context_for(self, kind: str | None) -> BuildContext:
        """What a method may ask for."""
        target, place = self._target, self._place(kind)
        return BuildContext(
            target.vocab_size,
            target.device,
            self.language_model,
            target=target,
            net=None if kind is None else lambda: self.net(kind),
            vocabulary=_vocabulary_of(place),
            fingerprint=None if kind is None else lambda: self.fingerprint(kind),
            transitions=self.shipment.transitions,
        )

    def language_model(self) -> DraftModel:
        """The draft model, shared by all methods that use one."""
        place = self._place(LANGUAGE_MODEL)
        if self._named is not None and _is_net(self._named):
            raise InvalidRequest(f"drafter={self._drafter!r} is a trained net, and this method needs a language model")
        if self._model is None:
            self._model = load_draft_model(None if place is None else place.name, self._target, self._codec)
            # Its rows may take as much as the target's. A net has few layers; the rest of the memory is for those.
            self._target.share_memory(self._model)
        return self._model

    def net(self, kind: str | None) -> nn.Module:
        """The trained net, shared by all methods that use it, in the target's dtype and on its device."""
        return self._kept(kind)[0]

    def fingerprint(self, kind: str | None) -> str:
        """Which drafter a kind's methods draft with, whatever file it was read from. Of a language model, the layers,
        and all weights but those of linear layers, in the dtype it drafts in: training moves norms, too."""
        if kind != LANGUAGE_MODEL:
            return self._kept(kind)[1]
        model = self.language_model()
        config = f"{model.config.model_type} of {model.config.num_hidden_layers} layers"
        return fingerprint_of("DraftModel", config, model.plain_tensors())

    def folder(self, kind: str | None) -> Path | None:
        """Of the files of a kind's drafter; None for one without, as early exit."""
        place = self._place(kind)
        return None if place is None else place.folder

    def _kept(self, kind: str | None) -> tuple[nn.Module, str]:
        place = self._place(kind)
        if place is None:
            raise NoDrafter(
                f"this method needs a trained drafter of kind {kind}: name its checkpoint with drafter= (--drafter), "
                f"or make one with `outpace train {kind}`; {self._what_ships()}"
            )
        return self._read(place)

    def _what_ships(self) -> str:
        names = [f"{self.shipment.target}/{kind}" for kind in self.shipment.drafters]
        return f"for this model there are {', '.join(names)}" if names else f"none is for this model; {shipped_names()}"

    def _place(self, kind: str | None) -> Place | None:
        folder = None if kind is None else self.shipment.drafters.get(kind)
        return self._named or (None if folder is None else Place(str(folder), folder))

    def _read(self, place: Place) -> tuple[nn.Module, str]:
        if place.name not in self._nets:
            net: Any = load_net(place.name)
            if (positions := getattr(net.config, "positions", None)) is not None:  # heads alone have none
                warn_if_shorter(place.name, positions, self._target.max_length)
            which = fingerprint(net)  # of what the file holds: neither cast nor packed
            net = net.to(self._target.device, self._target.dtype).eval()
            pack_net(net)
            self._nets[place.name] = net, which
        return self._nets[place.name]


def _place_of(drafter: str) -> Place:
    name = find_drafter(drafter)
    if name.partition(":")[0] == EARLY_EXIT:
        return Place(name, None)
    location = resolve(name)
    if location.gguf is not None:
        return Place(name, None)
    return Place(name, locate(location.path, ("config.json", FILE_NAME), "drafter"))


def _is_net(place: Place) -> bool:
    return place.folder is not None and is_net(str(place.folder))


def _vocabulary_of(place: Place | None) -> Path | None:
    """The ranked vocabulary that a drafter brings."""
    file = None if place is None or place.folder is None else place.folder / FILE_NAME
    return file if file is not None and file.is_file() else None


def stored_proposer(spec: MethodSpec, drafters: DrafterStore) -> Proposer:
    """The proposer of a method that leaves nothing open, with the drafter of its kind."""
    drafters.check_kind(spec)
    return build_proposer(spec, drafters.context_for(spec.drafter))


MOST_KEPT = 16
"""Unused proposers that are kept, the most recently used ones."""


class ProposerStore:
    """Proposers by method, with what they have learned.

    A proposer that is in use, such as by an open request, is always returned for its method. Of the unused ones, the
    most recently used are cached, with the memory of their slots. All share the drafter's nets.
    """

    def __init__(self, drafters: DrafterStore) -> None:
        self.drafters = drafters
        self._alive: WeakValueDictionary[MethodSpec, Proposer] = WeakValueDictionary()
        self._recent: OrderedDict[MethodSpec, Proposer] = OrderedDict()  # the one asked for last is the last
        self._building = Lock()

    def get(self, spec: MethodSpec) -> Proposer:
        """The proposer of a method, built if there is none."""
        spec = self.drafters.with_draft(spec)
        with self._building:  # by one thread, or a draft model would be read twice
            proposer = self._alive.get(spec, self._recent.get(spec))
            if proposer is None:
                proposer = stored_proposer(spec, self.drafters)
            self._recent[spec] = proposer
            with suppress(TypeError):  # a plugin's may have slots, and nothing that could refer to it
                self._alive[spec] = proposer
            self._recent.move_to_end(spec)
            dropped = self._recent.popitem(last=False)[1] if len(self._recent) > MOST_KEPT else None
        if dropped is not None:  # it ends here, not under the lock: what ends with it may ask for a proposer itself
            del dropped
            _return_memory()
        return proposer

    def reset(self) -> None:
        """Drop unused proposers; the others forget what they learned. No step may be running."""
        with self._building:
            dropped, self._recent = self._recent, OrderedDict()
        del dropped  # not under the lock
        with self._building:
            self._reset_alive()
        gc.collect()  # a plugin's proposers may be in reference cycles
        _return_memory()

    def _reset_alive(self) -> None:
        for proposer in list(self._alive.values()):
            proposer.reset()


def _return_memory() -> None:
    """Return freed memory to the system: glibc keeps most of what is freed in pieces of
    megabytes. Proposers are in no reference cycle, so that none of them waits for the garbage collector."""
    if (trim := _trimmer()) is not None:
        trim(0)


@lru_cache(maxsize=1)
def _trimmer() -> Callable[[int], int] | None:
    """glibc's malloc_trim. Looked up once: every `CDLL` defines classes, which are reference cycles."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None


def matrix_of(proposer: Proposer) -> TransitionMatrix | None:
    """The transition matrix that a proposer keeps from request to request; None if it keeps none."""
    reader: Any = None
    if isinstance(proposer, GraftedProposer):
        reader = proposer.retrievers[-1]
    elif isinstance(proposer, UnionProposer) and proposer.reads_matrix:
        reader = proposer.matrix
    elif isinstance(proposer, StaticProposer):
        reader = proposer.source
    return reader.matrix if isinstance(reader, MatrixLearner) and not reader.private else None


def computed_by(proposer: Proposer) -> dict[str, str]:
    """Of each part of a proposer's trained drafters, whether a compiled kernel computes it: "compiled", or
    "Python, because ..."."""
    found: dict[str, str] = dict(getattr(proposer, "computed_by", {}))
    for name in ("source", "base", "other"):  # a shape's source, the draft of Graft and the union, SAM-Decoding's other
        if (part := getattr(proposer, name, None)) is not None:
            found |= computed_by(part)
    return found


def learns(proposer: Proposer, is_sampled: bool) -> bool:
    """Whether what a proposer drafts depends on the requests it had before."""
    if isinstance(proposer, SamDecoding):
        return learns(proposer.other, is_sampled)
    base = proposer.base if isinstance(proposer, GraftedProposer) else proposer
    shape = base.shape if isinstance(base, GrowingProposer) else None
    carries = isinstance(shape, DynaTreeShape) and shape.config.history == "authors"
    rates = is_sampled and isinstance(base, GrowingProposer) and base.acceptance is not None
    weights = isinstance(base, UnionProposer) and not base.matrix.private
    return carries or rates or weights or matrix_of(proposer) is not None
