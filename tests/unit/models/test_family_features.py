"""What single families add to the contract: positions that end, wrappers, masks, and checkpoints on disk."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Gemma3Config, PretrainedConfig

from outpace.core.tree import DraftTree
from outpace.models.families import check_supported
from outpace.models.loading.load import load_target
from tests.unit.models.test_contract import BRANCHING, path_error
from tests.unit.models.tiny import (
    FAMILIES,
    VOCAB,
    WINDOWS,
    byte_tokenizer,
    open_with,
    random_ids,
    random_tree,
    save_tiny_model,
    stock_model,
    tiny_config,
    tiny_target,
)


def multimodal_config(**text: Any) -> PretrainedConfig:
    inner = tiny_config("gemma3_text", **({"final_logit_softcapping": None} | WINDOWS["gemma3_text"] | text))
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return Gemma3Config(
        text_config=inner.to_dict(),
        vision_config=vision | {"image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4,
        image_token_index=VOCAB - 1,
        tie_word_embeddings=False,
    )


@pytest.mark.parametrize("family", list(FAMILIES))
def test_a_tree_may_reach_beyond_the_last_position(family: str) -> None:
    """Guards against a table of learned positions read past its end, and against clipping nodes that can be emitted."""
    limit = 40
    config = tiny_config(family, max_position_embeddings=limit)
    model: Any = stock_model(config)
    target = tiny_target(config, max_length=limit)
    prompt = random_ids(36, seed=1)
    slot, _ = open_with(target, prompt)
    tree = DraftTree.chain(torch.tensor(random_ids(12, seed=2)))
    (outputs,) = target.run_pass((), [slot], [tree])[1]
    ids = torch.tensor([[*prompt, *tree.tokens.tolist()][:limit]])
    with torch.inference_mode():
        expected = model(ids).logits[0, len(prompt) :]
    torch.testing.assert_close(outputs.logits[: len(expected)], expected, atol=1e-4, rtol=0)


def test_the_text_part_of_a_multimodal_gemma_has_the_logits_of_stock_transformers() -> None:
    """Guards against the wrapper's own settings taken for its text part's, and against a cap the wrapper leaves out."""
    config = multimodal_config()
    check_supported(config)
    target = tiny_target(config)
    assert path_error(stock_model(config), target, random_tree(BRANCHING, seed=2)) < 1e-4


@pytest.mark.parametrize("family", [*FAMILIES, "gemma3"])
def test_a_checkpoint_on_disk_decodes_as_stock_transformers_does(family: str, tmp_path: Path) -> None:
    """Guards against weights renamed or stacked at load that our swapped-in layers no longer find."""
    if family == "gemma3":
        model: Any = stock_model(multimodal_config(vocab_size=264))
        model.save_pretrained(tmp_path)
        byte_tokenizer().save_pretrained(tmp_path)
    else:
        save_tiny_model(tmp_path, family)
        model = stock_model(tiny_config(family, vocab_size=264, max_position_embeddings=256))
    target, _ = load_target(str(tmp_path), "float32", "cpu", 200, 1)
    assert path_error(model, target, random_tree(BRANCHING, seed=2)) < 1e-4


@pytest.mark.usefixtures("without_kernels")
@pytest.mark.parametrize("family", list(FAMILIES))
def test_no_mask_is_built(family: str) -> None:
    """Guards against a [T, T] mask per pass that attention over slots ignores: gigabytes for a long prompt."""
    masks: list[Any] = []
    target = tiny_target(tiny_config(family, **WINDOWS.get(family, {})))
    for module in target.decoder.modules():
        if type(module).__name__.endswith("Attention"):
            module.register_forward_pre_hook(
                lambda _, args, settings: masks.append(settings["attention_mask"]), with_kwargs=True
            )
    open_with(target, random_ids(9, seed=1))
    assert masks == [None] * 3


def test_experts_decode_in_float64_too() -> None:
    """Guards against stock grouped products, which refuse float64, the precision that tells ties from bugs."""
    config = tiny_config("qwen3_moe")
    exact = stock_model(config, dtype=torch.float64)
    exact.set_experts_implementation("eager")
    assert path_error(exact, tiny_target(config, torch.float64), random_tree(BRANCHING, seed=2)) < 1e-4
