"""Tiny random models and tokenizers that the tests build themselves: no download, seconds at most.

Weights are drawn wide (0.2 instead of 0.02) and biases and norms are drawn too: logits then lie far from ties, and a
bias that is dropped or a row that sees the wrong keys changes them visibly.
"""

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    Phi3Config,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
)

from outpace.core.protocols import Chunk, NodeOutputs
from outpace.core.tree import DraftTree, Topology
from outpace.kernels import build as compiled
from outpace.models.attention import ATTENTION_NAME, register_attention
from outpace.models.loading.precision import compute_dtype
from outpace.models.target import PackedTarget

VOCAB = 160
needs_kernels = pytest.mark.skipif(compiled.loaded_kernels() is None, reason=f"no kernels: {compiled.why_none()}")
needs_onednn = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="this torch was built without oneDNN, as for macOS"
)
# The families of the contract; how to add one is in outpace/models/families.py.
FAMILIES: dict[str, Callable[..., PretrainedConfig]] = {
    "llama": LlamaConfig,
    "qwen2": Qwen2Config,
    "mistral": MistralConfig,
    "qwen3": Qwen3Config,
    "qwen3_moe": Qwen3MoeConfig,
    "gemma2": Gemma2Config,
    "gemma3_text": Gemma3TextConfig,
    "gpt_neox": GPTNeoXConfig,
    "gpt2": GPT2Config,
    "phi3": Phi3Config,
    "olmo2": Olmo2Config,
    "smollm3": SmolLM3Config,
}
# Settings by which a family's tiny instance shows what is its own. Caps are low enough to bend what passes them.
_GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 20, "final_logit_softcapping": 3.0, "sliding_window": 300}
_EXPERTS = {"moe_intermediate_size": 40, "num_experts": 5, "num_experts_per_tok": 2, "norm_topk_prob": True}
_OWN_SETTINGS: dict[str, dict[str, Any]] = {
    "mistral": {"head_dim": 16, "sliding_window": None},
    "qwen3": {"head_dim": 16},
    "qwen3_moe": _EXPERTS | {"head_dim": 16, "mlp_only_layers": [1]},
    "gemma2": _GEMMA | {"attn_logit_softcapping": 2.0},
    "gemma3_text": _GEMMA | {"sliding_window_pattern": 2},
    "gpt_neox": {"rotary_pct": 0.5, "num_key_value_heads": None},
    "gpt2": {"n_inner": 96, "num_key_value_heads": None},
    "smollm3": {"no_rope_layer_interval": 2},
}
# What the size of the layers inside a block is called, where it is not intermediate_size.
INNER_SIZES = {"gpt2": "n_inner", "qwen3_moe": "moe_intermediate_size"}
# A window shorter than the prompts of the tests and than their trees are deep.
WINDOW = 3
WINDOWS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": WINDOW},
    "qwen2": {"sliding_window": WINDOW, "use_sliding_window": True, "max_window_layers": 1},
    "qwen3": {"sliding_window": WINDOW, "use_sliding_window": True, "max_window_layers": 1},
    "qwen3_moe": {"sliding_window": WINDOW, "use_sliding_window": True},
    "gemma2": {"sliding_window": WINDOW},
    "gemma3_text": {"sliding_window": WINDOW},
    "phi3": {"sliding_window": WINDOW},
    "smollm3": {"sliding_window": WINDOW, "use_sliding_window": True},
}
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def tiny_config(family: str, **changes: Any) -> PretrainedConfig:
    """Three layers, 6 query heads over 2 key heads, 8 dimensions each."""
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    return FAMILIES[family](**(sizes | _OWN_SETTINGS.get(family, {}) | changes))


def stock_model(
    config: PretrainedConfig, attention: str = "eager", dtype: torch.dtype = torch.float32
) -> PreTrainedModel:
    """A transformers model with the same weights at every call for the same config."""
    register_attention()
    model: PreTrainedModel = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation=attention)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            is_norm = weight.ndim == 1 and name.endswith("weight")
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.2 + (1.0 if is_norm else 0.0))
    model.to(dtype)  # type: ignore[arg-type]
    model.eval()
    return model


