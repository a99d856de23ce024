"""A target over a model of the caller's: it shares the weights and leaves the model unchanged."""

import copy
from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch import nn

from outpace.lib.errors import InvalidRequest, UnsupportedModel
from outpace.models.attention import ATTENTION_NAME, register_attention
from outpace.models.draft import DraftModel, draft_model_of, warn_if_shorter
from outpace.models.families import check_supported, positions_of
from outpace.models.packed import PackedModel
from outpace.models.target import PackedTarget

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PREPARE = "prepare_inputs_for_generation"
"""A method of transformers' models that `generate` calls before each pass, and we do not."""


def borrow_target(model: "PreTrainedModel", max_length: int, max_slots: int, pack: bool = False) -> PackedTarget:
    """A target on a copy of the model's modules that shares its parameters and buffers.

    The model itself, its attention implementation included, is never changed. The copy takes milliseconds; make a new
    one after weights or modules have changed.

    Args:
        model: a causal LM on one device, its layers stock or wrapped (adapters).
        max_length: tokens of one request, prompt and answer together.
        max_slots: requests at a time.
        pack: copy the weights into the CPU's packed layout: faster, for as much memory again.

    Raises:
        UnsupportedModel: an architecture that cannot be decoded losslessly, a model spread over devices, a replaced
            `forward` or preparation of inputs, a wrapped output layer, a hook on it or on the whole model.
        InvalidRequest: the model is in training mode and has dropout.
    """
    with torch.no_grad():
        return PackedTarget(_shared_copy(model), max_length, max_slots, (), pack)


def borrow_draft_model(model: "PreTrainedModel", target: PackedModel) -> DraftModel:
    """A draft model on a copy of a model's modules, with as many slots as the target.

    Raises:
        UnsupportedModel, InvalidRequest: as `borrow_target`.
    """
    limit = min(positions_of(model.config), target.max_length)
    warn_if_shorter(type(model).__name__, limit, target.max_length)
    with torch.no_grad():
        return draft_model_of(_shared_copy(model), limit, target.max_slots, pack=False)


def _shared_copy(model: "PreTrainedModel") -> "PreTrainedModel":
    name = type(model).__name__
    check_supported(model.config)
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) != 1 or "meta" in {device.type for device in devices}:
        where = ", ".join(sorted(map(str, devices)))
        raise UnsupportedModel(f"{name}: its parameters are on {where}; all of it must be on one device")
    if model.training and _has_dropout(model):
        raise InvalidRequest(f"{name} is in training mode and has dropout: call model.eval() first")
    prepare = getattr(model, PREPARE, None)
    if getattr(prepare, "__func__", None) is not getattr(type(model), PREPARE, None):
        raise UnsupportedModel(
            f"{name}: its {PREPARE} has been replaced, as peft does for prompt and prefix tuning, and would not run; "
            "do without Outpace, or use an adapter of layers, such as LoRA"
        )
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear:
        raise UnsupportedModel(
            f"{name}: its output layer is a {type(head).__name__}; only a plain nn.Linear can be used"
        )
    for part, place in ((model, "model"), (head, "output layer")):
        if part._forward_hooks or part._forward_pre_hooks:  # only the decoder's modules are called as they are
            raise UnsupportedModel(f"{name}: a hook on its {place} would not run; remove it, or do without Outpace")
    decoder: nn.Module = model.get_decoder()
    for path, module in decoder.named_modules():
        if "forward" in vars(module):  # it would run the original's modules instead of the copy's
            raise UnsupportedModel(
                f"{name}: the forward of its {path or 'decoder'} has been replaced (offloading hooks, torch.compile)"
            )
    shared = {id(tensor): tensor for tensor in chain(model.parameters(), model.buffers())}
    try:
        twin: PreTrainedModel = copy.deepcopy(model, dict(shared))
    except Exception as error:
        raise UnsupportedModel(f"{name}: its modules cannot be copied: {error}") from error
    twin.eval()
    register_attention()
    twin.set_attn_implementation(ATTENTION_NAME)
    return twin


def _has_dropout(model: "PreTrainedModel") -> bool:
    return bool(getattr(model.config.get_text_config(), "attention_dropout", 0.0)) or any(
        isinstance(module, nn.Dropout) and module.p > 0 for module in model.modules()
    )
