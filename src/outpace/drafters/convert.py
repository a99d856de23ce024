"""Drafter checkpoints from one public layout to another, checked by reading back what was written."""

import shutil
from dataclasses import dataclass
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from outpace.drafters.eagle3.files import HEADLESS
from outpace.drafters.eagle3.net import Eagle3Net
from outpace.drafters.fields import Fields, agreed, dtype_name, flag
from outpace.drafters.kinds import kind_of
from outpace.drafters.load import FILES, load_net, locate
from outpace.drafters.medusa.net import MedusaNet
from outpace.drafters.ranked_vocabulary import FILE_NAME
from outpace.lib.checkpoint import INDEX, MEDUSA_WEIGHTS, WEIGHTS, filled, read_object, weight_map, write_index
from outpace.lib.checks import path_of
from outpace.lib.errors import InvalidRequest, ModelError
from outpace.lib.int8 import quantize_file
from outpace.lib.tensor_file import opened

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
WEIGHTS_IN = ("plain", "int8")
NAMES_TARGET = "speculators"  # the one layout that keeps the target's name


@dataclass(frozen=True)
class Conversion:
    """The result of a conversion.

    Attributes:
        kind, layout, dtype: of the file written.
        difference: the largest between weights of the net and of the file, as of `largest_difference`. Of a file in 8
            bits, the rounding.
        changed: settings and weights that differ in the file, in words.
        weights: "plain" or "int8".
    """

    kind: str
    layout: str
    dtype: str
    difference: float
    changed: tuple[str, ...]
    weights: str = "plain"

    @property
    def is_equal(self) -> bool:
        """Whether the file is the drafter that was read; in 8 bits, apart from the rounding of its matrices."""
        return not self.changed and (self.difference == 0.0 or (self.weights == "int8" and isfinite(self.difference)))


def convert(
    source: str,
    out: str | Path,
    layout: str | None = None,
    *,
    target: str | None = None,
    target_weights: str | None = None,
    dtype: str | None = None,
    weights: str = "plain",
) -> Conversion:
    """Write a drafter in another layout, and compare what was written with what was read.

    A file that differs is removed again.

    Args:
        source: folder or hub id of a drafter in any known layout.
        out: a folder that does not exist yet.
        layout: one of the kind's; None for the first.
        target: name of the target, for the layout "speculators", which keeps it.
        target_weights: folder, pulled name or hub id of the target, for a drafter that borrows its LM head and a layout
            that holds one. The file has the wider dtype of the two.
        dtype: "float32", "bfloat16" or "float16" to cast to; None keeps the file's.
        weights: "plain" for numbers of that dtype, "int8" for matrices in 8 bits (`lib.int8`), which this engine reads.

    Raises:
        InvalidRequest: `out` exists or is `source`; a layout that the kind does not have; a bad dtype or target;
            target's weights that are needed and not given, or the reverse.
        ModelError: the source or the target's head cannot be read, or the layout cannot express it.
    """
    folder, read = path_of(out), path_of(source)
    if read.exists() and folder.resolve() == read.resolve():
        raise InvalidRequest(f"out={str(out)!r}: is the folder to be read; choose a new one")
    if folder.exists() or folder.is_symlink():
        raise InvalidRequest(f"out={str(out)!r}: exists; choose a new folder")
    if dtype is not None and dtype not in DTYPES:
        raise InvalidRequest(f"dtype={dtype!r}: choose one of {', '.join(DTYPES)}")
    if weights not in WEIGHTS_IN:
        raise InvalidRequest(f"weights={weights!r}: choose one of {', '.join(WEIGHTS_IN)}")
    net = load_net(source)
    kind = kind_of(net)
    usual = kind.default_layout
    layout = usual if layout is None else layout
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
        if weights == "int8" and difference == 0.0:
            (file,) = (path for name in (WEIGHTS, MEDUSA_WEIGHTS) if (path := folder / name).is_file())
            quantize_file(file, folder / "config.json")
            difference = largest_difference(net, load_net(str(folder)))
        _keep_vocabulary(locate(source, FILES, "drafter"), folder)
        done = Conversion(kind.name, layout, dtype_name(next(again.parameters())), difference, tuple(changed), weights)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    if not done.is_equal:
        shutil.rmtree(folder)
    return done


def _keep_vocabulary(source: Path, folder: Path) -> None:
    """Copy the list of the ids that a drafter drafts, which no layout contains."""
    if (source / FILE_NAME).is_file():
        shutil.copyfile(source / FILE_NAME, folder / FILE_NAME)
        if (folder / WEIGHTS).is_file():  # otherwise vLLM and SGLang load the ids as a weight
            write_index(folder)


def _cast(net: nn.Module, dtype: torch.dtype, name: str) -> nn.Module:
    net = net.to(dtype)
    for key, weight in net.named_parameters():
        if bool(weight.isinf().any()):
            raise ModelError(f"{name}: {key} has values beyond {dtype}; choose another dtype")
    return net


@torch.inference_mode()
def largest_difference(net: nn.Module, other: nn.Module) -> float:
    """Largest difference between the weights of two nets, relative to the largest magnitude in the first net's tensor.
    Returns 0.0 if they are equal; infinity if tensors are missing, differ in shape or are not finite."""
    ours, theirs = net.state_dict(), other.state_dict()
    shapes, others = ({name: tensor.shape for name, tensor in one.items()} for one in (ours, theirs))
    if type(net) is not type(other) or shapes != others:
        return float("inf")
    return max((_relative(tensor.float(), theirs[name].float()) for name, tensor in ours.items()), default=0.0)


