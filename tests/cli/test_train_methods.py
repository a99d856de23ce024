"""`outpace train METHOD`, run as a user runs it, on a tiny model."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors import safe_open
from safetensors.torch import load_file

import outpace
from outpace.cli import train as train_methods
from outpace.data.answers import read_answers
from outpace.drafters.kinds import KINDS
from outpace.lib.errors import InvalidRequest, ModelError
from tests.cli.runner import assert_loaded_once, last_json, run_json
from tests.cli.runner import run as command
from tests.unit.models.tiny import byte_tokenizer, save_tiny_model
from tests.unit.train.logs import read_log

# Of steps, passes and sequences: as few as show that everything runs.
SMALL = ("training.max_steps=4", "training.batch_size=4", "data.held_out=2", "training.precision=float32",
         "training.dtype=float32", "training.evaluate_every=2", "training.save_every=2",
         "regenerate.max_new_tokens=12", "regenerate.batch_size=4")  # fmt: skip
NET = {"medusa": ("net.heads=2",), "draft-lm": ("net.layers=1",)}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"), max_position_embeddings=512)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    rows = [{"id": f"p{at}", "turns": [f"Say {at}.", "Again."][: 1 + at % 2]} for at in range(9)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def given(target: Path, prompts: Path | str) -> list[str]:
    return ["--target", str(target), "--prompts", str(prompts), "--device", "cpu", "--dtype", "float32"]


@pytest.fixture(scope="module")
def answers(target: Path, prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target's answers to all prompts, as a run makes them."""
    out = tmp_path_factory.mktemp("answers") / "made"
    made = command("train", "regenerate", *given(target, prompts), "--out", str(out), "--max-new-tokens", "12")
    assert_loaded_once(made.stderr, str(target))
    return out


def arguments(method: str, target: Path, prompts: Path | str, out: Path, *more: str) -> list[str]:
    return ["train", method, *given(target, prompts), "--out", str(out), *SMALL, *NET.get(method, ()), *more]


def run(method: str, target: Path, prompts: Path | str, out: Path, *more: str) -> Any:
    return run_json(*arguments(method, target, prompts, out, *more))


def test_precisions_follow_each_other(target: Path, prompts: Path, answers: Path, tmp_path: Path) -> None:
    """Guards against a second run of a process, a notebook's say, that has to take the precision of the first."""
    precisions = []
    for name, precision in (("one", "float32"), ("two", "bfloat16"), ("three", "float32")):
        more = ("--answers", str(answers), f"training.precision={precision}")
        run("medusa", target, prompts, tmp_path / name, *more)
        precisions.append(json.loads((tmp_path / name / "provenance.json").read_text())["precision"])
    assert precisions == ["no", "bf16", "no"]


