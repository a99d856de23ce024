"""vLLM's target as trained drafters see it: its embedding, its head and its sizes. No weight is copied on one rank."""

from typing import Any

import torch
from torch import Tensor, nn

from outpace.drafters.build_context import BuildContext
from outpace.drafters.kinds import kind_of
from outpace.drafters.load import load_net, locate
from outpace.drafters.packing import pack_net
from outpace.drafters.ranked_vocabulary import FILE_NAME
from outpace.lib.checks import path_of
from outpace.lib.errors import InvalidRequest, ModelError, UnsupportedModel
from outpace.methods.catalog import MethodSpec
from outpace.models.draft import DraftModel
from outpace.models.head import LmHead
from outpace.models.layers.linear import layers_for, linear_over
from outpace.models.loading.shipped import find_drafter
from outpace.vllm.settings import ProposerSettings


class BorrowedTarget:
    """The embedding and the head of a vLLM model.

    With tensor parallelism each rank holds a part of both; they are gathered once, at load, and take V * H numbers each
    on every rank, once if they are tied.

    Raises:
        UnsupportedModel: one is not where vLLM's models have it, is quantised, or is scaled in a way that drafters
            lack.
    """

    def __init__(self, model: Any, config: Any, max_length: int, max_slots: int, ranks: int) -> None:
        self.config, self.max_length, self.max_slots = config, max_length, max_slots
        self.vocab_size = int(config.vocab_size)
        name = type(model).__name__
        scale = getattr(getattr(model, "logits_processor", None), "scale", 1.0)
        if scale != 1.0 or str(config.model_type).startswith("gemma"):
            raise UnsupportedModel(
                f"{name}: its embeddings or logits are scaled (model_type={config.model_type}, scale={scale}), which a "
                "drafter inside vLLM does not know; choose a method without a drafter"
            )
        table = _weight(model, "model.embed_tokens", name)
        head = _weight(model, "lm_head", name)
        is_tied = head is table or head.data_ptr() == table.data_ptr()
        table = self._whole(table, ranks)
        head = table if is_tied else self._whole(head, ranks)
        self.embedding = nn.Embedding.from_pretrained(table, freeze=True)
        bias = getattr(model.lm_head, "bias", None)
        layer = linear_over(head, None if bias is None else self._whole(bias.detach(), ranks))
        softcap = getattr(model.logits_processor, "soft_cap", None)
        self.head = LmHead(layer, softcap, layers_for(head.dtype, head.device))

    def _whole(self, part: Tensor, ranks: int) -> Tensor:
        """[V, ...] of all ranks, without padding."""
        if ranks > 1:
            from vllm.distributed import tensor_model_parallel_all_gather

            part = tensor_model_parallel_all_gather(part.contiguous(), dim=0)
        return part[: self.vocab_size]


def _weight(model: Any, path: str, name: str) -> Tensor:
    """[V / ranks, H] of a layer of a vLLM model."""
    module = model
    for part in path.split("."):
        module = getattr(module, part, None)
    weight = getattr(module, "weight", None)
    if (
        not isinstance(weight, Tensor)
        or weight.ndim != 2
        or not weight.numel()
        or not weight.is_floating_point()
        or weight.element_size() == 1  # float8, whose numbers lack their scale
    ):
        raise UnsupportedModel(
            f"{name}: {path}.weight is no matrix of real numbers in vLLM, and this method's drafter reads it; choose a "
            "method without a drafter"
        )
    return weight.detach()


def build_context(spec: MethodSpec, settings: ProposerSettings, target: Any, device: torch.device) -> BuildContext:
    """The build context of a method inside vLLM. `target`: a `BorrowedTarget`; any object with a `vocab_size` without a
    drafter."""
    drafter = settings.drafter
    transitions = None if settings.transitions is None else path_of(settings.transitions)
    if spec.drafter is None:
        if drafter is not None:
            raise InvalidRequest(f"drafter={drafter!r}: method {spec} drafts without one; leave it out")
        return BuildContext(target.vocab_size, device, _no_language_model, transitions=transitions)
    if drafter is None:
        raise InvalidRequest(
            f"method {spec} needs a trained drafter of kind {spec.drafter}: name its folder, "
            f'additional_config={{"outpace": {{"drafter": "..."}}}}'
        )
    name = find_drafter(drafter)
    net = load_net(name)
    kind = kind_of(net)
    if spec.drafter not in (kind.name, *kind.serves):
        raise InvalidRequest(f"drafter={drafter!r} is of kind {kind.name}, and method {spec} needs {spec.drafter}")
    weight = target.embedding.weight
    net = net.to(device, weight.dtype).eval()
    pack_net(net)
    ranked = locate(name, ("config.json", FILE_NAME), "drafter") / FILE_NAME
    return BuildContext(
        target.vocab_size,
        device,
        _no_language_model,
        target=target,
        net=lambda: net,
        vocabulary=ranked if ranked.is_file() else None,
        transitions=transitions,
    )


def _no_language_model() -> DraftModel:
    raise ModelError("vLLM runs draft models itself: give speculative_config={'method': 'draft_model', ...}")
