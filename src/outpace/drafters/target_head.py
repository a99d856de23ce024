"""The target's LM head for drafters that borrow it, read by name from the target's files: no model is loaded."""

import torch
from torch import Tensor, nn

from outpace.drafters.eagle3.files import HEADLESS
from outpace.drafters.eagle3.net import Eagle3Net
from outpace.drafters.fields import Fields, agreed, flag
from outpace.drafters.load import locate
from outpace.drafters.medusa.net import MedusaNet
from outpace.lib.checkpoint import INDEX, WEIGHTS, opened, read_object, weight_map
from outpace.lib.errors import InvalidRequest, ModelError
from outpace.lib.weights import filled

FIELD = "target_weights"
HEAD, BIAS, EMBEDDING = "lm_head.weight", "lm_head.bias", "model.embed_tokens.weight"


def supply_head(net: nn.Module, layout: str, target: str | None) -> nn.Module:
    """The drafter with the target's LM head as its own, if it has none and the layout holds one; else as it is.

    Args:
        net: any drafter.
        layout: that it is to be written in.
        target: folder or hub id of the target; None if it was not given.

    Raises:
        InvalidRequest: a target that is needed and not given, or the reverse.
        ModelError: as `read_head`.
    """
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
    assert isinstance(net, Eagle3Net | MedusaNet)
    head = read_head(target, net.config.vocab_size, net.config.hidden_size)
    tensors = net.state_dict() | {HEAD: head}
    if isinstance(net, Eagle3Net):
        own = net.config.model_copy(update={"own_head": True})
        return filled(lambda: Eagle3Net(own), tensors, target)
    shared = net.config.model_copy(update={"head": "shared"})
    return filled(lambda: MedusaNet(shared), tensors, target)


def read_head(name: str, vocab_size: int, hidden_size: int) -> Tensor:
    """The LM head [V, H] of a language model, in the dtype of its file; of its shards only the one is read.

    Args:
        name: folder or hub id.
        vocab_size, hidden_size: V and H that the drafter was made for.

    Raises:
        ModelError: nothing there, no safetensors, no head under its usual name; one of another shape, that is
            quantised, or that drafters' layouts cannot say: with a bias, or logits that are capped.
    """
    folder = locate(name, ("config.json", INDEX), FIELD)
    where = f"{FIELD}={name!r}"
    fields = Fields(read_object(folder / "config.json"), f"{where}: config.json")
    text = fields.inside("text_config")
    if agreed("final_logit_softcapping", fields, text) is not None:
        raise ModelError(f"{fields.where}: final_logit_softcapping: no layout of a drafter says that logits are capped")
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