def test_a_run_that_goes_on_shows_its_own_pace(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a log without the time left, and steps that are counted from where a run resumed."""
    monkeypatch.setattr(sys.modules["outpace.cli.options"], "monotonic", iter((0.0, 0.6, 1.2)).__next__)
    with ExitStack() as bars:
        shown = train_methods.Shown(bars)
        for step in (4, 5, 6):  # it resumes after the fourth
            shown.step({"step": step, "steps": 6})
    assert re.findall(r"steps: (\d/\d), (\S+) left", capsys.readouterr().err) == [
        ("5/6", "0:00:01"),
        ("6/6", "0:00:00"),
    ]


def test_a_bar_on_the_terminal_leaves_the_json_alone(
    target: Path, prompts: Path, answers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against an empty file after `outpace train ... > run.json` in a terminal, whose standard error has the
    bar: the JSON was printed while the bar redirected standard output to it."""
    monkeypatch.setenv("TERM", "xterm")
    notes = Console(stderr=True, force_terminal=True, markup=False)
    monkeypatch.setattr(sys.modules["outpace.cli.options"], "notes", notes)
    done = run("medusa", target, prompts, tmp_path / "run", "--answers", str(answers))
    assert (done["step"], done["steps"]) == (4, 4)


@pytest.mark.costly
@pytest.mark.parametrize("method", KINDS)
def test_a_drafter_from_prompts(method: str, target: Path, prompts: Path, tmp_path: Path) -> None:
    """Guards against a chain of steps of which one does not fit the next, up to drafting with what was written."""
    done = run(method, target, prompts, tmp_path / "run")
    assert (done["step"], done["steps"]) == (4, 4)
    assert done["best"] >= 1.0
    assert len(list(read_answers(tmp_path / "run" / "answers"))) == 9
    provenance = json.loads((tmp_path / "run" / "provenance.json").read_text())
    assert provenance["run"]["method"] == method
    assert provenance["run"]["settings"]["training"]["max_steps"] == 4
    assert provenance["versions"]["torch"] == torch.__version__
    name = {"draft-lm": "linear"}.get(method, method)
    model = outpace.load(str(target), name, drafter=done["drafter"], dtype="float32", device="cpu")
    words = [{"role": "user", "content": "Say 3."}]
    drafted, plain = (model.generate(words, max_new_tokens=20, method=which) for which in (name, "plain"))
    assert drafted.token_ids == plain.token_ids
    assert drafted.metrics.drafted > 0


def test_going_on_and_refusing(target: Path, prompts: Path, tmp_path: Path) -> None:
    """Guards against a finished run that trains again, one that goes on with other settings or prompts, and one that
    cannot go on after more prompts were tried: their answers were stored with its own before they were refused."""
    done = run("medusa", target, prompts, tmp_path / "run")
    assert run("medusa", target, prompts, tmp_path / "run", "training.keep=5") == done, (
        "how many states are kept is free"
    )
    with pytest.raises(InvalidRequest, match=r"settings\.training\.seed=0, and this one has 4294967296"):
        run("medusa", target, prompts, tmp_path / "run", "training.seed=4294967296")
    with pytest.raises(InvalidRequest, match=r"settings\.training\.max_steps=4, and this one has 6"):
        run("medusa", target, prompts, tmp_path / "run", "training.max_steps=6")
    open_ended = "training.schedule=wsd"
    run("medusa", target, prompts, tmp_path / "wsd", open_ended)
    log = tmp_path / "wsd" / "log.jsonl"
    before = log.read_text()
    run("medusa", target, prompts, tmp_path / "wsd", open_ended, "training.max_steps=6")
    assert log.read_text().startswith(before)
    assert '"step": 6' in log.read_text().removeprefix(before)
    other = tmp_path / "other.jsonl"
    other.write_text(prompts.read_text().replace("Say 0", "Tell 0"))
    with pytest.raises(InvalidRequest, match="'p0' was another prompt when it was answered"):
        run("medusa", target, other, tmp_path / "run")
    other.write_text(prompts.read_text() + '{"id": "more", "turns": ["More?"]}\n')
    with pytest.raises(InvalidRequest, match=r"prompts\.sha256="):
        run("medusa", target, other, tmp_path / "run")
    assert run("medusa", target, prompts, tmp_path / "run") == done, "the refused prompt was not answered"


def test_answers_are_joined_only_with_their_target(target: Path, prompts: Path, answers: Path, tmp_path: Path) -> None:
    """Guards against training on answers of another model, or under another template."""
    folder = shutil.copytree(target, tmp_path / "changed")
    byte_tokenizer("{% for m in messages %}{{ m['content'] }}{% endfor %}").save_pretrained(folder)
    with pytest.raises(InvalidRequest, match="chat_template="):
        run("medusa", folder, prompts, tmp_path / "third", "--answers", str(answers))
    with pytest.raises(InvalidRequest, match="no prompt 'p"):
        run("medusa", target, f"{prompts}:5", tmp_path / "fourth", "--answers", str(answers))


@pytest.mark.parametrize(
    ("more", "complaint"),
    [
        (("training.batch_size=3",), "training.batch_size=3: must be a multiple"),
        (("data.held_out=9",), "data.held_out=9: leaves nothing of 9 different prompts"),
        (("--start", "nothing/there"), "start='nothing/there': no such folder"),
        (("--features", "nowhere"), "features='nowhere': no readable about.json"),
    ],
)
def test_a_mistake_is_reported_before_answers_are_made(
    more: tuple[str, ...], complaint: str, target: Path, prompts: Path, tmp_path: Path
) -> None:
    """Guards against hours of answers before a word that was mistyped, and an estimate of a run that is refused."""
    for only in ((), ("--dry-run",)):
        with pytest.raises((InvalidRequest, ModelError), match=complaint):
            run("medusa", target, prompts, tmp_path / "run", *more, *only)
    assert not (tmp_path / "run" / "answers").exists()


def test_a_mistake_is_refused_before_the_target_is_loaded(
    target: Path, prompts: Path, answers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against minutes of loading, or a folder of answers, before the refusal of a folder that holds none, of two
    prompts with one id, of prompts that all ask the same, and of a format of features."""
    monkeypatch.setattr("outpace.models.loading.load.read_model", None)  # no model can be loaded
    twice, out, asked = tmp_path / "twice.jsonl", tmp_path / "run", given(target, prompts)
    twice.write_text(prompts.read_text() * 2)
    alike = tmp_path / "alike.jsonl"
    alike.write_text("".join(json.dumps({"id": f"p{at}", "turns": ["Hi."]}) + "\n" for at in range(9)))
    for only in ((), ("--dry-run",)):
        with pytest.raises(ModelError, match=r"answers='nowhere': no readable about\.json"):
            run("medusa", target, prompts, out, "--answers", "nowhere", *only)
        with pytest.raises(InvalidRequest, match=r"regenerate\.max_new_tokens=13: the answers in .* made with 12"):
            run("medusa", target, prompts, out, "--answers", str(answers), "regenerate.max_new_tokens=13", *only)
        with pytest.raises(InvalidRequest, match="'p0' occurs twice"):
            run("medusa", target, twice, out, *only)
        with pytest.raises(InvalidRequest, match=r"data.held_out=2: leaves nothing of 1 different prompts"):
            run("medusa", target, alike, out, *only)
    for step in ("capture medusa", "transitions"):
        with pytest.raises(ModelError, match=r"answers='nowhere': no readable about\.json"):
            run_json("train", *step.split(), *asked, "--answers", "nowhere", "--out", str(tmp_path / "made"))
    of_all = [*asked, "--answers", str(answers), "--out", str(tmp_path / "made")]
    with pytest.raises(InvalidRequest, match="stored='int4'"):
        run_json("train", "capture", "medusa", *of_all, "--stored", "int4")
    with pytest.raises(InvalidRequest, match="'p0' occurs twice"):
        run_json("train", "regenerate", *given(target, twice), "--out", str(tmp_path / "made"))
    assert not (tmp_path / "made").exists()
    assert not (out / "answers").exists()


def test_what_a_run_has_stored_counts_as_room(
    target: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against hours of training whose drafter cannot be written, and a run that cannot go on because its own
    states take the room that they need."""
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: type("Usage", (), {"free": 10})())
        with pytest.raises(InvalidRequest, match="states and drafter need"):
            run("medusa", target, prompts, tmp_path / "run")
    assert not (tmp_path / "run" / "states").exists()
    done = run("medusa", target, prompts, tmp_path / "run")
    files = [file for name in ("states", "drafter") for file in (tmp_path / "run" / name).rglob("*") if file.is_file()]
    needed = sum(file.stat().st_size for file in files) + 10
    monkeypatch.setattr("outpace.train.run.disk_needed", lambda objective, keep: needed)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: type("Usage", (), {"free": 10})())
    assert run("medusa", target, prompts, tmp_path / "run") == done
    monkeypatch.setattr(shutil, "disk_usage", lambda path: type("Usage", (), {"free": 9})())
    with pytest.raises(InvalidRequest, match="states and drafter need"):
        run("medusa", target, prompts, tmp_path / "run")


