"""Drafter checkpoints from one public layout to another, checked by reading back what was written."""

import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from outpace.drafters.fields import dtype_name
from outpace.drafters.kinds import kind_of
from outpace.drafters.load import load_net
from outpace.drafters.parity import changed_settings, changed_weights, largest_difference
from outpace.drafters.target_head import supply_head
from outpace.lib.errors import InvalidRequest, ModelError
from outpace.lib.paths import path_of

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
NAMES_TARGET = "speculators"  # the one layout that keeps the target's name


@dataclass(frozen=True)
class Conversion:
    """What was converted, and whether the file says what the net did.

    Attributes:
        kind, layout, dtype: of the file written.
        difference: between the forwards of the net and of the file, relative to the largest output; 0.0 for equal bits.
        changed: settings and weights that the file gives otherwise, in words.
    """

    kind: str
    layout: str
    dtype: str
    difference: float
    changed: tuple[str, ...]

    @property
    def is_equal(self) -> bool:
        return self.difference == 0.0 and not self.changed


def convert(
    source: str,
    out: str | Path,
    layout: str,
    *,
    target: str | None = None,
    target_weights: str | None = None,
    dtype: str | None = None,
) -> Conversion:
    """Write a drafter in another layout, and compare what was written with what was read.

    A file that does not say the same is removed again.

    Args:
        source: folder or hub id of a drafter in any known layout.
        out: a folder that does not exist yet.
        layout: one of the kind's.
        target: name of the target, for the layout "speculators", which keeps it.
        target_weights: folder or hub id of the target, for a drafter that borrows its LM head and a layout that holds
            one. The file has the wider dtype of the two.
        dtype: "float32", "bfloat16" or "float16" to cast to; None keeps the file's.

    Raises:
        InvalidRequest: `out` exists or is `source`; a layout that the kind does not have; a bad dtype or target;
            target's weights that are needed and not given, or the reverse.
        ModelError: the source or the target's head cannot be read, or the layout cannot say it.
    """
    folder, read = path_of(out), path_of(source)
    if read.exists() and folder.resolve() == read.resolve():
        raise InvalidRequest(f"out={str(out)!r}: is the folder to be read; choose a new one")
    if folder.exists() or folder.is_symlink():
        raise InvalidRequest(f"out={str(out)!r}: exists; choose a new folder")
    if dtype is not None and dtype not in DTYPES:
        raise InvalidRequest(f"dtype={dtype!r}: choose one of {', '.join(DTYPES)}")
    net = load_net(source)
    kind = kind_of(net)
    if layout not in kind.layouts:
        raise InvalidRequest(f"layout={layout!r}: {source} is of kind {kind.name}; choose {' or '.join(kind.layouts)}")
    if target is not None and layout != NAMES_TARGET:
        raise InvalidRequest(f"target={target!r}: layout {layout!r} does not name the target; leave it out")
    net = supply_head(net, layout, target_weights)
    if dtype is not None:
        net = _cast(net, DTYPES[dtype], source)
    try:
        kind.layouts[layout](net, folder, target)
        again = load_net(str(folder))
        difference, changed = largest_difference(net, again), changed_settings(net, again) + changed_weights(net, again)
        done = Conversion(kind.name, layout, dtype_name(next(again.parameters())), difference, tuple(changed))
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    if not done.is_equal:
        shutil.rmtree(folder)
    return done


def _cast(net: nn.Module, dtype: torch.dtype, name: str) -> nn.Module:
    net = net.to(dtype)
    for key, weight in net.named_parameters():
        if bool(weight.isinf().any()):
            raise ModelError(f"{name}: {key} has values beyond {dtype}; choose another dtype")
    return net
