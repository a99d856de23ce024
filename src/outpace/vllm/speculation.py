"""Makes vLLM's speculative config for one of our methods, and exports models that vLLM cannot read."""

import hashlib
from pathlib import Path
from typing import Any

from outpace.drafters.fields import Fields, agreed
from outpace.drafters.kinds import KINDS, kinds
from outpace.drafters.load import FILES, kind_at, locate
from outpace.drafters.method import said_of
from outpace.drafters.ranked_vocabulary import FILE_NAME as VOCABULARY
from outpace.lib.checkpoint import read_object
from outpace.lib.errors import InvalidRequest, ModelError
from outpace.lib.int8 import is_quantized
from outpace.methods.catalog import WITHOUT_DRAFTER, MethodSpec, budget_with, parse_method
from outpace.methods.defaults import with_draft
from outpace.models.export import export, export_draft, export_drafter
from outpace.models.loading.config import is_bare, read_config
from outpace.models.loading.registry import Location, pulled, resolve
from outpace.models.loading.shipped import Shipment, find_drafter, shipped_for, shipped_names
from outpace.trees.retrieval.suffix import CONTINUATION
from outpace.vllm.settings import KEY, check_drafts, linear_method

PROPOSER = "outpace.vllm.proposer.Method"
MODELS = {next(iter(kind.methods)): kind for kind in KINDS.values() if kind.vllm is not None}
"""Methods that vLLM runs itself. Domino runs as DFlash, with our plugin's model class."""
PASSES = 3  # drafted tokens without a budget, if each takes a pass of the drafter
LONGEST = 8  # maximal tokens of our proposers' chains, which end earlier if more have no expected gain
LOOKUP = {"prompt_lookup_max": 3, "prompt_lookup_min": 1}  # the lengths that prompt lookup tries here


def speculation(
    model: str, method: str | None, drafter: str | None, budget: int | None, exports: Path, workers: int = 1
) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """The settings with which vLLM drafts like a method here, as far as chains can: `--speculative-config`, and
    `--additional-config` for our own proposers; None if not needed.

    A chain of a trained drafter or a draft model, and prompt lookup, are vLLM's own methods; all else is drafted by our
    proposers, and so are chains from the target's last layer, which vLLM's methods read otherwise.

    Args:
        method: a method with options; None for the chain of the named or shipped drafter, else a method without one.
        budget: drafted tokens per step, where the method states none.
        exports: a folder for models that vLLM cannot read as they are.
    """
    named = None if drafter is None else find_drafter(drafter)
    shipment = shipped_for(model)
    spec = parse_method(method or _method_for(shipment, named))
    if spec.is_open:
        spec = with_draft(spec, None if named is None else kind_at(named), shipment)
    tokens = spec.budget if budget_with(spec, budget) is None else budget
    check_drafts(tokens or 0, "budget")
    found = _drafter_for(spec, shipment, named)
    if spec.name == "plain" or tokens == 0:
        return None, None
    if spec.name == "lookup":
        return {"method": "ngram", "num_speculative_tokens": tokens or CONTINUATION, **LOOKUP}, None
    if found is None or spec.name not in MODELS or not _is_chain(spec) or _reads_last_layer(spec, found):
        linear_method(str(spec), found)
        config = {"method": "custom_class", "model": PROPOSER, "num_speculative_tokens": tokens or LONGEST}
        given = {"method": str(spec), "drafter": found, "transitions": shipment.transitions}
        return config, {KEY: {name: str(value) for name, value in given.items() if value is not None}}
    folder = _export_folder(resolve(model), exports)
    if spec.name == "linear" and is_bare(read_config(resolve(found), for_weights=False), found):
        found = str(export_draft(found, export(model, folder), folder / Path(found).name))
    elif spec.name != "linear" and is_quantized(_config_of(found)):  # vLLM cannot read our scales
        found = str(export_drafter(locate(found, (*FILES, VOCABULARY), "drafter"), folder, VOCABULARY))
    else:
        found = readable(found, exports)
    _check_shares(found, workers)
    length = _length(spec, found, tokens)
    return {"method": MODELS[spec.name].vllm, "model": found, "num_speculative_tokens": length}, None