def changed_weights(net: nn.Module, other: nn.Module) -> list[str]:
    """Which weights and maps of the other net differ from the first net's in any bit, one sentence each."""
    ours = net.state_dict()
    return [
        f"{name} has other values"
        for name, tensor in other.state_dict().items()
        if name not in ours or ours[name].dtype != tensor.dtype or not torch.equal(ours[name], tensor)
    ]


def changed_settings(net: nn.Module, other: nn.Module) -> list[str]:
    """Which settings that both nets have differ, one entry each. Taps, mask tokens and block sizes change no weight,
    but change what is computed. A number of target layers that the other file leaves out is not counted."""
    ours, theirs = settings_in(net), settings_in(other)
    return [
        f"{name}={theirs[name]!r} instead of {ours[name]!r}"
        for name in ours.keys() & theirs.keys()
        if theirs[name] != ours[name] and (name, theirs[name]) != ("target_layers", None)
    ]


def settings_in(net: nn.Module) -> dict[str, Any]:
    """Fields of a drafter's config; full attention in every layer is written as an empty `layer_types`."""
    fields: dict[str, Any] = net.config.model_dump()  # type: ignore[operator, union-attr]
    if set(fields.get("layer_types", ())) == {"full_attention"}:
        fields["layer_types"] = ()
    if fields.get("sliding_window") is None:
        fields.pop("sliding_causal", None)  # describes sliding layers, and there are none
    return fields


def _relative(found: Tensor, again: Tensor) -> float:
    if torch.equal(found, again):
        return 0.0
    if not bool(found.isfinite().all() & again.isfinite().all()):
        return float("inf")
    return float((found - again).abs().max()) / max(float(found.abs().max()), torch.finfo(torch.float32).tiny)


FIELD = "target_weights"
HEAD, BIAS, EMBEDDING = "lm_head.weight", "lm_head.bias", "model.embed_tokens.weight"


def supply_head(net: nn.Module, layout: str, target: str | None) -> nn.Module:
    """The drafter with the target's LM head as its own, if it has none and the layout holds one; else unchanged.
    `target`: folder, pulled name or hub id of the target; None if it was not given."""
    borrows = isinstance(net, Eagle3Net) and net.lm_head is None and layout != HEADLESS
    borrows |= isinstance(net, MedusaNet) and net.config.head == "target" and layout == "vllm"
    if not borrows:
        if target is not None:
            raise InvalidRequest(f"{FIELD}={target!r}: layout {layout!r} needs nothing of the target's; leave it out")
        return net
    if target is None:
        raise InvalidRequest(
            f"{FIELD} is missing: layout {layout!r} holds an LM head and this drafter borrows the target's; "
            "name the target's folder or hub id"
        )
    config: Any = net.config
    head = read_head(target, config.vocab_size, config.hidden_size)
    own = config.model_copy(update={"own_head": True} if isinstance(net, Eagle3Net) else {"head": "shared"})
    return filled(partial(type(net), own), net.state_dict() | {HEAD: head}, target)


def read_head(name: str, vocab_size: int, hidden_size: int) -> Tensor:
    """The LM head [V, H] of a language model, in the dtype of its file; only the shard that holds it is read."""
    folder = locate(name, ("config.json", INDEX), FIELD)
    where = f"{FIELD}={name!r}"
    if not (folder / "config.json").is_file() and any(folder.glob("*.gguf")):  # as of a pulled model
        remedy = "give the folder or hub id of the original model"
        raise ModelError(f"{where}: is a GGUF file, and the head is read from safetensors alone; {remedy}")
    fields = Fields(read_object(folder / "config.json"), f"{where}: config.json")
    text = fields.inside("text_config")
    if agreed("final_logit_softcapping", fields, text) is not None:
        raise ModelError(f"{fields.where}: final_logit_softcapping: no layout of a drafter can express capped logits")
    if (folder / INDEX).is_file():
        files = weight_map(folder)
    else:
        locate(name, (WEIGHTS,), FIELD)
        if not (folder / WEIGHTS).is_file():
            raise ModelError(f"{where}: no {WEIGHTS} or {INDEX} there; save the target as safetensors")
        with opened(folder / WEIGHTS) as file:
            files = dict.fromkeys(file.keys(), WEIGHTS)
    untied = flag("tie_word_embeddings", fields) is False or flag("tie_word_embeddings", text) is False
    key = HEAD if HEAD in files or untied else EMBEDDING
    if BIAS in files or key not in files:
        reason = f"holds {BIAS}, which no layout of a drafter has" if BIAS in files else f"holds no {key}"
        raise ModelError(f"{where}: {reason}; only targets whose head is {HEAD}, or tied {EMBEDDING}, can be read")
    locate(name, (files[key],), FIELD)
    with opened(folder / files[key]) as file:
        head: Tensor = file.get_tensor(key)
    if head.shape != (vocab_size, hidden_size) or head.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ModelError(
            f"{where}: {key} is {head.dtype} {list(head.shape)}; the drafter was made for vocab_size={vocab_size} and "
            f"hidden_size={hidden_size}, in float32, bfloat16 or float16"
        )
    return head