def test_dry_run(target: Path, prompts: Path, answers: Path, tmp_path: Path) -> None:
    """Guards against a plan that is not that of the run, or that begins it."""
    planned = run("medusa", target, prompts, tmp_path / "run", "--dry-run")
    assert not list(tmp_path.iterdir())
    assert planned["steps"] == 4
    assert planned["parameters"] == 2 * (48 * 48 + 48 + 264 * 48)
    assert planned["sequences"] == 13, "turns"
    assert planned["tokens"]["supervised"] == 13 * 12
    assert planned["hours"].keys() == {"answers", "training"}
    assert all(value >= 0 for value in planned["hours"].values())
    assert planned["memory_gb"] > 0.05
    known = run("medusa", target, prompts, tmp_path / "more", "--dry-run", "--answers", str(answers))
    own = sum(len(answer) for one in read_answers(answers) for answer in one.answers)
    assert known["tokens"]["supervised"] == own
    assert known["hours"].keys() == {"training"}
    assert not (tmp_path / "more").exists()


def test_a_dry_run_holds_out_what_the_run_does(target: Path, prompts: Path, answers: Path, tmp_path: Path) -> None:
    """Guards against an estimate that holds out a share of all prompts, where few are answered: it left none of them to
    train on."""
    more = [json.dumps({"id": f"q{at}", "turns": [f"Say {at}."]}) for at in range(400)]
    (tmp_path / "more.jsonl").write_text(prompts.read_text() + "\n".join(more) + "\n")
    line = arguments("medusa", target, tmp_path / "more.jsonl", tmp_path / "run", "--answers", str(answers))
    planned = run_json(*(one for one in line if one != "data.held_out=2"), "--dry-run")
    assert planned["sequences"] == 13


