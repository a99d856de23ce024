"""A small target that counts as built in and pulled, and random drafters that ship for it, in a test's folder."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import outpace
from outpace.drafters.dflash.net import DFlashConfig, DFlashNet
from outpace.drafters.domino.net import DominoConfig, DominoNet
from outpace.drafters.eagle3.net import Eagle3Config, Eagle3Net
from outpace.drafters.kinds import write_net
from outpace.drafters.ranked_vocabulary import save_vocabulary
from outpace.models.loading import registry, shipped
from outpace.models.loading.config import read_config
from outpace.models.loading.registry import CONVERSION, InWheel, resolve
from outpace.models.tokenizer import read_tokenizer
from scripts.ship_drafter import facts_of
from tests.unit.drafters.source.learned import BLOCK, random_net
from tests.unit.methods.test_trained_drafters import HEAD, OURS
from tests.unit.models.tiny import save_tiny_model

KINDS = ("dflash", "domino", "draft-lm", "eagle3")
WITH_VOCABULARY = ("draft-lm", "eagle3")
SIZES: dict[str, Any] = OURS | {"max_positions": 2048}
EVEN = torch.arange(0, 264, 2)


def ship(root: Path) -> Path:
    """Write a pulled target "tiny" below `root`/home and its drafters below `root`/drafters, which is returned."""
    pulled, folder = root / "home" / "models" / "tiny", root / "drafters" / "tiny"
    save_tiny_model(pulled, eos_token_id=None, max_position_embeddings=2048)
    (pulled / "outpace.json").write_text(json.dumps({"conversion": CONVERSION}))
    eagle = random_net(Eagle3Net(Eagle3Config(**SIZES, taps=(0, 1, 2), draft_vocab_size=264)))
    write_net(eagle, folder / "eagle3", "speculators")
    write_net(random_net(DFlashNet(DFlashConfig(**SIZES, **BLOCK))), folder / "dflash")
    write_net(random_net(DominoNet(DominoConfig(**SIZES, **BLOCK, **HEAD))), folder / "domino", "sglang")
    save_tiny_model(folder / "draft-lm", num_hidden_layers=1, max_position_embeddings=2048)
    for kind in WITH_VOCABULARY:
        save_vocabulary(folder / kind / "vocabulary.safetensors", EVEN, 264)
    describe(folder, pulled)
    return root / "drafters"


def describe(folder: Path, target: Path, **changes: Any) -> None:
    """Write the `target.json` of a folder of drafters: for models called tiny or tiny-something."""
    location = resolve(str(target))
    facts = facts_of(read_config(location), read_tokenizer(location), ("tiny", "tiny-*"))
    changes = {"default_method": "outpace:draft=none"} | changes
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "target.json").write_text(json.dumps(facts.model_dump() | changes))


def install(patch: pytest.MonkeyPatch, root: Path, drafters: Path) -> None:
    """Make the target of `ship` a built-in one, and a folder the one of shipped drafters."""
    patch.setenv("OUTPACE_HOME", str(root / "home"))
    patch.setattr(registry, "BUILT_IN", {"tiny": InWheel("tiny==1.0", "tiny.gguf", 0, "", "made here")})
    patch.setattr(shipped, "shipped_folder", lambda: drafters)


def load(name: str, method: str | None = None, **options: Any) -> outpace.Model:
    return outpace.load(name, method, dtype="float32", device="cpu", **options)
