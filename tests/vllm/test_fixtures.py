"""What the tests share: the real model and its drafters."""

from pathlib import Path


def test_the_real_model_is_there(smollm2: Path, shipped: dict[str, Path], prompts: list[list[int]]) -> None:
    """Guards against weights or drafters that are looked for where a machine happens to have them."""
    assert (smollm2 / "model.safetensors").is_file()
    assert set(shipped) == {"domino", "dflash", "eagle3", "draft-lm"}
    assert len(prompts) >= 6