def tiny_target(
    config: PretrainedConfig,
    dtype: torch.dtype = torch.float32,
    max_length: int = 256,
    max_slots: int = 4,
    eos_token_ids: tuple[int, ...] = (),
    pack: bool = True,
    quantize: str = "none",
    kv_cache_dtype: str = "auto",
) -> PackedTarget:
    """Our target over the weights of `stock_model`, widened where the CPU has no kernels for the dtype, as at load."""
    model = stock_model(config, ATTENTION_NAME, dtype)
    if pack:
        model.to(compute_dtype(dtype, torch.device("cpu")))  # type: ignore[arg-type]
    how = {"rounded_to": dtype, "quantize": quantize, "kv_cache_dtype": kv_cache_dtype}
    return PackedTarget(model, max_length, max_slots, eos_token_ids, pack, **how)  # type: ignore[arg-type]


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def random_ids(count: int, seed: int, vocab: int = VOCAB) -> list[int]:
    ids: list[int] = torch.randint(vocab, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
    return ids


def open_with(target: PackedTarget, prompt: Sequence[int], chunk: int = 256, slot: int = 0) -> tuple[int, NodeOutputs]:
    """A slot filled with a prompt in chunks, and the outputs at the prompt's last position."""
    target.rewind_slot(slot, 0)
    for start in range(0, len(prompt), chunk):
        tokens = torch.tensor(prompt[start : start + chunk])
        part = Chunk(slot, tokens, want_top=False, is_last=start + chunk >= len(prompt))
        (output,) = target.run_pass([part], (), ())[0]
    assert output.last is not None
    return slot, output.last


def decode_one_by_one(target: PackedTarget, slot: int, tokens: Sequence[int]) -> NodeOutputs:
    """Commit tokens as plain decoding does, one row per pass; the outputs of the last."""
    for token in tokens:
        (outputs,) = target.run_pass((), [slot], [DraftTree.chain(torch.tensor([token]))])[1]
        target.commit([slot], [[0]])
    return outputs


def random_tree(parents: Sequence[int], seed: int) -> DraftTree:
    return DraftTree(torch.tensor(random_ids(len(parents), seed)), Topology.of(parents))


def path_tokens(tree: DraftTree, node: int) -> list[int]:
    tokens: list[int] = tree.tokens[list(tree.topology.path(node))].tolist()
    return tokens


def committed_rows(target: PackedTarget, slot: int) -> tuple[Tensor, Tensor]:
    """Keys and values of a slot [layers, kv_heads, length, head_dim]."""
    length = target.kv.lengths[slot]
    return target.kv.keys[:, slot, :, :length], target.kv.values[:, slot, :, :length]


def byte_tokenizer(chat_template: str | None = CHAT_TEMPLATE) -> PreTrainedTokenizerFast:
    """One token per byte, <eos> is id 0; a character beyond ASCII takes several tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<eos>": 0} | {symbol: index for index, symbol in enumerate(alphabet, start=1)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", chat_template=chat_template)


def save_tiny_model(
    folder: Path, family: str = "llama", generation_eos: int | list[int] | None = 0, **changes: Any
) -> Path:
    """A complete checkpoint with a byte tokenizer, ready for `outpace.load`; some ids have no text, as in Qwen."""
    sizes: dict[str, Any] = {"vocab_size": 264, "max_position_embeddings": 256, "eos_token_id": 0}
    model = stock_model(tiny_config(family, **(sizes | changes)))
    assert model.generation_config is not None
    model.generation_config.eos_token_id = generation_eos
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def write_tiny_gguf(path: Path, name: str = "tiny", split: str = "default", merge: str = "l l") -> Path:
    """A complete GGUF file: a Llama of two layers in float32 with a byte tokenizer, EOS id 2. `split`: how it splits
    text. `merge`: of its last token."""
    from gguf import GGUFWriter

    width, inner, heads, kv_heads = 32, 64, 4, 2
    tokens = ["<unk>", "<bos>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "he", merge.replace(" ", "")]
    writer = GGUFWriter(str(path), "llama")
    writer.add_name(name)
    writer.add_context_length(128)
    writer.add_embedding_length(width)
    writer.add_block_count(2)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(width // heads)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split)
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * (len(tokens) - 3))
    writer.add_token_merges(["h e", merge])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    shapes = {"token_embd": (len(tokens), width), "output_norm": (width,), "output": (len(tokens), width)}
    for layer in range(2):
        shapes |= {f"blk.{layer}.{name}": (width,) for name in ("attn_norm", "ffn_norm")}
        shapes |= {f"blk.{layer}.attn_{name}": (width, width) for name in ("q", "output")}
        shapes |= {f"blk.{layer}.attn_{name}": (width * kv_heads // heads, width) for name in ("k", "v")}
        shapes |= {f"blk.{layer}.ffn_{name}": (inner, width) for name in ("gate", "up")}
        shapes |= {f"blk.{layer}.ffn_down": (width, inner)}
    generator = torch.Generator().manual_seed(7)
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", (torch.randn(shape, generator=generator) * 0.2).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
