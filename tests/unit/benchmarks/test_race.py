"""The race of peers, run with processes that pretend to be libraries."""

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from time import monotonic, sleep

import psutil
import pytest

from benchmarks.peers import environments, processes
from benchmarks.peers.contenders import OURS, PEERS, Peer, Service, named_peers
from benchmarks.peers.environments import PeerMissing, prepare
from benchmarks.peers.figures import markdown, rows
from benchmarks.peers.processes import RunnerProcess
from benchmarks.peers.race import Entry, Race, Task
from benchmarks.peers.serve import Clock
from outpace.data.workload import WorkItem
from outpace.lib.errors import InvalidRequest

RUNNER = """
import sys
from time import sleep

class Contender:
    facts = {"versions": {"pretence": "1.0"}, "threads": 1, "note": ""}

    def __init__(self, settings):
        if settings["model"] == "broken":
            raise RuntimeError("no such model\\nin this folder")
        self._log = settings["model"]

    def generate(self, method, prompt, max_new_tokens, clock):
        print("noise that is no answer")
        with open(self._log, "a") as log:
            log.write(f"{method} {prompt}\\n")
        if method == "dies" and len(prompt) > 3:
            raise RuntimeError("the weights are gone")
        ids = [prompt[0] + number for number in range(max_new_tokens)]
        if method == "strays":
            ids[2] = 7
        pieces = [ids[:3], ids[3:]] if method == "drafts" else [[token] for token in ids]
        for piece in pieces:
            clock.put(piece)
            sleep(0.002)
"""
METHODS = ("plain", "drafts", "strays", "dies")
BASELINE = "outpace/bfloat16/plain"


