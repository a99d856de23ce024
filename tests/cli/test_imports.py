"""What the short way to an answer imports."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.models.tiny import write_tiny_gguf

# Seconds of imports that an answer of a common GGUF file does not need.
SLOW = ("transformers", "gguf", "torch._dynamo", "sympy", "scipy", "httpx", "huggingface_hub", "accelerate")
SLOWER = ("torch", "numpy", "pydantic", "yaml", "jinja2")  # which an answer needs, and a page of help does not
SCRIPT = f"""
import sys, outpace
answer = outpace.load(sys.argv[1], device="cpu").generate("hello", max_new_tokens=3, ignore_eos=True)
assert len(answer.token_ids) == 3
print([name for name in {SLOW} if name in sys.modules])
"""


def test_a_gguf_file_answers_without_slow_imports(tmp_path: Path) -> None:
    """Guards against seconds before the first token, which imports of transformers and of torch's compiler take."""
    path = write_tiny_gguf(tmp_path / "m.gguf")
    found = subprocess.run([sys.executable, "-c", SCRIPT, str(path)], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    assert found.stdout.strip().splitlines()[-1] == "[]"


@pytest.mark.parametrize("command", [["generate", "hello", "--max-new-tokens", "3"], ["chat"]])
def test_commands_on_a_gguf_file_import_no_transformers(command: list[str], tmp_path: Path) -> None:
    """Guards against a module of the command line that imports what loading does not."""
    path = write_tiny_gguf(tmp_path / "m.gguf")
    run = [sys.executable, "-X", "importtime", "-m", "outpace", command[0], str(path), *command[1:]]
    found = subprocess.run(run, input="", capture_output=True, text=True, check=False)
    imported = {
        line.rpartition("|")[2].strip() for line in found.stderr.splitlines() if line.startswith("import time:")
    }
    assert "outpace.models.plain_decoder" in imported, found.stderr[-2000:]
    assert not imported & set(SLOW)


@pytest.mark.parametrize("arguments", [["-c", "import outpace"], ["-m", "outpace", "--help"]])
def test_help_and_import_are_quick(arguments: list[str]) -> None:
    """Guards against seconds before a page of help, and against an `import outpace` that imports torch: public names
    are loaded on first use."""
    found = subprocess.run([sys.executable, "-X", "importtime", *arguments], capture_output=True, text=True, check=True)
    imported = {line.rpartition("|")[2].strip() for line in found.stderr.splitlines()}
    assert "outpace.core.params" in imported
    assert not imported & {*SLOW, *SLOWER}
