"""Shipped drafters from the command line: listed, the default, and in the demo."""

from pathlib import Path
from typing import Any

import pytest
import torch

from outpace.bench import demo
from outpace.data.workload import read_workload
from tests.cli.runner import run, run_json
from tests.unit.api.shipment import install, load, ship
from tests.unit.models.tiny import needs_kernels


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("root")
    ship(root)
    return root


@pytest.fixture(params=[True, False], ids=["shipped", "nothing-ships"])
def has_drafters(request: pytest.FixtureRequest, root: Path, monkeypatch: pytest.MonkeyPatch) -> bool:
    install(monkeypatch, root, root / ("drafters" if request.param else "nothing"))
    return bool(request.param)


def test_models_lists_what_ships(has_drafters: bool) -> None:
    """Guards against drafters that nobody can find, and a list that needs them."""
    (row,) = run_json("models", "list", "--json")
    names = [drafter["name"] for drafter in row["drafters"]]
    assert names == (["tiny/dflash", "tiny/domino", "tiny/draft-lm", "tiny/eagle3"] if has_drafters else [])
    assert all(drafter["parameters"] > 1000 and drafter["megabytes"] > 0.01 for drafter in row["drafters"])
    text = run("models", "list").stdout
    assert ("tiny/domino  0.0M parameters, 0.2 MB" in text) == has_drafters


@pytest.mark.usefixtures("without_kernels")
def test_commands_without_a_method_take_the_models_default(has_drafters: bool) -> None:
    """Guards against a default of some commands only, and a race without the method that users get."""
    default = "outpace:draft=domino" if has_drafters else "outpace:draft=none"
    options = ["-m", "tiny", "--max-new-tokens", "6", "--dtype", "float32", "--json"]
    assert run_json("generate", "hello", *options)["method"] == default
    report = run_json("verify", "-w", "builtin:1", *options)
    assert (report["method"], report["equal"]) == (default, 2)
    raced = run_json("bench", "-w", "builtin:1", *options)["methods"]
    assert list(raced) == list(dict.fromkeys(["plain", "lookup", "recycle", default]))


@pytest.mark.usefixtures("without_kernels")
def test_the_demo_shows_the_default(
    has_drafters: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards against a demo that fails where nothing ships, or leaves out what does."""
    pieces: list[str] = []

    def printed(text: str, **options: Any) -> None:
        pieces.append(text)
        print(text, **options)

    monkeypatch.setattr(demo, "print", printed, raising=False)
    monkeypatch.setattr(demo, "load", lambda name, **options: load("tiny", max_num_seqs=1))
    monkeypatch.setattr(demo, "ROUNDS", 1)
    monkeypatch.setattr(demo, "TOKENS", 20)
    monkeypatch.setattr(demo, "SHOW_SECONDS", 1e9)
    with pytest.raises(SystemExit) as end:
        demo.main()
    shown = capsys.readouterr().out
    assert end.value.code == 0, shown
    methods = ["plain", "lookup", "recycle", f"outpace:draft={'domino' if has_drafters else 'none'}"]
    lines = ("as you saw it", *(f"per step, equal: {method}\n" for method in methods), "output against plain")
    places = [shown.index(line) for line in lines]
    assert places == sorted(places)
    model = load("tiny", max_num_seqs=1)
    first, second = (model.encode(item.prompt(0, [])) for item in read_workload("builtin:2"))
    texts = [model.generate(prompt, max_new_tokens=20, method="plain").text for prompt in (first, second)]
    assert "".join(pieces) == "".join(texts)
    assert len(pieces) >= 20, "piece by piece"


@needs_kernels
def test_the_demo_ends_with_eight_bits(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards against a default that drafts with a net where a pass is cheaper than its drafts, and a division by zero
    where the first token takes all the time there is."""
    install(monkeypatch, root, root / "drafters")
    assert load("tiny", max_num_seqs=1).method_name == "outpace:draft=none"
    monkeypatch.setattr(demo, "load", lambda name, quantize, **options: load("tiny", quantize=quantize, **options))
    monkeypatch.setattr(demo, "ROUNDS", 1)
    monkeypatch.setattr(demo, "TOKENS", 20)
    monkeypatch.setattr(demo, "SHOW_SECONDS", 0.0)
    with pytest.raises(SystemExit) as end:
        demo.main()
    shown = capsys.readouterr().out
    assert end.value.code == 0, shown
    assert shown.count("equal: outpace:draft=none\n") == 3, "two prompts, and one in eight bits"
    assert shown.index("output against plain") < shown.index("int8, from ")


@needs_kernels
def test_the_demo_has_no_eight_bits_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a demo that ends with an error where there is a GPU: eight bits are refused there."""
    shown: list[str] = []

    def show(console: object, quantize: str, prompts: str) -> int:
        shown.append(quantize)
        return 0

    monkeypatch.setattr(demo, "_show_model", show)
    for is_there, quantized in ((True, []), (False, ["int8"])):
        monkeypatch.setattr(torch.cuda, "is_available", lambda is_there=is_there: is_there)
        shown.clear()
        with pytest.raises(SystemExit):
            demo.main()
        assert shown == ["none", *quantized]


def test_the_demo_is_short_on_a_slow_machine() -> None:
    """Guards against a demo of eight minutes: two prompts must fit in two, at 20 tokens per second and at 3."""
    for speed in (3.0, 20.0, 60.0, 400.0):
        said = min(demo.TOKENS, int(speed * demo.SHOW_SECONDS))
        rounds, tokens = demo.affordable(4, said, speed)
        assert said / speed + 4 * rounds * tokens / speed <= 60
        assert 1 <= rounds <= 3
        assert tokens >= min(said, demo.FEWEST_TOKENS) > 20
    assert demo.affordable(4, 160, 400.0) == (3, 160)
    assert demo.affordable(4, 160, 20.0) == (1, 160)
    assert demo.affordable(4, 160, 10.0) == (1, 80)
