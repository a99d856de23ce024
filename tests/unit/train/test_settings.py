"""Settings: a recipe, a file over it, options over both, and nothing that is silently ignored."""

import ast
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import typer
from pydantic import Field

import outpace
from outpace.cli.train import train_app
from outpace.drafters.kind import Training
from outpace.drafters.kinds import KINDS
from outpace.drafters.training.settings import (
    DataSettings,
    RegenerateSettings,
    Section,
    TrainingSettings,
    TrainSettings,
    merged_settings,
    training_of,
)
from outpace.lib.errors import InvalidRequest


class Net(Section):
    layers: int = Field(default=5, ge=1)


class Loss(Section):
    gamma: float | None = None


RECIPE = {"training": {"learning_rate": 1e-4, "clip": 0.5}}


def settings(file: Path | None = None, *overrides: str) -> TrainSettings:
    training = Training(Net, Loss, Net, RECIPE)
    with patch("outpace.drafters.training.settings.training_of", return_value=training):
        return merged_settings("a kind", file, overrides)


def test_later_sources_win(tmp_path: Path) -> None:
    """Guards against a file that resets what it does not mention, and numbers that YAML reads as text."""
    file = tmp_path / "run.yaml"
    file.write_text("net:\n  layers: 2\ntraining:\n  learning_rate: 6e-4\n  epochs: 3\n")
    chosen: Any = settings(file, "training.epochs=1", "objective.gamma=4", "training.max_steps=null")
    assert (chosen.net.layers, chosen.objective.gamma) == (2, 4.0)
    assert chosen.training.learning_rate == 6e-4, "the file over the recipe"
    assert chosen.training.epochs == 1, "the option over the file"
    assert chosen.training.clip == 0.5, "the recipe where nobody says otherwise"
    assert chosen.training.max_steps is None
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
        ("training.batch_size=yes", "true and false are for flags"),
        ("training.betas=[1.0,0.9]", "less than 1"),
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
    """Guards against an option of a command or a function with its own default, as `outpace train regenerate` had."""
    sections: list[Any] = [DataSettings, RegenerateSettings, TrainingSettings]
    for kind in KINDS:
        sections += [training_of(kind).net_settings, training_of(kind).objective_settings]
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
    command = group.get_command(None, "regenerate")  # type: ignore[attr-defined,arg-type]
    options = {one.name: one.default for one in command.params}
    assert all(options[name] == field.default for name, field in RegenerateSettings.model_fields.items())


SIZES = ("intermediate_size", "heads", "kv_heads", "head_dim", "draft_vocab_size")


@pytest.mark.parametrize(
    ("kind", "overrides"),
    [
        ("dflash", "net.layers=0 net.block_size=1 net.rope_theta=inf net.layer_types=[linear] net.depth=3"),
        ("dflash", "objective.anchors=0 objective.gamma=0 objective.labels=logits objective.sampled=-1"),
        ("domino", "net.emb_dim=0 net.pure_draft_prefix_len=-1 net.shift_labels=true"),
        ("domino", "objective.strategy=curiculum objective.decay_ratio=0 objective.decay_ratio=1.5"),
        ("draft-lm", "net.embedding=mine net.layers=0 net.hidden_size=0 net.intermediate_size=0 net.depth=3"),
        ("draft-lm", "objective.chain_depth=0"),
        ("medusa", "net.heads=0 net.layers=0 net.head=mine net.depth=3"),
        ("medusa", "objective.decay=0.0 objective.decay=1.1 objective.decay=nan"),
        ("eagle3", "objective.steps=0 objective.steps=1000 objective.decay=0 objective.decay=1.5 objective.decay=nan"),
        ("eagle3", "objective.chain_depth=0 objective.step=7"),
        ("eagle3", " ".join(f"net.{size}={value}" for size in SIZES for value in (0, -3, "many", 2**30))),
        ("dart", "objective.anchors=0 objective.gamma=0 objective.gamma=-1 objective.gamma=inf objective.gammas=4"),
    ],
)
def test_bad_settings_of_a_kind_are_named(kind: str, overrides: str) -> None:
    """Guards against hours of training with a setting that is misspelt or makes no sense."""
    for override in overrides.split():
        with pytest.raises(InvalidRequest, match=override.partition("=")[0].replace(".", r"\.")):
            merged_settings(kind, None, [override])


@pytest.mark.parametrize(
    ("kind", "overrides", "said"),
    [
        ("dflash", "objective.depth_weights=d-pace objective.gamma=3", "gamma=3.0: does nothing with depth_weights=d-"),
        ("domino", "objective.strategy=teacher-forcing objective.decay_ratio=0.5", "does nothing with strategy="),
    ],
)
def test_settings_without_effect_are_refused(kind: str, overrides: str, said: str) -> None:
    """Guards against a setting that another one makes ineffective, in an ablation for example."""
    with pytest.raises(InvalidRequest, match=said):
        merged_settings(kind, None, overrides.split())


def test_recipes_of_shipped_drafters_are_read() -> None:
    """Guards against a setting that is removed and still in the files with which their cards train them further."""
    files = sorted((Path(__file__).parents[3] / "drafters").glob("*/*/recipe.yaml"))
    assert files
    for file in files:
        merged_settings(file.parent.name, file, ())


def test_a_short_run_is_measured_and_stored_too() -> None:
    """Guards against an hour of training that is lost when it stops, because defaults are those of long runs, against
    a hundred prompts of which two thirds are held out, and against settings that are stated and not heeded."""
    short, stated = settings(), settings(None, "training.evaluate_every=500", "training.save_every=500")
    names = ("evaluate_every", "save_every")
    assert [short.training.steps_between(name, 82) for name in names] == [21, 9]
    assert [short.training.steps_between(name, 9000) for name in names] == [500, 500]
    assert [stated.training.steps_between(name, 82) for name in names] == [500, 500]
    assert [short.data.held_out_of(prompts) for prompts in (3, 100, 500)] == [2, 20, 64]
    assert settings(None, "data.held_out=40").data.held_out_of(100) == 40
