"""A random target small enough to load in a moment, and random drafters for it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from outpace.drafters.dflash.net import DFlashConfig, DFlashNet
from outpace.drafters.domino.files import export_domino, read_domino
from outpace.drafters.domino.net import DominoConfig, DominoNet
from outpace.drafters.eagle3.net import Eagle3Config, Eagle3Net
from outpace.drafters.kinds import write_net
from outpace.drafters.medusa.net import MedusaConfig, MedusaNet
from outpace.drafters.ranked_vocabulary import FILE_NAME, save_vocabulary
from outpace.lib.checkpoint import read_checkpoint, write_checkpoint, write_index
from tests.unit.models.tiny import byte_tokenizer

VOCAB, HIDDEN, LAYERS, BLOCK = 512, 256, 4, 5
SIZES: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": 256,
    "heads": 8,  # which 2 and 4 workers share alike
    "kv_heads": 4,
    "head_dim": 32,
    "rope_theta": 1e4,
    "max_positions": 512,
    "vocab_size": VOCAB,
    "target_hidden_size": HIDDEN,
}
BLOCKS: dict[str, Any] = {
    **SIZES,
    "layers": 2,
    "target_layers": LAYERS,
    "block_size": BLOCK,
    "mask_token_id": 3,
    "target_layer_ids": (0, 2),
    "layer_types": ("full_attention",) * 2,
}
HEAD: dict[str, Any] = {"emb_dim": 24, "gru_hidden_dim": 40, "pure_draft_prefix_len": 1}


@dataclass(frozen=True)
class Tiny:
    """Folders. `domino`: its labels are not shifted, as in the drafter that ships; the layout is the authors'.
    `shifted`: a Domino drafter whose labels are shifted, in SGLang's layout. `chained`: TokenSwift's heads."""

    target: Path
    dflash: Path
    eagle3: Path
    domino: Path
    shifted: Path
    chained: Path


def write_tiny(folder: Path) -> Tiny:
    """Write them all."""
    made = Tiny(*(folder / name for name in ("target", "dflash", "eagle3", "domino", "shifted", "chained")))
    write_target(made.target)
    plain = randomised(DFlashNet(DFlashConfig(**BLOCKS)), 1)
    first, second = (layer.self_attn.k_norm.weight for _, layer in plain.each_layer())
    first.data.copy_(second)  # vLLM's kernel for CPUs takes the first layer's for all; Domino's class knows better
    write_net(plain, made.dflash)
    eagle3 = Eagle3Config(**SIZES, rms_eps=1e-5, draft_vocab_size=VOCAB, own_head=True, taps=(1, 2, 3))
    write_net(randomised(Eagle3Net(eagle3), 2), made.eagle3, "midlayer")
    write_net(randomised(DominoNet(domino_config(shift_label=False)), 3), made.domino, "domino")
    write_net(randomised(DominoNet(domino_config(shift_label=True)), 4), made.shifted, "sglang")
    heads: dict[str, Any] = {"heads": 3, "head": "target", "bias": False, "chained": True}
    chained = MedusaConfig(hidden_size=HIDDEN, vocab_size=VOCAB, **heads)
    write_net(randomised(MedusaNet(chained), 5), made.chained, "authors")
    return made


def domino_config(**changes: Any) -> DominoConfig:
    """Of the drafters here."""
    return DominoConfig(**{**BLOCKS, **HEAD, "shift_label": False, **changes})


def write_ranked(folder: Path, drafter: Path, ranked: Tensor, rows: Tensor) -> None:
    """A Domino drafter with a ranked vocabulary, whose W2 has rows of some ids alone."""
    write_checkpoint(folder, *export_domino(read_domino(read_checkpoint(drafter)), "domino", ids=rows))
    save_vocabulary(folder / FILE_NAME, ranked, VOCAB)
    write_index(folder)


def randomised(net: Any, seed: int) -> Any:
    """A net with weights wide enough that what is left out or swapped shows."""
    source = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in net.named_parameters():
            value = torch.randn(weight.shape, generator=source) * (
                0.1 if weight.dim() == 1 else weight.shape[1] ** -0.5
            )
            weight.copy_(value + 1 if "norm" in name else value)
    return net


def write_target(folder: Path, seed: int = 0, **changes: Any) -> None:
    """A random Llama, far from ties."""
    settings = {"num_hidden_layers": LAYERS, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32}
    sizes = {"hidden_size": HIDDEN, "intermediate_size": 256, "vocab_size": VOCAB, "max_position_embeddings": 512}
    ids = {"bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False}
    torch.manual_seed(seed)
    config = LlamaConfig(**{**settings, **sizes, **ids, **changes})
    model = LlamaForCausalLM(config).float()
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.1)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