def test_prompts_that_do_not_fit_are_named(target: Path, prompts: Path, tmp_path: Path) -> None:
    """Guards against prompts that are lost on the way without a word."""
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"id": "long", "turns": ["word " * 200]}) + "\n" + prompts.read_text())
    assert command(*arguments("medusa", target, file, tmp_path / "plan"), "--dry-run").exit_code == 0
    result = command(*arguments("medusa", target, file, tmp_path / "run"))
    assert result.exit_code == 0
    assert "cut long: turn 1:" in result.stderr
    known = ("--answers", str(tmp_path / "run" / "answers"))
    result = command(*arguments("medusa", target, file, tmp_path / "known", *known))
    assert result.exit_code == 0
    assert "1 of 10 prompts are left out: they have no answers" in result.stderr


def test_one_gpu_is_not_chosen_by_number(target: Path, prompts: Path, tmp_path: Path) -> None:
    """Guards against a device that is asked for and quietly not taken."""
    with pytest.raises(InvalidRequest, match="CUDA_VISIBLE_DEVICES"):
        run("medusa", target, prompts, tmp_path / "run", "--device", "cpu:0")


def test_a_drafter_on_the_targets_embedding(target: Path, prompts: Path, tmp_path: Path) -> None:
    """Guards against an embedding that is counted, kept in states, or needed to go on from one."""
    more = ("net.embedding=target", "net.intermediate_size=40")
    planned = run("draft-lm", target, prompts, tmp_path / "plan", *more, "--dry-run")
    assert planned["parameters"] == 48 * (48 + 16 + 16 + 48) + 3 * 48 * 40 + 3 * 48, "one layer and the last norm"
    done = run("draft-lm", target, prompts, tmp_path / "run", *more)
    drafter, states = Path(done["drafter"]), tmp_path / "run" / "states"
    assert {file.name for file in drafter.iterdir()} == {"config.json", "model.safetensors"}
    largest = max(file.stat().st_size for file in states.rglob("*") if file.is_file())
    assert largest < 1.2 * 4 * 2 * planned["parameters"], "two moments"
    last = states / "step-00000004"
    trained = torch.load(last / "pytorch_model.bin", weights_only=True)
    shutil.rmtree(last)
    assert run("draft-lm", target, prompts, tmp_path / "run", *more) == done
    again = torch.load(last / "pytorch_model.bin", weights_only=True)
    assert again.keys() == trained.keys()
    assert all(torch.equal(again[name], trained[name]) for name in trained)


