"""The architecture as a test: which package may import which, and rules for all of the code."""

import ast
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "outpace"

ARROWS: dict[str, set[str]] = {
    "lib": set(),
    "budget": set(),
    "core": {"lib", "budget"},
    "sampling": {"lib", "core", "kernels"},
    "kernels": {"lib", "core", "cache"},
    "cache": {"lib"},
    "gpu": {"lib", "cache"},
    "data": {"lib"},
    "models": {"lib", "core", "kernels", "cache", "gpu"},
    "engine": {"lib", "core", "budget", "sampling"},
    "trees": {"lib", "core", "budget", "sampling", "kernels", "gpu"},
    "drafters": {"lib", "core", "sampling", "kernels", "cache", "gpu", "models", "trees"},
    "methods": {"lib", "core", "models", "trees", "drafters"},
    "testing": {"core", "sampling", "engine", "trees", "drafters"},
    "chat": {"lib", "core", "models", "engine"},
    "endpoint": {"lib", "core"},
    "api": {"lib", "core", "budget", "kernels", "models", "engine", "methods", "chat"},
    "plugins": {"lib", "core", "models", "engine", "drafters", "methods"},
    "bench": {"lib", "core", "data", "kernels", "endpoint", "models", "trees", "drafters", "methods", "api"},
    "vllm": {"lib", "core", "budget", "models", "trees", "drafters", "methods"},
    "doctor": {"lib", "core", "data", "kernels", "models", "drafters", "methods", "api", "bench"},
    "serve": {"lib", "core", "models", "drafters", "methods", "engine", "api"},
    "train": {"lib", "core", "data", "endpoint", "models", "drafters", "engine", "api", "bench"},
    "cli": {"lib", "core", "data", "kernels", "endpoint", "models", "trees", "drafters", "methods", "api", "bench"}
    | {"doctor", "serve", "train", "vllm"},
    "__main__": {"cli"},
}
"""What each package may import, without exceptions."""
IMPORTS_TRANSFORMERS = {"models", "drafters", "cache", "sampling", "bench/demo.py", "cli", "plugins", "train"}


def _files() -> list[Path]:
    return sorted(path for path in SOURCE.rglob("*.py") if path.name != "__init__.py" or path.parent != SOURCE)


def imports(path: Path) -> Iterator[str]:
    """Modules that a file imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def _package(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def test_arrows() -> None:
    """Guards against imports that break the order of the packages, and arrows that nothing needs: the engine might have
    imported models, although it knows targets by their protocol alone."""
    used = {package: set[str]() for package in ARROWS}
    for path in _files():
        package, name = _package(path), str(path.relative_to(SOURCE))
        for module in imports(path):
            parts = module.split(".")
            if parts[0] == "outpace" and len(parts) > 1 and parts[1] != package:
                assert parts[1] in ARROWS[package], (
                    f"{name} imports {module}: {package} may import {sorted(ARROWS[package])}"
                )
                used[package].add(parts[1])
    assert used == ARROWS


def test_transformers_stays_in_its_packages() -> None:
    """Guards against model code creeping into the engine, and against a slow `import outpace`."""
    for path in _files():
        name = str(path.relative_to(SOURCE))
        if not {_package(path), name} & IMPORTS_TRANSFORMERS:
            assert not [module for module in imports(path) if module.split(".")[0] == "transformers"], name


def test_only_the_engine_loops_over_target_forwards() -> None:
    """Guards against a second generate loop (rule 1): a target's passes are called from engine/ alone."""
    callers = set()
    for path in _files():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                owner = ast.unparse(node.func.value)
                if node.func.attr in ("run_pass", "forward", "prefill") and owner.split(".")[-1] == "target":
                    callers.add(_package(path))
    assert callers == {"engine"}


def test_no_copies_of_model_code() -> None:
    """Guards against patched copies of model code (rule 2)."""
    assert not list(SOURCE.rglob("modeling_*"))


def test_no_module_level_state() -> None:
    """Guards against hidden state (rule 5): module globals are constants, so no name at module level is lower case."""
    for path in _files():
        for node in ast.parse(path.read_text()).body:
            targets = node.targets if isinstance(node, ast.Assign) else []
            names = [target.id for target in targets if isinstance(target, ast.Name)]
            variable = [name for name in names if name == name.lower() and not name.startswith("__")]
            assert not variable or path.parent.name == "cli", f"{path.name}: {variable}"


def test_long_argument_lists_have_names() -> None:
    """Guards against calls with more than six positional arguments, which are hard to read."""
    for path in _files():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and "add_row" not in ast.unparse(node.func):
                assert len(node.args) < 7 or any(isinstance(one, ast.Starred) for one in node.args), (
                    f"{path.relative_to(SOURCE)}:{node.lineno} passes {len(node.args)} arguments by position"
                )


def test_files_and_functions_stay_readable() -> None:
    """Guards against files above 450 lines and functions above 80."""
    for path in _files():
        text = path.read_text()
        assert len(text.splitlines()) <= 450, f"{path.relative_to(SOURCE)} has {len(text.splitlines())} lines"
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                length = (node.end_lineno or 0) - node.body[0].lineno + 1
                assert length <= 80, f"{path.relative_to(SOURCE)}:{node.name} has {length} lines"


def test_every_package_is_described() -> None:
    """Guards against a package that the architecture's table leaves out."""
    text = (SOURCE.parents[1] / "docs" / "architecture.md").read_text()
    assert not [package for package in set(ARROWS) - {"__main__"} if f"`{package}`" not in text]


def test_no_class_name_is_defined_twice() -> None:
    """Guards against two classes that a reader, a search and a traceback cannot tell apart."""
    places: dict[str, list[str]] = {}
    for path in _files():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(str(path.relative_to(SOURCE)))
    assert not {name: found for name, found in places.items() if len(found) > 1}
