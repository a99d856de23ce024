"""Training that begins with the weights of a drafter that was trained before."""

from typing import Any

import torch
from torch import Tensor, nn

from outpace.drafters.kinds import kind_of
from outpace.drafters.load import load_net, locate
from outpace.drafters.ranked_vocabulary import FILE_NAME, load_vocabulary
from outpace.drafters.training.objective import Objective
from outpace.lib.checkpoint import read_checkpoint
from outpace.lib.errors import InvalidRequest, ModelError
from outpace.models.loading.shipped import find_drafter
from outpace.train.provenance import files_hash

WEIGHTS = ("*.safetensors", "*.bin", "*.pt")
FILES = ("*.json", *WEIGHTS)


def begin_with(objective: Objective, folder: str) -> None:
    """Fill a new drafter with the weights of one of the same kind and sizes; Domino also starts from DFlash.

    Where the loss compares as many ids as the earlier drafter drafts, they are the same ones: what other answers rank
    among the frequent would begin with rows of a head that has never seen it.

    Args:
        objective: with a new net; is changed.
        folder: of the drafter, as `OUT/drafter` of an earlier run; a hub id, or the name of one that ships.

    Raises:
        InvalidRequest: another kind of drafter, other sizes or other settings, each named.
        ModelError: it cannot be read.
    """
    net = objective.net
    tensors, described = _read(net, find_drafter(folder))
    own = _fields(net) if described else {}
    wrong = [
        f"{name}={described[name]!r} there, {own[name]!r} here"
        for name in sorted(described.keys() & own.keys())
        if described[name] != own[name]
    ]
    here = net.state_dict()
    beyond = kind_of(net).new if hasattr(net, "config") else None
    given = {here[name].data_ptr() for name in tensors.keys() & here.keys()}  # of tied weights files hold one
    wrong += [
        f"{name} is missing there"
        for name, weight in here.items()
        if weight.data_ptr() not in given and not (beyond and name.startswith(beyond))
    ]
    wrong += [f"{name} is unknown here" for name in sorted(tensors.keys() - here.keys())]
    wrong += [
        f"{name} is {list(tensors[name].shape)} there, {list(here[name].shape)} here"
        for name in sorted(tensors.keys() & here.keys())
        if tensors[name].shape != here[name].shape
    ]
    if wrong:
        raise InvalidRequest(f"start={folder!r}: {'; '.join(wrong[:8])}; give the same kind and the same net settings")
    with torch.no_grad():
        for name, tensor in tensors.items():
            here[name].copy_(tensor)
    _keep_vocabulary(objective, find_drafter(folder))


def _keep_vocabulary(objective: Objective, folder: str) -> None:
    ranked, file = objective.vocabulary.ranked, locate(folder, FILES, "start") / FILE_NAME
    if ranked is not None and file.is_file():
        ids = load_vocabulary(file, objective.target.vocab_size).to(ranked.device)
        if len(ids) == len(ranked):
            objective.compare(objective.vocabulary.of(ids))


def _read(net: nn.Module, folder: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors by their names in `net`, and the fields of a drafter net's config; none of a language model's."""
    if not hasattr(net, "config"):
        found = read_checkpoint(locate(folder, FILES, "start")).tensors
        return {f"model.{name}": tensor for name, tensor in found.items()}, {}
    read = load_net(folder)
    return dict(read.state_dict()), _fields(read)


def _fields(net: nn.Module) -> dict[str, Any]:
    """Fields of a drafter's config; full attention everywhere can be said by a list and by none."""
    said: dict[str, Any] = net.config.model_dump()  # type: ignore[union-attr,operator]
    if set(said.get("layer_types", ())) == {"full_attention"}:
        said["layer_types"] = ()
    return said


def weights_hash(folder: str) -> str:
    """SHA-256 of the files with a drafter's weights.

    Raises:
        ModelError: there are none.
    """
    found = locate(find_drafter(folder), FILES, "start")
    files = sorted({path for pattern in WEIGHTS for path in found.glob(pattern)} - {found / FILE_NAME})
    if not files:
        raise ModelError(f"start={folder!r}: no file of weights there ({', '.join(WEIGHTS)})")
    return files_hash(files)
