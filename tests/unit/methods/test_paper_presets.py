"""`as=paper`: the constants of the papers, whatever the defaults are."""

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from outpace.cli import app
from outpace.drafters.model_options import ModelOptions
from outpace.lib.errors import InvalidRequest
from outpace.methods.catalog import PRESETS, method, methods, option_kinds, parse_method

TREES: dict[str, dict[str, Any]] = {
    # EAGLE's code, (60, 7, 10), which counts the root and the levels behind the first.
    "eagle3": {
        "budget": 59, "shape": "beam", "depth": 8, "breadth": 10, "beam": None, "vocabulary": "all", "noise": False,
    },
    # Graft, sections 3.2, A.1 and C.3 and table 11.
    "graft": {
        "budget": 60, "shape": "gated", "depth": 9, "breadth": 10, "vocabulary": "all", "noise": False,
        "checkpoints": (1, 2, 6), "kept": (8, 24, 40), "thresholds": (0.15, 0.13, 0.51), "draft_all": False,
        "retrieve": "matrix", "place": "root", "reserved": 0.0, "context": 1, "warm": None,
    },
    "echo": {"budget": 60, "shape": "echo", "depth": 9, "breadth": 10, "vocabulary": "all", "noise": False},
    # Graft, appendix F.
    "graft-dflash": {
        "budget": None, "shape": "cut", "vocabulary": "all", "noise": False, "retrieve": "matrix", "place": "tail",
        "context": 1,
    },
    # Domino, section 4.1.
    "dflash": {"budget": None, "shape": "chain", "vocabulary": "all", "noise": False, "retrieve": "none"},
    "domino": {"budget": None, "shape": "chain", "vocabulary": "all", "noise": False, "pool": 0},
    # DynaTree, section 3.3 and appendix A; what these leave open is from the authors' code.
    "dynatree": {
        "budget": 256, "shape": "dynatree", "depth": 8, "base_depth": 5, "min_breadth": 1, "mid_breadth": 2,
        "max_breadth": 3, "high_confidence": 0.9, "low_confidence": 0.4, "stop_path_prob": 0.1, "deep_path_prob": 0.5,
        "min_path_prob": 0.05, "prune": "leaves", "history": "paper", "vocabulary": "all", "noise": False,
    },
    # The authors' D = 8 levels of 3, below the draft's first token, which is the pending token's only child.
    "fixed": {
        "budget": 256, "depth": 9, "breadth": 3, "root_breadth": 1, "min_path_prob": 0.1, "prune": "expansion",
        "vocabulary": "all",
    },
    "linear": {"budget": 8, "shape": "chain", "vocabulary": "all"},
    "ddd": {"budget": 59, "depth": 11, "breadth": 10, "checkpoints": (5, 7, 9), "vocabulary": "all", "noise": False},
    "fr-spec": {"budget": 59, "depth": 6, "breadth": 10, "vocabulary": None, "noise": False},
    "svip": {"budget": 40, "depth": 40, "entropy_threshold": 0.3, "vocabulary": "all"},
    "dart": {
        "budget": 60, "shape": "search", "breadth": 25, "beam": 20, "vocabulary": "all", "noise": False,
    },
    "medusa": {"budget": 63, "shape": "template", "vocabulary": "all", "noise": False},
    # Section 3: 1 + 3 + 9 + 27 drafted nodes, and 60 retrieved ones.
    "tokenswift": {
        "budget": 100, "shape": "fixed", "depth": 4, "root_breadth": 1, "breadth": 3, "min_path_prob": 0.0,
        "prune": "expansion", "reserved": 0.6, "keep": 4096, "retrieve": "both", "context": 2, "vocabulary": "all",
        "noise": False,
    },
    "lookup": {"budget": 10},
    "recycle": {"budget": 80, "shape": "template", "context": 1, "warm": None},
    "lookahead": {"budget": 55},
    "samd": {"budget": 60, "draft": "recycle", "min_match": 5, "corpus_bias": 5},
}  # fmt: skip


def resolved(text: str) -> dict[str, Any]:
    """All options of a method and the settings of its shape."""
    options = parse_method(text).options
    settings = options.shape_settings() if isinstance(options, ModelOptions) else None
    return options.model_dump() | ({} if settings is None else settings.model_dump())


@pytest.mark.parametrize("name", TREES)
def test_a_preset_has_the_constants_of_the_paper(name: str) -> None:
    """Guards against rows of a paper's table drafted with defaults of ours: `graft` took 15 nodes on a CPU."""
    found = resolved(f"{name}:as=paper")
    assert {option: found[option] for option in TREES[name]} == TREES[name]


def test_all_presets_are_checked_above_and_name_what_exists() -> None:
    """Guards against a row that no test reads, or an option that its method does not take: it would be ignored."""
    assert PRESETS["paper"].keys() == TREES.keys()
    for name, row in PRESETS["paper"].items():
        known = {option for kind in option_kinds(methods()[name].options) for option in kind.model_fields}
        assert row.keys() <= known, name


@pytest.mark.parametrize("text", ["graft:as=paper,budget=15,noise=true", "graft:budget=15,noise=true,as=paper"])
def test_options_beside_a_preset_win(text: str) -> None:
    """Guards against a preset over what was said, and against an order that matters."""
    found = resolved(text)
    assert (found["budget"], found["noise"], found["depth"], found["vocabulary"]) == (15, True, 9, "all")


def test_settings_of_another_shape_are_left_out() -> None:
    """Guards against a complaint about a setting that nobody named: `depth` is none of a chain's."""
    assert parse_method("eagle3:as=paper,shape=chain") == parse_method(
        "eagle3:shape=chain,budget=59,vocabulary=all,noise=false"
    )
    assert resolved("graft:as=paper,shape=beam,retrieve=none")["depth"] == 9


def test_a_preset_is_spelled_out_wherever_a_method_is_written() -> None:
    """Guards against a text that cannot be read back, or whose order changes from run to run, as that of a set does."""
    spec = parse_method("domino:as=paper")
    assert str(spec) == "domino:noise=false,vocabulary=all,pool=0"
    assert parse_method(str(spec)) == spec == method("domino", **{"as": "paper"})


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("graft:as=papr", r"method=graft:as=papr: as=papr: unknown preset; choose as=paper"),
        ("outpace:as=paper", r"as=paper: unknown preset; outpace has none, leave it out"),
        ("graft:as=paper,as=paper", "as is given twice"),
        ("graft:as=paper,shape=chain", "shape=chain: choose one of gated, beam"),
    ],
)
def test_what_is_no_preset_is_refused(text: str, complaint: str) -> None:
    """Guards against an unknown preset that is taken for the defaults."""
    with pytest.raises(InvalidRequest, match=complaint):
        parse_method(text)
    with pytest.raises(InvalidRequest, match="as=3: unknown preset"):
        method("graft", **{"as": 3})


def test_the_command_shows_presets() -> None:
    """Guards against presets that only the code knows."""
    run = CliRunner().invoke
    rows = {row["name"]: row["presets"] for row in json.loads(run(app, ["methods", "--json"]).stdout)["methods"]}
    assert {name for name, presets in rows.items() if presets == ["paper"]} == PRESETS["paper"].keys()
    assert json.loads(run(app, ["methods", "graft", "--json"]).stdout)["presets"]["paper"]["budget"] == 60
    shown = " ".join(run(app, ["methods", "graft"]).stdout.split())
    assert "graft:as=paper is graft:budget=60,depth=9,vocabulary=all,noise=false" in shown
    assert "preset" not in run(app, ["methods", "outpace"]).stdout
    assert "NAME:as=paper" in run(app, ["methods"]).stdout
