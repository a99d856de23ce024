"""Settings: a recipe, a file over it, options over both, and nothing that is silently ignored."""

import ast
from pathlib import Path
from typing import Any

import pytest
import typer
from pydantic import Field

import outpace
from outpace.cli.train import train_app
from outpace.drafters.kinds import KINDS
from outpace.drafters.training.settings import (
    DataSettings,
    RegenerateSettings,
    Section,
    TrainingSettings,
    TrainSettings,
    assemble,
    training_of,
)
from outpace.lib.errors import InvalidRequest


class Net(Section):
    layers: int = Field(default=5, ge=1)


class Loss(Section):
    gamma: float | None = None


RECIPE = {"training": {"learning_rate": 1e-4, "clip": 0.5}}


def settings(file: Path | None = None, *overrides: str) -> TrainSettings:
    return assemble(Net, Loss, RECIPE, file, overrides)


def test_later_sources_win(tmp_path: Path) -> None:
    """Guards against a file that resets what it does not mention, and numbers that YAML reads as text."""
    file = tmp_path / "run.yaml"
    file.write_text("net:\n  layers: 2\ntraining:\n  learning_rate: 6e-4\n  epochs: 3\n")
    chosen: Any = settings(file, "training.epochs=1", "objective.gamma=4", "training.patience=null")
    assert (chosen.net.layers, chosen.objective.gamma) == (2, 4.0)
    assert chosen.training.learning_rate == 6e-4, "the file over the recipe"
    assert chosen.training.epochs == 1, "the option over the file"
    assert chosen.training.clip == 0.5, "the recipe where nobody says otherwise"
    assert chosen.training.patience is None
    assert chosen.training.batch_size == 16, "the default"


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("training.lr=1", r"training\.lr: no such setting; there are batch_size, betas"),
        ("net.heads=3", r"net\.heads: no such setting; there are layers"),
        ("trainer.epochs=3", r"trainer: no such setting; there are data, net, objective, regenerate, training"),
        ("net.layers=0", r"net\.layers=0: input should be greater than or equal to 1"),
        ("training.epochs=nan", "training.epochs="),
        ("training.epochs=.nan", "finite number"),
        ("training.precision=fp8", "'auto', 'bfloat16' or 'float32'"),
        ("epochs=3", "section.field=value"),
        ("training.epochs", "section.field=value"),
        ("training.epochs.x=3", "section.field=value"),
        ("training.epochs=[1", "not YAML"),
        ("data.max_length=abc", "data.max_length='abc'"),
    ],
)
def test_bad_settings_are_named(override: str, said: str) -> None:
    """Guards against a misspelt setting that is ignored, and a run that does not do what was asked."""
    with pytest.raises(InvalidRequest, match=said):
        settings(None, override)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("- 1\n", "must hold sections"),
        ("training: 3\n", "training must be a section"),
        ("training: [1\n", "cannot be read as YAML"),
        ("training:\n  epoch: 1\n", "training.epoch: no such setting"),
        ("!!python/object/apply:os.getcwd []\n", "cannot be read as YAML"),
    ],
)
def test_bad_files_are_named(content: str, said: str, tmp_path: Path) -> None:
    """Guards against files that are half read, or that run code."""
    file = tmp_path / "run.yaml"
    file.write_text(content)
    with pytest.raises(InvalidRequest, match=said):
        settings(file)
    with pytest.raises(InvalidRequest, match="cannot be read"):
        settings(tmp_path / "missing.yaml")


def test_an_empty_file_changes_nothing(tmp_path: Path) -> None:
    """Guards against a file of comments that is refused."""
    file = tmp_path / "run.yaml"
    file.write_text("# nothing yet\n")
    assert settings(file).model_dump() == settings().model_dump()


def test_no_default_of_training_is_written_twice() -> None:
    """Guards against an option of a command or a function with its own default, as `outpace train regenerate` had: 192
    tokens and 16 conversations, where a run's own regeneration had 512 and 32."""
    sections: list[Any] = [DataSettings, RegenerateSettings, TrainingSettings]
    for kind in KINDS:
        sections += [training_of(kind).net, training_of(kind).objective]
    names = {name for section in sections for name in section.model_fields}
    source = Path(outpace.__file__).parent
    files = [source / "cli" / "train.py", *(source / "train").glob("*.py"), *source.glob("drafters/*/objective.py")]
    written = []
    for path in (*files, *(source / "drafters" / "training").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                arguments = [*node.args.posonlyargs, *node.args.args][::-1]
                pairs = [*zip(arguments, node.args.defaults[::-1]), *zip(node.args.kwonlyargs, node.args.kw_defaults)]
                written += [
                    f"{path.name}: {node.name}({argument.arg}={default.value!r})"
                    for argument, default in pairs
                    if argument.arg in names and isinstance(default, ast.Constant) and default.value is not None
                ]
    targets = {f"train.py: {name}(dtype='auto')" for name in ("run", "capture", "transitions", "regenerate")}
    assert set(written) == targets, "of the target's weights, not of the drafter's files"
    group = typer.main.get_command(train_app)
    for command, section in (("regenerate", RegenerateSettings), ("transitions", DataSettings)):
        options = {one.name: one.default for one in group.get_command(None, command).params}  # type: ignore[attr-defined,arg-type]
        shared = options.keys() & section.model_fields.keys()
        assert shared == (set(section.model_fields) if command == "regenerate" else {"max_length"})
        assert all(options[name] == section.model_fields[name].default for name in shared)