class Fakes:
    """Processes of one test, all writing to one list of turns."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder, self.stack = folder, stack
        self.runner, self.turns = folder / "runner.py", folder / "turns.txt"
        self.runner.write_text(RUNNER)

    def process(self, model: str | None = None, eos: tuple[int, ...] = ()) -> RunnerProcess:
        settings = {"model": model or str(self.turns), "eos": eos}
        process = RunnerProcess(Path(sys.executable), self.runner, settings, self.folder / "runner.log", {})
        return self.stack.enter_context(process)

    def race(self, prompts: list[list[int]], tokens: int = 6, eos: tuple[int, ...] = ()) -> Race:
        ours = Entry("outpace", Service("bfloat16", OURS, ("plain",)), "plain", self.process(eos=eos))
        service, process = Service("half", OURS, METHODS), self.process(eos=eos)
        others = [Entry("peer", service, method, process) for method in METHODS]
        items = tuple(WorkItem(str(number), "set", ("text",)) for number in range(len(prompts)))
        shared = {"hardware": "a machine", "batch_size": 1, "concurrency": 1}
        return Race([ours, *others], Task(items, tuple(map(tuple, prompts)), tokens, eos, shared))


@pytest.fixture
def fakes(tmp_path: Path) -> Iterator[Fakes]:
    with ExitStack() as stack:
        yield Fakes(tmp_path, stack)


def _stops(process: psutil.Process) -> bool:
    """Whether a process stands still, which a signal makes of it at some time within ten seconds."""
    end = monotonic() + 10
    while process.status() != psutil.STATUS_STOPPED and monotonic() < end:
        sleep(0.01)
    return bool(process.status() == psutil.STATUS_STOPPED)


def test_the_clock_counts_what_the_prompts_pass_brought_and_stops_at_the_end() -> None:
    """Guards against speeds that count tokens for which no time was measured, and against tokens behind the end."""
    clock = Clock((9,), 10)
    assert not clock.put([])
    assert not clock.put([1, 2])
    assert clock.put([3, 9, 4])
    assert clock.put([5])
    answer = clock.answer()
    assert (answer["token_ids"], answer["first"], answer["arrivals"]) == ([1, 2, 3, 9], 2, 2)
    assert answer["prompt_seconds"] > 0 < answer["decode_seconds"]
    short = Clock((), 2)
    assert short.put([1, 2, 3])
    assert short.ids == [1, 2]
    silent = Clock((), 2).answer()
    assert (silent["token_ids"], silent["first"], silent["decode_seconds"]) == ([], 0, 0.0)


def test_records_compare_everybody_with_its_own_plain_text_and_with_ours(fakes: Fakes) -> None:
    """Guards against an equality column that compares with somebody else."""
    race = fakes.race([[100, 1], [200, 2]])
    first, second = race.groups()
    by_name = {record["method"]: record for record in first}
    assert list(by_name) == [BASELINE, *(f"peer/half/{method}" for method in METHODS)]
    assert by_name["peer/half/strays"]["token_ids"] == [[100, 101, 7, 103, 104, 105]]
    assert not by_name["peer/half/strays"]["equal"]
    assert not by_name["peer/half/strays"]["equal_to_own_plain"]
    assert by_name["peer/half/drafts"]["equal"]
    assert by_name["peer/half/drafts"]["equal_to_own_plain"]
    drafts, plain = by_name["peer/half/drafts"]["group"], by_name[BASELINE]["group"]
    assert (drafts["decoded"], plain["decoded"]) == (3, 5)
    assert drafts["tokens_per_second"] == 1e3 * 3 / drafts["decode_ms"]
    assert [record["index"] for record in second] == [1] * 5
    assert len(json.loads(json.dumps(first))) == 5, "records are JSON"


def test_a_token_that_ends_the_answer_is_no_difference(fakes: Fakes) -> None:
    """Guards against calling texts different because one library keeps the id that ends it to itself."""
    race = fakes.race([[1, 1]], eos=(3,))
    (group,) = race.groups()
    assert group[0]["token_ids"] == [[1, 2, 3]]
    assert group[0]["finish_reasons"] == ["stop"]
    assert race._without_eos({"token_ids": [1, 2, 3]}) == race._without_eos({"token_ids": [1, 2]}) == [1, 2]


def test_turns_rotate(fakes: Fakes) -> None:
    """Guards against a drift of the machine that always meets the same contender."""
    race = fakes.race([[1, 4], [2, 2], [3, 3]], tokens=3)
    list(race.groups())
    lines = fakes.turns.read_text().splitlines()
    turns = [line.split()[0] for line in lines]
    assert len(turns) == 4 * 5  # everybody warms up first, on what is not measured
    assert sorted({line.partition(" ")[2] for line in lines[:5]} | {lines[5].partition(" ")[2]}) == ["[1, 4]", "[4, 1]"]
    assert turns[5:10] == ["plain", *METHODS]
    assert turns[10:15] == [*METHODS, "plain"]
    assert turns[15:20] == [*METHODS[1:], "plain", "plain"]


def test_who_is_not_asked_stands_still(fakes: Fakes) -> None:
    """Guards against a neighbour whose waiting threads take the core that is being measured."""
    process = fakes.process()
    own = psutil.Process(process._process.pid)
    assert _stops(own)
    assert process.ask("plain", [4, 1], 3)["token_ids"] == [4, 5, 6]
    assert _stops(own)
    assert process.memory_mb() > 1
    assert 0 < process.facts["load_s"] < 60
    process.close()
    assert not own.is_running()


def test_who_fails_is_reported_and_the_others_go_on(fakes: Fakes) -> None:
    """Guards against a peer that is dropped without a word, and against one failure that ends the race."""
    race = fakes.race([[1, 1], [2, 2, 2, 2], [3, 3]])
    groups = list(race.groups())
    assert [len(group) for group in groups] == [5, 4, 1], "who had answered keeps the record; then its process is gone"
    assert "the weights are gone" in race.missing["peer/half/dies"]
    found = rows([record for group in groups for record in group])
    table = markdown(found, race.missing, "a race")
    assert "| `peer/half/dies` | runner: ended: RuntimeError: the weights are gone |" in table
    assert found[0]["name"] == BASELINE
    assert "| `peer/half/strays` | pretence 1.0 | 1 |" in table


def test_speeds_by_set_of_prompts_and_their_mean(fakes: Fakes) -> None:
    """Guards against a mean in which a set of many prompts counts more, against ratios across sets, and against speeds
    without the share of equal answers."""
    race = fakes.race([[1, 1], [2, 2], [3, 3], [4, 4]])
    records = [record for group in race.groups() for record in group]
    for record in records:
        record["dataset"] = ("chat", "code", "code", "wikitext2")[record["index"]]
        speed = (20.0, 70.0, 90.0, 90.0)[record["index"]]
        record["group"]["tokens_per_second"] = {BASELINE: 10.0}.get(record["method"], speed)
    found = {row["name"]: row for row in rows(records)}
    assert found["peer/half/strays"]["sets"] == {"chat": 2.0, "code": 8.0}
    assert found["peer/half/strays"]["copied"] == {"wikitext2": 9.0}
    assert found["peer/half/strays"]["speedup"] == 7.0
    table = markdown(list(found.values()), {}, "a race")
    assert "| who | chat | code | geometric mean | wikitext2 | equal to own plain | equal to our plain |" in table
    assert "| `peer/half/strays` | 2.00x | 8.00x | 4.00x | 9.00x | 0% | 0% |" in table
    assert "| `peer/half/strays` | 20.0 | 80.0 | 40.0 | 90.0 | 0% | 0% |" in table


def test_the_share_of_the_read_test_is_paired_by_prompt(fakes: Fakes) -> None:
    """Guards against speeds over a bandwidth measured at another time, and against passes that count tokens."""
    race = fakes.race([[1, 1], [2, 2], [3, 3]], tokens=7)
    ceilings = iter((10.0, 20.0, 40.0))
    race.ceiling = lambda: next(ceilings)
    records = [record for group in race.groups() for record in group]
    for record in records:
        record["group"]["tokens_per_second"] = record["ceiling"] * (0.5, 0.25, 0.75)[record["index"]]
    found = {row["name"]: row for row in rows(records)}
    assert found["peer/half/plain"]["share"] == 0.5
    assert found["peer/half/plain"]["tokens_per_step"] == 1.0
    assert found["peer/half/drafts"]["tokens_per_step"] == 4.0, "seven tokens: three with the prompt, four in one pass"
    assert "| 50% |" in markdown(list(found.values()), {}, "a race")


def test_a_peer_that_does_not_load_says_why(fakes: Fakes) -> None:
    """Guards against an empty place in the table with no reason, or with its first line alone."""
    with pytest.raises(PeerMissing, match="runner: ended: RuntimeError: no such model in this folder"):
        fakes.process("broken")


def test_a_late_answer_is_not_taken_for_the_next_one(fakes: Fakes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against the answer of a method that was given up, recorded for another one of its process."""
    process = fakes.process()
    monkeypatch.setattr(processes, "ANSWER_S", 0.1)
    with pytest.raises(PeerMissing, match="runner: silent for 0 s"):
        process.ask("plain", [4, 1], 200)  # of 2 ms each
    monkeypatch.setattr(processes, "ANSWER_S", 20.0)
    with pytest.raises(PeerMissing, match="runner: ended"):
        process.ask("drafts", [9, 1], 2)


