"""Models, drafters and settings for real vLLM on the CPU: what `make test-vllm` runs."""

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from outpace.data.workload import read_workload
from outpace.models.export import export
from outpace.models.loading.pull import pull
from outpace.vllm.speculation import speculation
from tests.vllm import engines  # noqa: F401  sets what vLLM reads when it is imported
from tests.vllm.tiny import Tiny, write_tiny

TARGET = "smollm2-135m"
WEIGHTS = Path(__file__).parents[2] / "build" / "peers" / "weights" / TARGET  # where `make peers` keeps them as well


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything here needs vLLM."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker("vllm")


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct as a folder that vLLM loads, from the weights that `outpace models pull` fetched."""
    pull(TARGET)
    return export(TARGET, WEIGHTS)


@pytest.fixture(scope="session")
def shipped(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The trained drafters that ship for it, "domino", "dflash" and "eagle3", as `outpace serve --engine vllm` gives
    them to vLLM, which does not read our 8 bits."""
    exports, found = tmp_path_factory.mktemp("exports"), {}
    for method in ("domino", "dflash", "eagle3"):
        config, _ = speculation(TARGET, method, None, None, exports)
        assert config is not None
        found[method] = Path(config["model"])
    return found


@pytest.fixture(scope="session")
def prompts(smollm2: Path) -> list[list[int]]:
    """The built-in prompts as ids: chats with their template, continuations as they are."""
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    ids = []
    for item in read_workload("builtin"):
        if item.raw:
            ids.append(tokenizer.encode(item.turns[0]))
        else:
            chat = [{"role": "user", "content": item.turns[0]}]
            ids.append(tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False))
    return ids


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """A random target of four layers and random drafters for it: for what does not depend on what models say."""
    return write_tiny(tmp_path_factory.mktemp("tiny"))
