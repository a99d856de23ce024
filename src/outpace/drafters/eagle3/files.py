"""Public layouts of EAGLE-3 checkpoints, recognised by config.json.

    who wrote it                  architectures               layer     rope_theta  numbers of layer ids
    EAGLE's authors               LlamaForCausalLM            midlayer  may lack    as below
    AngelSlim                     Eagle3LlamaForCausalLM      midlayer  stated      as below
    SpecForge                     LlamaForCausalLMEagle3      midlayer  stated      as below
    speculators                   speculators_model_type      layers.0  stated      hidden_states

Ids under `eagle_config` count layer outputs (SGLang), ids at the top level index `hidden_states` (vLLM, speculators).
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from outpace.drafters.eagle3.net import OF_SPECULATORS, Eagle3Config, Eagle3Net
from outpace.drafters.fields import Exported, Fields, architectures, build, dtype_name, flag, rope, write_sizes
from outpace.drafters.fusion import check_features, check_offsets, membership, read_sizes
from outpace.lib.checkpoint import Checkpoint, filled
from outpace.lib.errors import ModelError

AUTHORS, ANGELSLIM, SPECFORGE = "LlamaForCausalLM", "Eagle3LlamaForCausalLM", "LlamaForCausalLMEagle3"
EAGLE3 = (ANGELSLIM, SPECFORGE, "Eagle3Speculator")  # not the authors' name, which is also Llama's
SPECULATORS = "speculators"
HEADLESS = "headless"
IDS = "eagle_aux_hidden_state_layer_ids"
VARIANTS = ("norm_before_residual", "norm_before_fc", "fc_norm")
RENAMED = {
    "layers.0.": "midlayer.",
    "aux_norm_low.": "fc_norm.0.",
    "aux_norm_mid.": "fc_norm.1.",
    "aux_norm_high.": "fc_norm.2.",
}
AUTHORS_THETA = 10000.0  # base of the authors' code where the config names none, whatever the target's base is


def is_eagle3(config: Mapping[str, Any]) -> bool:
    """Whether a config.json describes an EAGLE-3 drafter, or DART's, which has the same fields."""
    model_type = config.get("speculators_model_type")
    if model_type is not None:
        return bool(model_type == "eagle3")
    return "draft_vocab_size" in config or any(one in EAGLE3 for one in architectures(config))


def layout_of(checkpoint: Checkpoint) -> str:
    """Who wrote a checkpoint: one of the names above."""
    config = checkpoint.config
    if config.get("speculators_model_type") is not None:
        return SPECULATORS
    architecture = next(iter(Fields(config, f"{checkpoint.name}: config.json").words("architectures")), None)
    if architecture not in (AUTHORS, ANGELSLIM, SPECFORGE):
        raise ModelError(
            f"{checkpoint.name}: architectures={config.get('architectures')} is no known layout of EAGLE-3; known are "
            f"{AUTHORS}, {ANGELSLIM}, {SPECFORGE} and speculators_model_type 'eagle3'"
        )
    if architecture == AUTHORS and "draft_vocab_size" not in config:
        raise ModelError(f"{checkpoint.name}: {AUTHORS} without draft_vocab_size is a language model, not EAGLE-3")
    return str(architecture)


def read_eagle3(checkpoint: Checkpoint) -> Eagle3Net:
    """The net of a checkpoint, in the dtype of its file."""
    tensors = _renamed(checkpoint)
    t2d = tensors.pop("t2d", None)
    config = _config(checkpoint, tensors)
    if "d2t" in tensors:
        check_offsets(tensors["d2t"], t2d, config.draft_vocab_size, config.vocab_size, checkpoint.name)
        if config.draft_vocab_size == config.vocab_size:
            del tensors["d2t"]  # ascending ids that fill the vocabulary: nothing is mapped
    return filled(lambda: Eagle3Net(config), tensors, checkpoint.name)


def _renamed(checkpoint: Checkpoint) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for key, tensor in checkpoint.tensors.items():
        ours = key.removeprefix("model.")
        for old, new in RENAMED.items():
            if ours.startswith(old):
                ours = new + ours.removeprefix(old)
        if ours in tensors:
            raise ModelError(f"{checkpoint.name}: two tensors stand for {ours}, one of them {key}")
        tensors[ours] = tensor
    return tensors


