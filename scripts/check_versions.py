"""Runs a short suite at the lowest and at the highest versions of Python and packages that are supported.

python scripts/check_versions.py [lowest] [highest]; run from the root of the repository. Environments lie in
build/versions. The lowest versions are the bounds of pyproject.toml; a missing Python is an error.
"""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

PROJECT: dict[str, Any] = tomllib.loads(Path("pyproject.toml").read_text())["project"]
FOLDER = Path("build/versions")
EXTRAS = ("grammar", "bench", "serve", "train")
NEWEST = 14  # minor version of the newest Python to try
TESTS_NEED = ("setuptools>=77", "pytest>=8", "pytest-timeout", "hypothesis", "scipy", "jsonschema")
SUITE = (
    "tests/lossless/test_toy.py",
    "tests/lossless/test_matrix.py",
    "tests/lossless/test_grammars.py",
    "tests/unit/api",
    "tests/unit/models/test_exactness.py",
    "tests/unit/models/test_families.py",
    "tests/unit/kernels/test_blocks.py",
    "tests/unit/plugins",
    "tests/cli/test_cli.py",
    "tests/cli/test_help.py",
    "tests/cli/test_imports.py::test_help_and_import_are_quick",
)
CHOSEN = "not slow and not gpu and not thorough and not costly and not browser and not vllm"


def main(wanted: list[str]) -> None:
    """Prepare and test each of the ends; exit status 1 where one fails."""
    pythons = dict(_pythons())
    least = int(PROJECT["requires-python"].rpartition(".")[2])
    ends = {"lowest": (least, _bounds()), "highest": (max(pythons, default=0), [])}
    failed = []
    for name in wanted or ends:
        minor, pinned = ends[name]
        if minor not in pythons:
            sys.exit(f"{name}: no Python 3.{minor} here; put python3.{minor} on the PATH")
        python = _prepared(name, pythons[minor], pinned)
        print(f"{name}: {_versions(python)}", flush=True)
        environment = {**os.environ, "PYTHONPATH": ".", "OMP_WAIT_POLICY": "passive"}
        if subprocess.run([python, "-m", "pytest", "-m", CHOSEN, *SUITE], env=environment).returncode != 0:
            failed.append(name)
    if failed:
        sys.exit(f"failed at the {' and '.join(failed)} versions")


def _pythons() -> Iterator[tuple[int, str]]:
    """Minor versions and paths of Pythons, on the PATH or from pyenv."""
    for minor in range(11, NEWEST + 1):
        own = sorted((Path.home() / ".pyenv" / "versions").glob(f"3.{minor}.*/bin/python"))
        for found in filter(None, (shutil.which(f"python3.{minor}"), *map(str, own))):
            if subprocess.run([found, "-c", "import ensurepip"], capture_output=True).returncode == 0:
                yield minor, found


def _bounds() -> list[str]:
    """Every dependency at the lower bound of its range."""
    extras = PROJECT["optional-dependencies"]
    ranges = [Requirement(one) for one in (*PROJECT["dependencies"], *(one for name in EXTRAS for one in extras[name]))]
    lower = {one.name: re.findall(r">=([\d.]+)", str(one.specifier)) for one in ranges}
    return [f"{name}=={found[0]}" for name, found in lower.items() if found]


def _prepared(name: str, python: str, pinned: list[str]) -> str:
    """The Python of an environment with the package, which is made again if the versions changed."""
    home, constraints = FOLDER / name, FOLDER / f"{name}.txt"
    content = "\n".join(pinned)
    if not (constraints.is_file() and constraints.read_text() == content):
        shutil.rmtree(home, ignore_errors=True)
        subprocess.run([python, "-m", "venv", str(home)], check=True)
    own = str(home / "bin" / "python")
    constraints.write_text(content)
    pip = [own, "-m", "pip", "install", "--quiet", "--upgrade", "--constraint", str(constraints)]
    try:
        subprocess.run([*pip, "--editable", f".[{','.join(EXTRAS)}]", *TESTS_NEED], check=True)
    except subprocess.CalledProcessError:
        constraints.unlink()
        raise
    return own


def _versions(python: str) -> str:
    names = ("torch", "transformers", "numpy", "tokenizers", "huggingface_hub")
    script = (
        "import sys; from importlib.metadata import version; print(sys.version.split()[0], *map(version, sys.argv[1:]))"
    )
    found = subprocess.run([python, "-c", script, *names], check=True, capture_output=True, text=True).stdout.split()
    return ", ".join(f"{name} {version}" for name, version in zip(("Python", *names), found, strict=True))


if __name__ == "__main__":
    main(sys.argv[1:])
