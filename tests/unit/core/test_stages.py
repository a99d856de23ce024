"""Stages of loading: whose time they are, and where they are shown."""

import time

import pytest

from outpace.lib import stages
from outpace.lib.stages import Stages, advance, is_loading, loading, stage


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that have passed, in a list of one number."""
    now = [0.0]
    monkeypatch.setattr(stages, "perf_counter", lambda: now[0])
    return now


def test_the_line_has_the_time_of_each_stage_once(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    """Guards against a load that ends without its times, and against time counted for a stage and the one around it."""
    with loading("a/model", True):
        with stage("outer"):
            clock[0] += 1
            with stage("inner", 3):
                advance(2)
                clock[0] += 2
            clock[0] += 4
        with stage("inner"):
            clock[0] += 8
        with stage("short"):
            clock[0] += 0.01
        clock[0] += 16
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == "loaded a/model in 31.0 s: inner 10.0 s, outer 5.0 s, other 16.0 s\n"


def test_nothing_is_shown_without_a_terminal_unless_asked_for(capfd: pytest.CaptureFixture[str]) -> None:
    """Guards against bars in the log of a program that loads a model, and against control codes in a log."""
    for is_shown, lines in ((None, 0), (False, 0), (True, 1)):
        with loading("model", is_shown), stage("packing weights", 10):
            advance(5)
            time.sleep(0.15)  # longer than a bar takes to be drawn
        said = capfd.readouterr()
        assert said.out == ""
        assert len(said.err.splitlines()) == lines
        assert "\x1b" not in said.err


def test_a_terminal_has_a_bar(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """Guards against a minute without a bar, and against prints of the host program that are moved to stderr."""
    monkeypatch.setenv("FORCE_COLOR", "1")  # a terminal, for rich
    monkeypatch.setenv("TERM", "xterm")
    with loading("model"), stage("packing weights", 10):
        advance(5)
        print("a line of the host")
        time.sleep(0.25)
    said = capfd.readouterr()
    assert said.out == "a line of the host\n"
    assert "packing weights" in said.err
    assert "50%" in said.err
    assert "loaded model in" in said.err
    with loading("model", False), stage("packing weights"):
        pass
    assert capfd.readouterr().err == ""


def test_a_load_within_a_load_is_a_part_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    """Guards against two lines, or two bars over each other, where a command times what it does around a load."""
    with loading("model", True):
        with loading("model", True):
            assert is_loading()
        assert is_loading()
    assert not is_loading()
    assert capsys.readouterr().err.count("loaded") == 1


def test_a_load_that_fails_ends_its_stages(capsys: pytest.CaptureFixture[str]) -> None:
    """Guards against a line "loaded" for a model that was not, and against stages left open for the next load."""
    with pytest.raises(ValueError, match="broken"), loading("model", True), stage("reading weights"):
        raise ValueError("broken")
    assert not is_loading()
    assert capsys.readouterr().err == ""
    with stage("reading weights", 3):
        advance()  # without a load this is nothing


def test_work_after_a_stage_is_not_counted() -> None:
    """Guards against an error from a layer that is packed after its stage has ended, as heads of some ids are."""
    from rich.progress import Progress

    own = Stages(Progress(disable=True))
    with own.stage("packing weights", 3):
        own.advance(1)
    own.advance(1)
    own.restart(5)
    assert list(own.seconds) == ["packing weights"]
