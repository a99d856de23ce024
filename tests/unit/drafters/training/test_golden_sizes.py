"""What is trained for a target of 8B has the sizes, names and shapes of that target's published drafters."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, PretrainedConfig, Qwen3Config

from outpace.drafters.dart import objective as dart
from outpace.drafters.dflash import objective as dflash
from outpace.drafters.domino.objective import DominoObjective
from outpace.drafters.eagle3 import objective as eagle3
from outpace.drafters.load import read_net
from outpace.drafters.training.batch import Facts
from outpace.drafters.training.settings import merged_settings, training_of
from tests.unit.drafters.net.test_golden import EXPORTS, golden

QWEN3_8B = Qwen3Config(
    vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32,
    num_key_value_heads=8, head_dim=128, max_position_embeddings=40960, rms_norm_eps=1e-6,
    rope_parameters={"rope_type": "default", "rope_theta": 1e6},
)  # fmt: skip
VICUNA_7B = LlamaConfig(vocab_size=32000, hidden_size=4096, num_hidden_layers=32)
MASK = 151669  # of the published Qwen3 drafters: an id beyond the tokenizer's own
WHOLE = ("objective.vocabulary=151936",)  # which ids are drafted changes no size

CASES: list[tuple[str, str, PretrainedConfig, tuple[str, ...]]] = [
    ("dflash_qwen3_8b", "dflash", QWEN3_8B, WHOLE),
    ("domino_qwen3_8b", "domino", QWEN3_8B, WHOLE),
    ("eagle3_qwen3_8b_specforge", "eagle3", QWEN3_8B, ()),
    ("dart_qwen3_8b", "dart", QWEN3_8B, ()),
    ("medusa_vicuna_7b", "medusa", VICUNA_7B, ("net.heads=5",)),
]
# Where a file leaves something open that a new drafter settles.
SETTLED: dict[str, set[str]] = {"eagle3": {"taps"}}


@pytest.fixture
def _without_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing a billion weights is not what is tested."""

    def unchanged(net: Any, *rest: Any) -> Any:
        return net

    monkeypatch.setattr(dflash, "initialise", unchanged)
    monkeypatch.setattr(DominoObjective, "_begin", unchanged)
    for module in (dart, eagle3):
        monkeypatch.setattr(module, "begin", unchanged)


@pytest.mark.usefixtures("_without_weights")
@pytest.mark.parametrize(("name", "method", "config", "settings"), CASES, ids=[case[0] for case in CASES])
def test_a_new_drafter_has_the_published_sizes(
    name: str, method: str, config: PretrainedConfig, settings: tuple[str, ...]
) -> None:
    """Guards against a default that makes a drafter which other engines, or this one, would read otherwise."""
    unused = torch.zeros(config.vocab_size, dtype=torch.bool)
    if config.vocab_size > MASK:
        unused[MASK] = True
    facts = Facts(torch.zeros(config.vocab_size, dtype=torch.int64), unused, ())
    target: Any = SimpleNamespace(
        config=config, device=torch.device("meta"), hidden_size=config.hidden_size, vocab_size=config.vocab_size,
        layers=config.num_hidden_layers, drafting_head=lambda ids: None,
        dtype=torch.bfloat16, head=torch.empty(config.vocab_size, 4096, device="meta"),
        embedding=torch.empty(config.vocab_size, config.hidden_size, device="meta"),
    )  # fmt: skip
    chosen = merged_settings(method, None, settings)
    build: Callable[..., Any] = training_of(method).build
    with torch.device("meta"):
        objective = build(chosen.net, chosen.objective, target, facts, 0)
    checkpoint = golden(name)
    published: Any = read_net(checkpoint)
    ours, theirs = objective.net.config.model_dump(), published.config.model_dump()
    for field in SETTLED.get(method, set()):
        del ours[field], theirs[field]
    for values in (ours, theirs):
        if values.get("layer_types") == ():
            values["layer_types"] = ("full_attention",) * values["layers"]
    assert ours == theirs
    if getattr(objective.net, "d2t", None) is not None:  # a map of ids holds numbers, which the file's names need
        objective.net.d2t = published.d2t
    _, tensors, *_ = EXPORTS[type(objective.net).__name__](objective.net, objective.layout)
    wanted = {key: tensor.shape for key, tensor in checkpoint.tensors.items()}
    assert {key: tensor.shape for key, tensor in tensors.items()} == wanted