def test_a_killed_run_goes_on_to_the_same_bits(target: Path, prompts: Path, answers: Path, tmp_path: Path) -> None:
    """Guards against states that a kill leaves half-written, or that lack something a run depends on."""
    settings = ("max_steps=30", "epochs=20", "evaluate_every=7", "save_every=3")
    longer = (*(f"training.{setting}" for setting in settings), "--answers", str(answers))
    run("draft-lm", target, prompts, tmp_path / "whole", *longer)
    line = [sys.executable, "-c", "import torch; torch.set_num_threads(1); from outpace.cli import main; main()"]
    line += arguments("draft-lm", target, prompts, tmp_path / "cut", *longer)
    environment = os.environ | {"PYTHONPATH": str(Path(outpace.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(line, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    log, deadline = tmp_path / "cut" / "log.jsonl", time.monotonic() + 240
    while not (log.exists() and log.read_text().count("\n") > 8):
        assert process.poll() is None, "it ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.kill()
    process.wait()
    assert json.loads(log.read_text().splitlines()[-1])["step"] < 30
    run("draft-lm", target, prompts, tmp_path / "cut", *longer)
    weights = [(tmp_path / which / "drafter" / "model.safetensors").read_bytes() for which in ("whole", "cut")]
    assert weights[0] == weights[1]
    curves = [[line.get("loss") for line in read_log(tmp_path / which)] for which in ("whole", "cut")]
    assert curves[0] == curves[1]


@pytest.mark.thorough
def test_every_process_has_the_whole_target(target: Path, prompts: Path, answers: Path, tmp_path: Path) -> None:
    """Guards against a target of zeros in all processes but the first, as `accelerate launch --use_fsdp` makes
    transformers load it."""
    run("medusa", target, prompts, tmp_path / "one", "--answers", str(answers))
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "outpace"]
    line += arguments("medusa", target, prompts, tmp_path / "two", "--answers", str(answers))
    launched = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_CPU_RAM_EFFICIENT_LOADING": "true"}
    environment = os.environ | launched | {"PYTHONPATH": str(Path(outpace.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(line, env=environment, timeout=240, capture_output=True, text=True)
    # Not its status: threads of a process group that outlive it end a process by SIGABRT, now and then.
    one, two = ([each["loss"] for each in read_log(tmp_path / name) if "loss" in each] for name in ("one", "two"))
    assert two == pytest.approx(one, rel=1e-3), done.stderr[-3000:]


def capture(method: str, target: Path, prompts: Path | str, answers: Path, out: Path, *more: str) -> Any:
    options = [*given(target, prompts), "--answers", str(answers), "--out", str(out)]
    result = command("train", "capture", method, *options, *SMALL, *NET.get(method, ()), *more)
    if isinstance(result.exception, InvalidRequest):
        raise result.exception
    assert_loaded_once(result.stderr, str(target))
    assert "sequences" in result.stderr, "the size is printed first"
    return last_json(result)


def test_captured_features_train_the_same(
    target: Path, prompts: Path, answers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against features of other sequences, taps or lengths, and a capture that cannot go on."""
    run("medusa", target, prompts, tmp_path / "run", "--answers", str(answers), "net.head=target")
    first = capture("medusa", target, prompts, answers, tmp_path / "features", "net.head=target")
    assert (first["captured"], first["before"]) == (13, 0)
    assert first["bytes"] == 2 * 48 * sum(file_tokens(target, prompts, answers))
    again = capture("medusa", target, prompts, answers, tmp_path / "features", "net.head=target")
    assert (again["captured"], again["before"]) == (0, 13)
    stored = ("--answers", str(answers), "--features", str(tmp_path / "features"), "net.head=target")
    run("medusa", target, prompts, tmp_path / "offline", *stored)
    with monkeypatch.context() as changed:
        changed.setattr("outpace.models.frozen.FrozenTarget.features", None)
        run("medusa", target, prompts, tmp_path / "plan", "--dry-run", *stored)  # times no passes of the target
    curves = [[line["loss"] for line in read_log(tmp_path / which) if "loss" in line] for which in ("run", "offline")]
    assert curves[1] == pytest.approx(curves[0], rel=1e-2), "bfloat16 on the way"
    assert curves[1] != curves[0]
    with pytest.raises(InvalidRequest, match=r"captured with taps=.3., and this run needs .*capture them for this"):
        run("eagle3", target, prompts, tmp_path / "other", *stored[:4])
    shutil.copytree(answers, tmp_path / "others")
    about = json.loads((tmp_path / "others" / "about.json").read_text())
    about["sampling"]["temperature"] = 0.7
    (tmp_path / "others" / "about.json").write_text(json.dumps(about))
    with pytest.raises(InvalidRequest, match="captured for answers with sampling="):
        run("medusa", target, prompts, tmp_path / "mixed", "--answers", str(tmp_path / "others"), *stored[2:])
    (next((tmp_path / "features").glob("part-*"))).unlink()
    with pytest.raises(InvalidRequest, match="13 of 13 sequences are not in it"):
        run("medusa", target, prompts, tmp_path / "missing", *stored)


def test_transitions_are_what_drafting_begins_with(target: Path, prompts: Path, answers: Path, tmp_path: Path) -> None:
    """Guards against a file that no method reads, features that say something else than the target, and a command that
    loads in silence."""
    capture("draft-lm", target, prompts, answers, tmp_path / "features")
    options = [*given(target, prompts), "--answers", str(answers), "--max-length", "96"]
    said = []
    for name, more in (("run", []), ("read", ["--features", str(tmp_path / "features")])):
        made = command("train", "transitions", *options, "--out", str(tmp_path / f"{name}.safetensors"), *more)
        assert_loaded_once(made.stderr, str(target))
        said.append(last_json(made))
    assert all(said[0][name] == said[1][name] for name in ("sequences", "tokens", "rows", "of", "pairs"))
    assert said[0]["sequences"] == 13
    assert said[0]["tokens"] == sum(file_tokens(target, prompts, answers))
    tables = [load_file(tmp_path / f"{name}.safetensors") for name in ("run", "read")]
    with safe_open(tmp_path / "run.safetensors", framework="pt") as file:
        assert file.metadata().items() >= {"target": str(target), "sequences": "13", "format": "outpace.warm"}.items()
    assert torch.equal(tables[0]["pairs"], tables[1]["pairs"])
    alike = (tables[0]["pair_successors"] == tables[1]["pair_successors"]).float().mean()
    assert 0.8 < alike < 1, "bfloat16 on the way"
    assert len(tables[0]["pairs"]) == said[0]["pairs"] > said[0]["rows"] > 0
    cut = ["--max-length", "28", "--features", str(tmp_path / "features"), "--out", str(tmp_path / "cut.safetensors")]
    assert run_json("train", "transitions", *options, *cut)["tokens"] < said[0]["tokens"], "of longer features"
    model = outpace.load(str(target), "plain", dtype="float32", device="cpu")
    steps, asked = [], [{"role": "user", "content": "Say 3."}]
    for warm in ("none", tmp_path / "run.safetensors"):
        method = f"outpace:draft=none,budget=8,retrieve=matrix,warm={warm}"
        answer, plain = (model.generate(asked, max_new_tokens=12, method=which) for which in (method, "plain"))
        assert answer.token_ids == plain.token_ids
        steps.append(answer.metrics.steps)
    assert steps[1] < steps[0], "it has read this very answer"
    with pytest.raises(InvalidRequest, match="exists already"):
        run_json("train", "transitions", *options, "--out", str(tmp_path / "run.safetensors"))


def file_tokens(target: Path, prompts: Path, answers: Path) -> list[int]:
    """Lengths of all sequences, counted apart from the code that trains on them."""
    model = outpace.load(str(target), "plain", dtype="float32", device="cpu")
    rows = {row["id"]: row["turns"] for row in map(json.loads, prompts.read_text().splitlines())}
    lengths = []
    for one in read_answers(answers):
        messages: list[dict[str, str]] = []
        for asked, answer in zip(rows[one.id], one.answers, strict=True):
            messages.append({"role": "user", "content": asked})
            lengths.append(len(model.codec.encode_chat(messages)) + len(answer))
            messages.append({"role": "assistant", "content": model.codec.decode(answer)})
    return lengths


def test_a_folder_at_home(target: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against `--out=~/run` with answers at home and the drafter in a folder named ~."""
    for variable in ("HOME", "USERPROFILE"):  # the second one on Windows
        monkeypatch.setenv(variable, str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    run_json("train", "draft-lm", *given(target, prompts), "--out=~/run", *SMALL, *NET["draft-lm"])
    assert {"answers", "drafter", "provenance.json"} <= {path.name for path in (tmp_path / "home" / "run").iterdir()}
    assert not (tmp_path / "~").exists()
