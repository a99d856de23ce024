"""The drafters at hand for one target: the one that was named, or those that ship for it, one per kind."""

from dataclasses import dataclass
from pathlib import Path

from torch import nn

from outpace.drafters.build_context import BuildContext
from outpace.drafters.kinds import kind_of, kinds
from outpace.drafters.load import fingerprint, fingerprint_of, is_net, load_net, locate
from outpace.drafters.method import LANGUAGE_MODEL, said_of
from outpace.drafters.packing import pack_net
from outpace.drafters.ranked_vocabulary import FILE_NAME
from outpace.lib.errors import InvalidRequest
from outpace.models.draft import EARLY_EXIT, DraftModel, load_drafter
from outpace.models.loading.registry import resolve
from outpace.models.loading.shipped import find_drafter, shipped_for, shipped_names, shipped_transitions
from outpace.models.target import TransformersTarget
from outpace.models.tokenizer import TextCodec


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

    Raises:
        ModelError: there is no such drafter, or it cannot be read.
    """

    def __init__(self, name: str, target: TransformersTarget, codec: TextCodec, drafter: str | None) -> None:
        self._target, self._codec, self._drafter = target, codec, drafter
        self._shipped = {kind: Place(str(folder), folder) for kind, folder in shipped_for(name).items()}
        self._transitions = shipped_transitions(name)
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
        return tuple({**self._shipped, LANGUAGE_MODEL: None}) if self.named_kind is None else (self.named_kind,)

    def check_kind(self, wanted: str | None, method: str, other: str) -> None:
        """Refuse a drafter that was named, and is not of the kind that a method drafts with.

        Raises:
            InvalidRequest: it is another.
        """
        named = self.named_kind
        if named is None or wanted is None or wanted not in kinds():
            return
        if wanted != named and wanted not in kinds()[named].serves:
            raise InvalidRequest(
                f"drafter={self._drafter!r} is {said_of(named)}, and method {method!r} needs {said_of(wanted)}: name "
                f"another drafter, or draft with this one by method {other!r}"
            )

    def context_for(self, kind: str | None) -> BuildContext:
        """What a method may ask for."""
        target, place = self._target, self._place(kind)
        return BuildContext(
            target.vocab_size,
            target.device,
            self.language_model,
            target=target,
            net=lambda: self.net(kind),
            vocabulary=_vocabulary_of(place),
            fingerprint=lambda: self.fingerprint(kind),
            transitions=self._transitions,
        )

    def language_model(self) -> DraftModel:
        """The draft model, shared by all methods that use one.

        Raises:
            InvalidRequest: the drafter that was named is a net.
        """
        place = self._place(LANGUAGE_MODEL)
        if self._named is not None and _is_net(self._named):
            raise InvalidRequest(f"drafter={self._drafter!r} is a trained net, and this method needs a language model")
        if self._model is None:
            self._model = load_drafter(None if place is None else place.name, self._target, self._codec)
        return self._model

    def net(self, kind: str | None) -> nn.Module:
        """The trained net, shared by all methods that use it, in the target's dtype and on its device.

        Raises:
            InvalidRequest: no drafter was named, and none of this kind ships for the target.
        """
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
            raise InvalidRequest(
                f"this method needs a trained drafter of kind {kind}: name its checkpoint with drafter= (--drafter), "
                f"or make one with `outpace train {kind}`; {shipped_names()}"
            )
        return self._read(place)

    def _place(self, kind: str | None) -> Place | None:
        return self._named or (None if kind is None else self._shipped.get(kind))

    def _read(self, place: Place) -> tuple[nn.Module, str]:
        if place.name not in self._nets:
            net = load_net(place.name)
            which = fingerprint(net)  # of what the file holds: neither cast nor packed
            net = net.to(self._target.device, self._target.dtype).eval()
            pack_net(net)
            self._nets[place.name] = net, which
        return self._nets[place.name]


def _place_of(drafter: str) -> Place:
    name = find_drafter(drafter)
    if name.partition(":")[0] == EARLY_EXIT:
        return Place(name, None)
    source = resolve(name)
    if source.options:
        return Place(name, None)
    return Place(name, locate(source.path, ("config.json", FILE_NAME), "drafter"))


def _is_net(place: Place) -> bool:
    return place.folder is not None and is_net(str(place.folder))


def _vocabulary_of(place: Place | None) -> Path | None:
    """The ranked vocabulary that a drafter brings."""
    file = None if place is None or place.folder is None else place.folder / FILE_NAME
    return file if file is not None and file.is_file() else None
