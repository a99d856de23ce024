"""`outpace doctor` as a user runs it: what it prints, for people and machines, and its exit status."""

import json
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from outpace.doctor import machine as doctor_machine
from outpace.doctor.finding import Finding, finding
from tests.cli.runner import assert_refused, run
from tests.unit.models.tiny import save_tiny_model


def planted(remedy: str) -> Iterator[Finding]:
    yield finding("cores", "2 threads [x]", cores=2)
    yield finding("other work", "1.00 of 2", remedy)


@pytest.mark.timeout(120)
def test_a_model_and_its_method(tmp_path: Path) -> None:
    """Guards against a doctor that leaves out a part, and JSON that is not one object alone."""
    folder = str(save_tiny_model(tmp_path / "m", eos_token_id=None, generation_eos=None))
    result = run("doctor", folder, "--method", "recycle", "--dtype", "float32", "--json")
    assert result.exit_code in (0, 1), result.output
    said = json.loads(result.stdout)
    names = [one["name"] for one in said["findings"]]
    for name in ("cores", "kernels", "other work", "memory", "dtype", "pass of 16 rows", "answers", "gain"):
        assert name in names
    assert "drafter" not in names  # it needs none
    for one in said["findings"]:
        assert one["verdict"] == ("look here" if one["remedy"] else "fine")
        assert one["measured"]
    assert said["fine"] is all(one["verdict"] == "fine" for one in said["findings"])
    assert result.exit_code == (0 if said["fine"] else 1)


@pytest.mark.parametrize(("remedy", "status"), [("", 0), ("stop [it]", 1)])
def test_the_exit_status_and_what_is_printed(remedy: str, status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a script that cannot tell, remedies that are not printed, and brackets taken for markup."""
    monkeypatch.setattr(doctor_machine, "examine_machine", lambda: planted(remedy))
    result = run("doctor")
    assert result.exit_code == status
    assert "fine       cores: 2 threads [x]" in result.stdout
    if remedy:
        assert "look here  other work: 1.00 of 2\n             -> stop [it]" in result.stdout
        assert result.stdout.strip().endswith("to look at: other work (1 of 2)")
    else:
        assert result.stdout.strip().endswith("all 2 are fine")
    machine = json.loads(run("doctor", "--json").stdout)
    assert machine["fine"] is (not remedy)
    assert machine["findings"][0]["figures"] == {"cores": 2}


def test_findings_have_lines_of_their_own_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against findings behind the text of the spinner, as in "examining the machine  fine       cores"."""

    def examined() -> Iterator[Finding]:
        for one in planted("stop it"):
            time.sleep(0.3)  # the spinner is drawn
            yield one

    monkeypatch.setenv("TERM", "xterm")
    notes = Console(stderr=True, force_terminal=True, markup=False)
    monkeypatch.setattr(sys.modules["outpace.cli.options"], "notes", notes)
    monkeypatch.setattr(doctor_machine, "examine_machine", examined)
    said = run("doctor").output
    assert "examining the machine" in said
    assert "fine       cores" in said
    assert not re.search("examining the machine +(fine|look here)", said)


def test_options_of_a_model_without_one() -> None:
    """Guards against options that are passed over in silence."""
    assert_refused(run("doctor", "--method", "recycle"), "MODEL is missing")