def test_our_own_failure_ends_the_race(fakes: Fakes) -> None:
    """Guards against ratios with nothing to compare with."""
    race = fakes.race([[1, 1]])
    race.entries[0].process.close()
    with pytest.raises((PeerMissing, ValueError)):
        list(race.groups())


def test_an_environment_that_cannot_be_made_says_why(tmp_path: Path) -> None:
    """Guards against a peer that is dropped without a word, and against one that is called ready half made."""
    peer = Peer("run_x.py", (), packages=("./no-such-folder",))
    with pytest.raises(PeerMissing, match=r"x: no pinned versions in .*x\.txt"):
        prepare("x", peer, tmp_path, tmp_path)
    (tmp_path / "x.txt").write_text("")
    for _ in range(2):
        with pytest.raises(PeerMissing, match=r"x: cannot be installed: .*no-such-folder"):
            prepare("x", peer, tmp_path, tmp_path)
    assert prepare("outpace", named_peers("")["outpace"], tmp_path, tmp_path) == Path(sys.executable)


def test_an_environment_is_made_again_for_other_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a program compiled with flags that have been replaced since, as those whose code crashed."""
    commands = list[list[str]]()

    def run(name: str, command: list[str], **variables: str) -> None:
        commands.append(command)
        python = tmp_path / "x" / "env" / "bin" / "python"
        python.parent.mkdir(parents=True, exist_ok=True)
        python.touch()

    monkeypatch.setattr(environments, "_run", run)
    (tmp_path / "x.txt").write_text("")
    for flags, made in ((("OLD=ON",), 1), (("OLD=ON",), 1), (("NEW=ON",), 2)):
        prepare("x", Peer("run_x.py", (), packages=("x",), flags=flags), tmp_path, tmp_path)
        assert sum("venv" in command for command in commands) == made


CMAKE = """#!/bin/sh
echo "$@" >> {folder}/calls
test -e {folder}/broken && echo "x.cpp:1: error: no such thing" && exit 1
mkdir -p {folder}/source/sources-1.5/made/bin && echo > {folder}/source/sources-1.5/made/bin/program
"""


def test_programs_are_compiled_from_the_pinned_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a compiler's message that is lost, against a source that is fetched again after a build that was
    cut short, and against a failed download or a missing compiler without a reason."""
    peer = Peer("run_x.py", (), sdist="sources", tree="part", flags=("SMALL=ON",), programs=("program",))
    versions, goal = tmp_path / "x.txt", tmp_path / "bin"
    versions.write_text("cmake==1\nsources==1.5\n")
    arguments = ("x", peer, tmp_path / "source", versions, goal)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(PeerMissing, match=r"x: cannot be installed: .*sources==1\.5"):
        environments._compile(*arguments)
    (tmp_path / "source" / "sources-1.5").mkdir(parents=True)
    goal.mkdir()
    (goal / "cmake").write_text(CMAKE.format(folder=tmp_path))
    (goal / "cmake").chmod(0o755)
    (tmp_path / "broken").touch()
    with pytest.raises(PeerMissing, match=r"x: cannot be installed: x\.cpp:1: error: no such thing"):
        environments._compile(*arguments)
    (tmp_path / "broken").unlink()
    environments._compile(*arguments)
    assert (goal / "program").is_file()
    configured, built = (tmp_path / "calls").read_text().splitlines()[-2:]
    assert "sources-1.5/part" in configured
    assert "-DSMALL=ON" in configured
    assert built.endswith("--target program")
    monkeypatch.setattr(environments, "COMPILERS", ("no-such-compiler",))
    with pytest.raises(PeerMissing, match="x: no C\\+\\+ compiler"):
        environments._compile(*arguments)


def test_peers_by_name() -> None:
    """Guards against a misspelt peer that is passed over."""
    assert list(named_peers("vllm, llama.cpp")) == ["outpace", "vllm", "llama.cpp"]
    with pytest.raises(InvalidRequest, match="no peer 'lama'"):
        named_peers("lama")


def test_every_runner_is_there_and_pinned() -> None:
    """Guards against a peer whose file or versions were forgotten."""
    root = Path(__file__).parents[3]
    for name, peer in PEERS.items():
        assert peer.script.is_file()
        for is_gguf in (False, True):
            assert "plain" in {method for service in peer.raced(is_gguf) for method in service.methods}
        if peer.packages:
            pinned = (root / "constraints" / "peers" / f"{name}.txt").read_text().lower().replace("_", "-")
            assert all(
                f"{package}==" in pinned for package in (*peer.packages, peer.sdist.replace("_", "-")) if package
            )