def readable(model: str, exports: Path) -> str:
    """A model's name for vLLM: a folder or hub id unchanged; for a pulled name or a GGUF file the folder of an
    export."""
    location = resolve(model)
    is_folder = Path(model).expanduser().is_dir()
    if is_folder or (model not in pulled() and location.gguf is None):
        return location.path
    return str(export(model, _export_folder(location, exports)))


def _export_folder(location: Location, exports: Path) -> Path:
    """The folder of a model's export, and of drafters for it."""
    whose = hashlib.sha256(location.path.encode()).hexdigest()[:8]  # several folders may hold models of the same name
    return exports / f"{Path(location.name).name}-{whose}"


def _method_for(shipment: Shipment, drafter: str | None) -> str:
    """The default method: the chain of the drafter, else a method without one."""
    if drafter is None:
        nets = (name for name, kind in MODELS.items() if kind.name in shipment.drafters and kind.net)
        return next(nets, WITHOUT_DRAFTER)
    kind = kind_at(drafter)
    if kinds()[kind].vllm is None:
        raise InvalidRequest(f"drafter={drafter!r} is {said_of(kind)}: name a method that drafts with one")
    return next(iter(kinds()[kind].methods))


def _drafter_for(spec: MethodSpec, shipment: Shipment, named: str | None) -> str | None:
    """Folder or hub id of a method's drafter, named or shipped; None if the method needs none."""
    wanted = spec.drafter
    if wanted is None:
        if named is not None:
            raise InvalidRequest(f"drafter={named!r}: method {str(spec)!r} needs none; leave it out")
        return None
    if named is None:
        if wanted not in shipment.drafters:
            raise InvalidRequest(
                f"method={str(spec)!r}: needs {said_of(wanted)}: name it with --drafter; {shipped_names()}"
            )
        return str(shipment.drafters[wanted])
    if spec.name in MODELS and kind_at(named) != wanted:
        raise InvalidRequest(
            f"drafter={named!r} is {said_of(kind_at(named))}, and method {spec.name!r} needs {said_of(wanted)} in vLLM"
        )
    return named


def _config_of(drafter: str) -> dict[str, Any]:
    return read_object(locate(drafter, ("config.json",), "drafter") / "config.json")


def _is_chain(spec: MethodSpec) -> bool:
    """Whether vLLM's own method supports these options."""
    asked = {name: getattr(spec.options, name) for name in spec.options.model_fields_set - {"budget"}}
    return not asked or asked == {"shape": "chain"}


def _reads_last_layer(spec: MethodSpec, drafter: str) -> bool:
    """Whether a block drafter reads the last layer: here after the final norm, as in transformers, but before it in
    vLLM's own methods."""
    if MODELS[spec.name].vllm != "dflash":
        return False
    fields = Fields(_config_of(drafter), f"{drafter}: config.json")
    places = (fields, fields.inside("dflash_config"))
    ids, layers = agreed("target_layer_ids", *places), agreed("num_target_layers", *places)
    return isinstance(ids, list) and isinstance(layers, int) and layers - 1 in ids


def _check_shares(drafter: str, workers: int) -> None:
    """Refuse a drafter whose layers cannot be cut into this many parts: vLLM cuts it as it cuts the target."""
    config = _config_of(drafter)
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        size = config.get(name)
        if isinstance(size, int) and size % workers and not (name == "num_key_value_heads" and workers % size == 0):
            raise InvalidRequest(
                f"tensor_parallel_size={workers}: the drafter's {name}={size} is no multiple; take another size, "
                "a drafter of other sizes, or a method without one"
            )


def _length(spec: MethodSpec, drafter: str, tokens: int | None) -> int:
    """Drafted tokens per step; for a block drafter as many as it was trained for, unless a budget is smaller."""
    if MODELS[spec.name].vllm != "dflash":
        return tokens or PASSES
    config = _config_of(drafter)
    block = config.get("block_size") or (config.get("dflash_config") or {}).get("block_size")
    if not isinstance(block, int):
        raise ModelError(f"{drafter}: config.json: block_size={block!r}: must be a whole number")
    if tokens is not None and tokens >= block:
        raise InvalidRequest(f"budget={tokens}: the drafter's block holds {block - 1} tokens; give {block - 1} or less")
    return tokens or block - 1
