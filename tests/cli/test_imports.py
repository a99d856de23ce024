"""What the short way to an answer imports."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.models.tiny import write_tiny_gguf

# Seconds of imports that an answer of a common GGUF file does not need.
SLOW = ("transformers", "torch._dynamo", "sympy", "scipy", "httpx", "huggingface_hub", "accelerate")
SLOWER = ("torch", "numpy", "gguf", "pydantic", "yaml", "jinja2")  # which an answer needs, and a page of help does not


@pytest.mark.parametrize(
    ("command", "status"),
    [(["generate", "hello", "--max-new-tokens", "3"], 0), (["chat"], 2)],  # the file has no chat template
)
def test_commands_on_a_gguf_file_import_no_transformers(command: list[str], status: int, tmp_path: Path) -> None:
    """Guards against seconds before the first token, which imports of transformers and of torch's compiler take."""
    path = write_tiny_gguf(tmp_path / "m.gguf")
    run = [sys.executable, "-X", "importtime", "-m", "outpace", command[0], str(path), *command[1:]]
    found = subprocess.run(run, input="", capture_output=True, text=True, check=False)
    assert found.returncode == status, found.stderr[-2000:]
    imported = {
        line.rpartition("|")[2].strip() for line in found.stderr.splitlines() if line.startswith("import time:")
    }
    assert "outpace.models.plain_decoder" in imported
    assert not imported & set(SLOW)


@pytest.mark.parametrize("arguments", [["-c", "import outpace"], ["-m", "outpace", "--help"]])
def test_help_and_import_are_quick(arguments: list[str]) -> None:
    """Guards against seconds before a page of help, and against an `import outpace` that imports torch: public names
    are loaded on first use."""
    found = subprocess.run([sys.executable, "-X", "importtime", *arguments], capture_output=True, text=True, check=True)
    imported = {line.rpartition("|")[2].strip() for line in found.stderr.splitlines()}
    assert "outpace.core.params" in imported
    assert not imported & {*SLOW, *SLOWER}
