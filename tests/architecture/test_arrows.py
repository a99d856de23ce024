"""The architecture as a test: who may import whom, and the rules that keep one loop one loop."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "outpace"

ARROWS: dict[str, set[str]] = {
    "core": set(),
    "sampling": {"core"},
    "cache": {"core"},
    "nets": {"core"},
    "verify": {"core", "sampling"},
    "models": {"core", "cache"},
    "drafters": {"core", "sampling", "cache", "models", "nets"},
    "shaping": {"core", "sampling", "cache", "models"},
    "engine": {"core", "sampling", "verify", "cache", "models"},
    "bench": {"core", "api"},
    "testing": {"core", "engine"},
    "chat": {"core", "models", "engine"},
    "api": {"nets", "core", "sampling", "models", "drafters", "shaping", "engine", "chat"},
    "plugins": {"core", "models", "drafters", "engine"},
    "train": {"core", "nets", "api", "bench", "engine", "models", "drafters"},
    "__main__": {"cli"},
    "cli": {"core", "api", "bench", "models", "train"},
}
# Single files that compose rooms: each exception is one arrow with its reason.
EXCEPTIONS = {
    ("drafters/fills.py", "shaping"): "it puts fills together with what leaves slots free, as the catalog does",
    ("drafters/catalog.py", "shaping"): "the catalog is the table source x shape x fill",
    ("drafters/trained.py", "shaping"): "its second page: the rows of trained drafters",
    ("drafters/model_options.py", "shaping"): "a method's options include its shape's",
    ("cli/rank_vocabulary.py", "drafters"): "the command is the door to one function of theirs",
    ("cli/count_ngrams.py", "drafters"): "the command is the door to one function of theirs",
    ("cli/warmup.py", "drafters"): "the command is the door to what a proposer of theirs has learned",
    ("cli/warmup.py", "shaping"): "and to what its gates would have done",
    ("cli/tokenize_corpus.py", "drafters"): "the command is the door to one function of theirs",
    ("bench/runner.py", "drafters"): "method names are parsed where methods are listed",
    ("bench/runner.py", "models"): "the outside yardstick, transformers' own generate, is a model's business",
    ("cli/convert.py", "nets"): "converting a drafter is a matter of files: no model is loaded",
    ("models/bare.py", "nets"): "tensors of a drafter are held against its config in one place",
    ("testing/lossless.py", "shaping"): "the empty draft is the baseline",
    ("testing/toy.py", "sampling"): "the toy's law is a keyed hash",
}
IMPORTS_TRANSFORMERS = {"models", "nets", "cache", "sampling", "bench/demo.py", "cli", "plugins", "train"}


def _files() -> list[Path]:
    return sorted(path for path in SOURCE.rglob("*.py") if path.name != "__init__.py" or path.parent != SOURCE)


def _imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def _room(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", _files(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_arrows(path: Path) -> None:
    """Guards against a room that reaches into one it must not know, from where every layering rots."""
    room, name = _room(path), str(path.relative_to(SOURCE))
    for module in _imports(path):
        parts = module.split(".")
        if parts[0] != "outpace" or len(parts) == 1:
            continue
        other = parts[1]
        if other == room or (name, other) in EXCEPTIONS:
            continue
        assert other in ARROWS[room], f"{name} imports {module}: {room} may import {sorted(ARROWS[room])}"


def test_exceptions_are_in_use() -> None:
    """Guards against exceptions that outlive their reason."""
    for name, other in EXCEPTIONS:
        used = {module.split(".")[1] for module in _imports(SOURCE / name) if module.startswith("outpace.")}
        assert other in used, f"{name} no longer imports {other}: delete the exception"


@pytest.mark.parametrize("path", _files(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_transformers_stays_in_its_rooms(path: Path) -> None:
    """Guards against model code creeping into the engine, and against a slow `import outpace`."""
    name = str(path.relative_to(SOURCE))
    if {_room(path), name} & IMPORTS_TRANSFORMERS:
        return
    assert not [module for module in _imports(path) if module.split(".")[0] == "transformers"], name


def test_only_the_engine_loops_over_target_forwards() -> None:
    """Guards against a second generate loop (rule 1): `target.forward` and `prefill` are called from engine/ alone."""
    callers = set()
    for path in _files():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                owner = ast.unparse(node.func.value)
                if node.func.attr in ("forward", "prefill") and owner.split(".")[-1] == "target":
                    callers.add(_room(path))
    assert callers == {"engine"}


def test_no_copies_of_model_code() -> None:
    """Guards against patched model files (rule 2), which drift from upstream one bug at a time."""
    assert not list(SOURCE.rglob("modeling_*"))


def test_only_the_catalog_and_the_api_name_methods() -> None:
    """Guards against rule 6 eroding: a new method is one file plus catalog lines, so nobody else names a source."""
    helpers = {
        "__init__",
        "catalog",
        "options",
        "common_options",
        "model_options",
        "scratch",
        "depthwise",
        "continuity",
        "pairs",
        "packing",
    }
    helpers |= {"tables", "frequency", "ngrams", "transition_matrix", "surroundings", "trained", "shelf"}
    helpers |= {"suffix", "corpus", "jacobi"}  # data structures that sources stand on
    helpers |= {"pair_rows", "warm_file"}  # what transitions are kept in
    helpers |= {"evidence", "best_first"}  # what the union weighs by, and how its trees grow
    helpers |= {"speculative_config"}  # other people's names of methods, none of its own
    sources = {path.stem for path in (SOURCE / "drafters").glob("*.py")} - helpers
    for path in _files():
        if path.name in ("catalog.py", "trained.py", "fills.py"):
            continue
        named = {module.rsplit(".", 1)[-1] for module in _imports(path) if module.startswith("outpace.drafters.")}
        assert not named & sources, f"{path.relative_to(SOURCE)} imports {named & sources}"


def test_no_module_level_state() -> None:
    """Guards against hidden state (rule 5): module globals are constants, so no name at module level is lower case."""
    for path in _files():
        for node in ast.parse(path.read_text()).body:
            targets = node.targets if isinstance(node, ast.Assign) else []
            names = [target.id for target in targets if isinstance(target, ast.Name)]
            variable = [name for name in names if name == name.lower() and not name.startswith("__")]
            assert not variable or path.parent.name == "cli", f"{path.name}: {variable}"


def test_files_and_functions_stay_readable() -> None:
    """Guards against the file that does everything: at most 300 lines a file, 80 a function body."""
    for path in _files():
        text = path.read_text()
        assert len(text.splitlines()) <= 300, f"{path.relative_to(SOURCE)} has {len(text.splitlines())} lines"
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                length = (node.end_lineno or 0) - node.body[0].lineno + 1
                assert length <= 80, f"{path.relative_to(SOURCE)}:{node.name} has {length} lines"
