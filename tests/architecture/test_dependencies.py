"""The dependencies that pyproject.toml names, against what the code imports."""

import re
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from outpace.cli import EXTRAS
from tests.architecture.test_arrows import SOURCE, imports

ROOT = Path(__file__).parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OPTIONAL = {
    "serve": "serve",
    "train": "train",
    "drafters/training": "train",
    "endpoint": "bench",
    "bench/paper": "plots",
    "vllm": "vllm",
    "sampling/grammar.py": "grammar",
    "models/tokenizer.py": "grammar",
}
"""The extra whose packages a folder or file may import too."""
COMES_WITH = {"pydantic_core": "pydantic", "starlette": "fastapi", "yaml": "pyyaml", "triton": "torch"}
"""Modules of packages with another name, or that a dependency brings: triton comes with torch's builds for GPUs."""


def _names(requirements: Iterable[str]) -> set[str]:
    return {re.split(r"[^\w.-]", one)[0].lower().replace("-", "_") for one in requirements}


def _imported(path: Path) -> set[str]:
    """Packages that a file imports."""
    modules = {module.partition(".")[0] for module in imports(path)}
    return {COMES_WITH.get(one, one) for one in modules - sys.stdlib_module_names - {"outpace"}}


def test_what_is_imported_is_what_is_installed() -> None:
    """Guards against a plain installation that fails at an import, and one that is larger than it needs to be."""
    always, extras = _names(PROJECT["dependencies"]), PROJECT["optional-dependencies"]
    used = set[str]()
    for path in SOURCE.rglob("*.py"):
        name = path.relative_to(SOURCE).as_posix()
        optional = {extra for place, extra in OPTIONAL.items() if f"{name}/".startswith(f"{place}/")}
        imported = _imported(path)
        missing = imported - always - _names(one for extra in optional for one in extras[extra])
        assert not missing, f"{name} imports {missing}, which its users need not have"
        used |= imported
    assert always <= used | {"pip"}, f"no file imports {always - used}"  # which is run, not imported


def test_a_missing_package_is_named_with_the_extra_that_has_it() -> None:
    """Guards against advice to install an extra that does not exist or lacks the package."""
    for module, extra in EXTRAS.items():
        assert COMES_WITH.get(module, module) in _names(PROJECT["optional-dependencies"][extra])
