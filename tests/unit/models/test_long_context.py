"""Contexts of 16,384 and 32,768 tokens: rotations, tiles and spans far from the beginning."""

from typing import Any

import pytest
import torch

from outpace.core.tree import DraftTree
from tests.unit.models.tiny import open_with, random_ids, stock_model, tiny_config, tiny_target

SCALED = {"rope_theta": 10_000.0, "factor": 8.0, "original_max_position_embeddings": 4096}
ROTATIONS: dict[str, dict[str, Any]] = {
    "yarn": SCALED | {"rope_type": "yarn"},
    "llama3": SCALED | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0},
}


@pytest.mark.thorough
@pytest.mark.parametrize(("kind", "length"), [("yarn", 16_384), ("llama3", 32_768)])
def test_a_long_context_is_that_of_transformers(kind: str, length: int) -> None:
    """Guards against positions that wrap or are cut off, a scaling that fails beyond the original context, and sums
    over spans that drift: logits of the last tokens, written as a prompt and as a draft."""
    sizes: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    sizes |= {"hidden_size": 64, "max_position_embeddings": length}
    config = tiny_config("llama", **sizes, rope_parameters=ROTATIONS[kind])
    ids, drafted = random_ids(length, 3), 4
    stock = stock_model(config, "sdpa")
    with torch.inference_mode():
        expected = stock(torch.tensor([ids]), logits_to_keep=drafted + 1, use_cache=False).logits[0]
    target = tiny_target(config, max_length=length, max_slots=1)
    _, last = open_with(target, ids[:-drafted], chunk=512)
    (outputs,) = target.run_pass((), [0], [DraftTree.chain(torch.tensor(ids[-drafted:]))])[1]
    found = torch.cat([last.logits, outputs.logits])
    # Logits have a spread of about 2; a position that is off by one moves them by about as much.
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-3)
    assert found.argmax(-1).tolist() == expected.argmax(-1).tolist()


def test_what_a_token_of_context_costs_is_timed_apart(without_kernels: None) -> None:
    """Guards against timing that needs kernels where there are none."""
    assert tiny_target(tiny_config("llama"), max_length=64, max_slots=1).context_times() == (0.0, 0.0)


@pytest.mark.parametrize("kv_cache_dtype", ["float32", "bfloat16", "int8"])
def test_timing_a_context_leaves_the_slots(kv_cache_dtype: str) -> None:
    """Guards against attention that is timed in a request's slot, in another format of keys, or beyond a short limit;
    and against rows that seem free: eight of them read a context in more time than one."""
    config = tiny_config("llama", hidden_size=256, num_attention_heads=8, num_key_value_heads=2, num_hidden_layers=9)
    for length in (48, 4096):
        target = tiny_target(config, max_length=length, max_slots=1, kv_cache_dtype=kv_cache_dtype)
        open_with(target, random_ids(20, 3))
        before = [storage.clone() for storage in target.kv.storages]
        each, row = target.context_times()
        assert min(each, row) >= 0
        assert target.kv.lengths == [20]
        assert all(map(torch.equal, before, target.kv.storages))
    # Other programs may hide the difference in one try; if rows seemed free, they would in each.
    assert row > 0 or any(target.context_times()[1] > 0 for _ in range(5))
