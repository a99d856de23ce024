"""Which architectures can be decoded losslessly, and why the others are refused at load."""

from transformers import PretrainedConfig

from outpace.core.errors import UnsupportedModel

# A family belongs here once the contract test passes on it: row i of a branching tree has the logits of its path
# decoded alone, and KV after a commit equals a fresh prefill.
SUPPORTED_FAMILIES = ("llama", "qwen2")

_RECURRENT_FIELDS = (
    "ssm_cfg",
    "mamba_d_state",
    "state_size",
    "linear_num_value_heads",
    "time_step_rank",
    "rwkv_hidden",
)


def check_supported(config: PretrainedConfig) -> None:
    """Refuse what this engine would decode wrongly.

    Raises:
        UnsupportedModel: recurrent state that cannot roll back, an unknown family, sliding windows, or rotary scaling
            that depends on the longest position in a batch.
    """
    text = config.get_text_config()
    family = text.model_type
    if "linear_attention" in (getattr(text, "layer_types", None) or ()) or any(
        hasattr(text, field) for field in _RECURRENT_FIELDS
    ):
        raise UnsupportedModel(
            f"model_type={family!r}: its recurrent state cannot be rolled back to an accepted path, so rejected drafts "
            "would change the output; use an attention-only model"
        )
    if family not in SUPPORTED_FAMILIES:
        raise UnsupportedModel(f"model_type={family!r}: not supported; supported are {', '.join(SUPPORTED_FAMILIES)}")
    if "sliding_attention" in (getattr(text, "layer_types", None) or ()):
        raise UnsupportedModel(f"model_type={family!r}: layers with a sliding window are not supported yet")
    scaling = (getattr(text, "rope_parameters", None) or {}).get("rope_type", "default")
    if scaling in ("dynamic", "longrope"):
        raise UnsupportedModel(
            f"rope_type={scaling!r}: its rotation depends on the longest position in the batch, so a draft tree would "
            "change its neighbours; use a checkpoint with static scaling"
        )
