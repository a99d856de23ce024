"""The fixtures themselves: engines that start, on what the tests share."""

from pathlib import Path

from tests.vllm.engines import engine, speculative
from tests.vllm.tiny import BLOCK, Tiny

PROMPTS = [[5, 9, 14, 200, 31], [7, 7, 300]]


def test_plain_dflash_and_eagle3_say_the_same(tiny: Tiny) -> None:
    """Guards against fixtures that prove nothing: stock methods of vLLM speculate on them and change no token."""
    with engine(tiny.target) as plain:
        wanted = plain.generate(PROMPTS, 24)
    for method, folder, drafts in (("dflash", tiny.dflash, BLOCK - 1), ("eagle3", tiny.eagle3, 3)):
        with engine(tiny.target, speculative(method, folder, drafts)) as speculating:
            assert speculating.generate(PROMPTS, 24) == wanted
            assert speculating.counts()[0] > 0


def test_the_real_model_is_there(smollm2: Path, shipped: dict[str, Path], prompts: list[list[int]]) -> None:
    """Guards against weights or drafters that are looked for where a machine happens to have them."""
    assert (smollm2 / "model.safetensors").is_file()
    assert set(shipped) == {"domino", "dflash", "eagle3", "draft-lm"}
    assert len(prompts) >= 6