def _config(checkpoint: Checkpoint, tensors: Mapping[str, Tensor]) -> Eagle3Config:
    top, layout = Fields(checkpoint.config, f"{checkpoint.name}: config.json"), layout_of(checkpoint)
    eagle, layer = top.inside("eagle_config"), top
    if layout == SPECULATORS:
        top.need("transformer_layer_config")
        layer = top.inside("transformer_layer_config")
    values = read_sizes(layer, tensors)
    taps = _taps(top, eagle)
    width = top.count("target_hidden_size", values["hidden_size"])
    check_features(taps, width, tensors, checkpoint.name)
    variants = {key: flag(key, top, eagle) for key in VARIANTS}
    if variants["fc_norm"] is None:
        variants["fc_norm"] = flag("use_aux_norm", top, eagle)  # SGLang's earlier name
    if layout == SPECULATORS and variants["norm_before_residual"] is None:
        raise ModelError(
            f"{top.where} does not state norm_before_residual, which vLLM then takes for true and the "
            "speculators library for false; write into it what the drafter was trained with"
        )
    draft = top.count("draft_vocab_size", values["vocab_size"])
    values |= rope(layer, AUTHORS_THETA if layout == AUTHORS else None)
    values |= {key: bool(value) for key, value in variants.items()}
    values |= {
        "norm_output": _norm_output(top, eagle, layout),
        "draft_vocab_size": draft,
        "target_hidden_size": width,
        "taps": taps,
        "qk_norm": _qk_norm(layer, tensors, layout),
        "own_embedding": "embed_tokens.weight" in tensors,
        "own_head": "lm_head.weight" in tensors or draft != values["vocab_size"],
    }
    return build(Eagle3Config, values, top.where)


def _taps(top: Fields, eagle: Fields) -> tuple[int, ...] | None:
    """Indices into `hidden_states`, or None where the file names no layers."""
    found = []
    for fields, offset in ((top, 0), (eagle, 1)):
        ids = fields.get(IDS)
        if not ids:
            continue
        if not isinstance(ids, list) or not all(type(one) is int for one in ids):
            raise ModelError(f"{fields.where}: {IDS}={ids!r} must be a list of whole numbers")
        found.append(tuple(one + offset for one in ids))
    if len(set(found)) > 1:
        raise ModelError(
            f"{top.where}: {IDS} at the top level (hidden_states {list(found[0])}) and under eagle_config "
            f"(layer outputs, hidden_states {list(found[1])}) name different layers"
        )
    return found[0] if found else None


def _norm_output(top: Fields, eagle: Fields, layout: str) -> bool:
    stated = flag("norm_output", top, eagle)
    if layout != SPECFORGE:
        return bool(stated)
    if stated is False:
        raise ModelError(
            f"{top.where}: norm_output=false in SpecForge's layout drops the norm before the head: not supported"
        )
    return False  # SpecForge's true means that there is a norm before the head


def _qk_norm(layer: Fields, tensors: Mapping[str, Tensor], layout: str) -> bool:
    """Whether to expect query and key norms: by model type in speculators files, else by whether one is there."""
    if layout == SPECULATORS and layer.get("model_type"):
        return bool(layer.get("model_type") == "qwen3")
    return any(key.endswith(("q_norm.weight", "k_norm.weight")) for key in tensors)


def eagle3_tensors(net: Eagle3Net, layout: str) -> dict[str, Tensor]:
    """The tensors of a file, by the names of a layout."""
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


def export_eagle3(net: Eagle3Net, layout: str, target: str | None = None) -> Exported:
    """Config and tensors in a layout: "midlayer" as SpecForge writes it (SGLang, vLLM); "speculators" (vLLM), which can
    express every variant and keeps the target's name; or "headless", which is "midlayer" without a head (vLLM)."""
    return eagle3_config(net, layout, target), eagle3_tensors(net, layout)


def eagle3_config(net: Eagle3Net, layout: str, verifier: str | None) -> dict[str, Any]:
    """config.json of a layout."""
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
    refused = [key for key in OF_SPECULATORS if getattr(config, key)]
    if refused:
        raise ModelError(
            f"layout={layout!r} cannot express {', '.join(refused)} for every engine; use layout='speculators'"
        )
    if config.taps is not None:
        if 0 in config.taps:
            raise ModelError(
                f"layout={layout!r} cannot express taps={list(config.taps)}: it counts outputs of layers, and tap 0 is "
                "the embedding; use layout='speculators'"
            )
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
