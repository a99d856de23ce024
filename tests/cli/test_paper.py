"""`outpace bench paper`."""

import json
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest

from outpace import cli
from outpace.lib.errors import InvalidRequest
from tests.cli.runner import assert_refused, last_json, run


def test_bench_paper_is_a_command_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards against `bench paper` that is refused for want of prompts, the name of an exhibit that is ignored, an
    exhibit without records that loads a model, and a report that needs the model to be made again."""
    options = ("paper", "graft", "--table", "7", "--out", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["outpace", "bench", *options])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert not ended.value.code
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["claims"] == {"G17": "holds"}
    assert (tmp_path / "report.html").is_file()
    assert last_json(run(*options, "--report-only"))["bugs"] == 0


def test_verdicts_printed_are_this_runs(tmp_path: Path) -> None:
    """Guards against another machine's verdicts in the place of the run's own."""
    losses = {"tf-curr": [3.0 - n / 100 for n in range(100)], "tf": [3.2 - n / 1000 for n in range(100)]}
    for name, own in (("own", losses), ("other", {})):
        about = {"target": "smollm2-135m", "quick": False, "data": "builtin", "names": {}, "absent": {}}
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").write_text(json.dumps(about | {"losses": own}))
    folders = ("--out", str(tmp_path / "own"), "--from", str(tmp_path / "other"))
    assert last_json(run("paper", "domino", "--figure", "4", "--report-only", *folders))["claims"]["D18a"] == "holds"


def test_a_gpus_record_judges_dominos_head(tmp_path: Path) -> None:
    """Guards against the file of a GPU's record that is taken for a folder, one whose times have no verdict or
    outputs that nobody compared, and one whose head is launched one by one where that stands in for the paper's."""
    about = {"target": "smollm2-135m", "quick": False, "data": "builtin", "names": {}, "absent": {}}
    (tmp_path / "manifest.json").write_text(json.dumps(about))
    record = Path(__file__).parents[2] / "docs/figures/gpu-h200.json"
    last_json(
        run("paper", "domino", "--section", "4.3", "--report-only", "--out", str(tmp_path), "--from", str(record))
    )
    _, found = json.loads((tmp_path / "exhibits.json").read_text())
    assert "H200" in found["source"]
    verdicts = {claim["claim"]: claim["verdict"] for claim in found["claims"]}
    assert verdicts == {"D22a": "holds", "D22b": "holds", "D22c": "does not hold"}
    assert found["claims"][1]["numbers"] == (
        "Domino, fused / Domino, separate operations: 0.33, claimed at most 0.50; Domino, separate operations: "
        "measured by what stands in for it"
    )
    heads = {line["row"]: line["values"]["head_ms"]["value"] for line in found["rows"]}
    assert heads == {"DFlash": 0.0, "Domino, separate operations": 4.4247, "Domino, fused": 1.4606}
    assert {line["equal"] for line in found["rows"]} == {None}


def test_a_list_says_what_is_measured_and_makes_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against an empty folder that a list leaves behind, records that it does not see, "0 min" for a figure
    whose drafters nobody has trained, and a table of checkpoints that is called a diagram."""
    answer = SimpleNamespace(metrics=SimpleNamespace(tpot_ms=10.0))
    model = SimpleNamespace(generate=lambda *given, **options: answer)
    monkeypatch.setattr(import_module("outpace.cli.paper"), "load_for", lambda *given: model)
    options = ("paper", "domino", "--figure", "4", "--list", "--out", str(tmp_path / "own"))
    listed = run(*options)
    assert " 0 of " in listed.output, listed.exception
    assert "figure 4 also needs --drafter ttt=PATH, tf=PATH, tf-curr=PATH, dflash-as-long=PATH" in listed.output
    assert "ttt=PATH" not in run(*options, "--drafter", "ttt=a").output
    kinds = run("paper", "graft", "--table", "8", "--figure", "3", "--list", "--out", str(tmp_path / "own")).output
    assert (kinds.count("provenance"), kinds.count("diagram")) == (1, 1)
    assert not (tmp_path / "own").exists()
    about = {"target": "smollm2-135m", "quick": False, "data": "builtin", "names": {}, "absent": {}}
    (tmp_path / "own").mkdir()
    losses = {"losses": {"tf": [3.0] * 100}}
    (tmp_path / "own" / "manifest.json").write_text(json.dumps(about | losses))
    assert " 5 of " in run(*options).output


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("medusa",), "paper='medusa'"),
        (("graft", "--table", "99"), "table=99"),
        (("domino", "--section", "9"), "section=9"),
        (("graft", "--data", "nowhere"), "data='nowhere'"),
        (("graft", "--from", "nowhere", "--table", "7"), "nowhere/manifest.json: not that of"),
        (("graft", "--table", "7", "--report-only", "--quick"), "quick=True"),
        (("dynatree", "--train", "x"), "train='x'"),
        (("graft", "--drafter", "a", "--drafter", "b"), "drafter="),
        (("domino", "--drafter", "tf=a", "--drafter", "tf=b"), "each NAME once"),
        (("domino", "--figure", "4", "--drafter", "a"), "no row of these exhibits uses it; give NAME=PATH"),
        (("graft", "--table", "7", "--drafter", "a"), "no row of these exhibits uses it; leave it out"),
        (("domino", "--figure", "4", "--drafter", "other=a"), "drafter='other': no row needs it"),
        (("domino", "--figure", "4", "--list", "--train", "x"), "train='x': cannot be used when exhibits are listed"),
        (("graft", "--list", "--from", "x"), "from='x': cannot be used when exhibits are listed"),
        (("graft", "--list", "--report-only"), "report_only=True: cannot be used when exhibits are listed"),
    ],
)
def test_bad_options_are_refused(options: tuple[str, ...], text: str, tmp_path: Path) -> None:
    """Guards against options that are ignored."""
    assert_refused(run("paper", *options, "--out", str(tmp_path)), text, kind=InvalidRequest)
