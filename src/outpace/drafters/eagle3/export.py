"""Writing EAGLE-3 checkpoints in the layouts that SGLang and vLLM load."""

from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from outpace.drafters.eagle3.files import IDS, SPECFORGE
from outpace.drafters.eagle3.net import Eagle3Config, Eagle3Net
from outpace.drafters.fields import dtype_name, write_sizes
from outpace.drafters.reduced_vocabulary import membership
from outpace.lib.checkpoint import write_checkpoint
from outpace.lib.errors import ModelError

Layout = Literal["midlayer", "speculators", "headless"]
HEADLESS = "headless"


def eagle3_tensors(net: Eagle3Net, layout: Layout) -> dict[str, Tensor]:
    """The tensors of a file, by the names of a layout.

    Raises:
        ModelError: no head, which no other engine does without (`nets.target_head` supplies the target's); or a head,
            and a layout without.
    """
    tensors = dict(net.state_dict())
    if net.lm_head is None and layout != HEADLESS:
        raise ModelError("own_head=False: engines expect lm_head.weight in the file; give the drafter the target's")
    if net.lm_head is not None and layout == HEADLESS:
        raise ModelError(f"layout={layout!r} is for drafters that borrow the target's head, and this one has its own")
    if layout == "speculators":
        tensors = {key.replace("midlayer.", "layers.0."): tensor for key, tensor in tensors.items()}
    if net.d2t is not None:
        tensors["t2d"] = membership(net.d2t, net.config.vocab_size)
    return tensors


def eagle3_config(net: Eagle3Net, layout: Layout, verifier: str | None = None) -> dict[str, Any]:
    """config.json of a layout.

    Raises:
        ModelError: a variant that an engine would skip without a word.
    """
    config = net.config
    layer = write_sizes(config) | {"attention_bias": config.bias}
    shared: dict[str, Any] = {
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "fc_norm": config.fc_norm,
        "torch_dtype": dtype_name(net.fc.weight),
    }
    if config.taps is not None:
        shared[IDS] = list(config.taps)
    if layout == "speculators":
        return _speculators_config(
            config, layer | {"model_type": "qwen3" if config.qk_norm else "llama"}, shared, verifier
        )
    refused = [
        key for key in ("norm_before_residual", "norm_before_fc", "norm_output", "qk_norm") if getattr(config, key)
    ]
    if refused:
        raise ModelError(
            f"layout={layout!r} cannot say {', '.join(refused)} so that every engine hears it; use layout='speculators'"
        )
    if config.taps is not None:
        shared["eagle_config"] = {"use_aux_hidden_state": True, IDS: [tap - 1 for tap in config.taps]}
    return {"architectures": [SPECFORGE], "model_type": "llama"} | layer | shared


def _speculators_config(
    config: Eagle3Config, layer: dict[str, Any], shared: dict[str, Any], verifier: str | None
) -> dict[str, Any]:
    proposal = {"proposal_type": "greedy", "speculative_tokens": 5, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": verifier, "architectures": []},
        },
        "transformer_layer_config": layer,
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "norm_output": config.norm_output,
        "embed_requires_grad": config.own_embedding,
        "tie_word_embeddings": False,
    } | shared


def write_eagle3(net: Eagle3Net, folder: str | Path, layout: Layout, *, verifier: str | None = None) -> None:
    """Write a checkpoint that SGLang and vLLM ("midlayer") or vLLM ("speculators") load.

    Args:
        net: the drafter; all its weights must be numbers.
        folder: empty or new.
        layout: "midlayer" as SpecForge writes it; "speculators", which can say every variant; "headless", which is
            "midlayer" for drafters that are scored by the target's head, and which this package and vLLM read.
        verifier: name of the target, which the speculators layout keeps.

    Raises:
        ModelError: a weight is NaN, the layout cannot say a variant, no head, or the folder holds a checkpoint.
    """
    write_checkpoint(folder, eagle3_config(net, layout, verifier), eagle3_tensors(net, layout))
