"""The commands, run as a user runs them, on a tiny model."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from outpace.bench.records import TurnRun
from outpace.bench.runner import BenchRun
from outpace.core.tree import Topology
from outpace.drafters import convert
from outpace.drafters.dart.net import DartConfig, DartNet
from outpace.drafters.kinds import write_net
from outpace.drafters.medusa.net import MedusaConfig, MedusaNet
from outpace.lib.errors import ModelError
from tests.cli.runner import assert_refused, last_json, run
from tests.unit.drafters.net.block_nets import small_dflash
from tests.unit.drafters.source.learned import random_net
from tests.unit.methods.test_trained_drafters import OURS


def test_generate_streams_the_text_that_json_reports(folder: str) -> None:
    """Guards against a stream that says something else than the result."""
    options = ["generate", "hello", "-m", folder, "--max-new-tokens", "12", "--temperature", "1", "--seed", "5"]
    streamed = run(*options)
    (sample,) = last_json(run(*options, "--json"))["samples"]
    assert streamed.exit_code == 0
    assert streamed.stdout == sample["text"] + "\n"
    assert sample["seed"] == 5
    assert len(sample["token_ids"]) == sample["metrics"]["new_tokens"] == 12
    samples = last_json(run(*options, "--n", "3", "--json"))["samples"]
    assert len({tuple(sample["token_ids"]) for sample in samples}) == 3, "not one sample printed n times"


def test_generate_takes_every_option(folder: str) -> None:
    """Guards against an option of the command that never reaches the request, and JSON without what was asked for."""
    base = ["generate", "hello", "-m", folder, "--max-new-tokens", "20", "--json"]
    plain = last_json(run(*base))["samples"][0]
    assert "logprobs" not in plain
    first = plain["token_ids"][0]
    for options in (
        ["--repetition-penalty", "1.9"],
        ["--presence-penalty", "2"],
        ["--frequency-penalty", "2"],
        ["--logit-bias", f"{first}=-100", "--logit-bias", "70=2.5"],
    ):
        (sample,) = last_json(run(*base, *options))["samples"]
        assert sample["token_ids"] != plain["token_ids"], options
    (sample,) = last_json(run(*base, "--logprobs", "2", "--ignore-eos", "--min-new-tokens", "20"))["samples"]
    assert [entry["token_id"] for entry in sample["logprobs"]] == sample["token_ids"] == plain["token_ids"]
    assert all(len(entry["top"]) == 2 and entry["logprob"] <= 0 for entry in sample["logprobs"])
    word = next(letter for letter in plain["text"] if letter.isascii() and letter.strip())
    (sample,) = last_json(run(*base, "--bad-word", word, "--bad-word", "never"))["samples"]
    assert word not in sample["text"]


def test_verify_and_bench_take_the_penalties(folder: str) -> None:
    """Guards against a certificate or a race of another request than the one asked for."""
    options = ["--repetition-penalty", "1.3", "--max-new-tokens", "10", "--ignore-eos", "-m", folder]
    more = ["--presence-penalty", "0.5", "--frequency-penalty", "0.5"]
    report = last_json(run("verify", "-w", "builtin:2", "--method", "recycle", *options, *more, "--json"))
    assert (report["equal"], report["bugs"]) == (4, 0)
    methods = ["--methods", "transformers,plain,recycle", "--dtype", "float32", "--json"]
    summary = last_json(run("bench", "-w", "builtin:2", *methods, *options))["methods"]
    assert summary["transformers"]["equal"] == summary["recycle"]["equal"] == 1.0
    refused = run("bench", "-w", "builtin:2", *methods, *options, *more)
    assert "presence_penalty=0.5: not for stock generate" in str(refused.exception)


def test_bench_ends_with_one_json_line_and_keeps_records(folder: str, tmp_path: Path) -> None:
    """Guards against a table that scripts cannot read, and against records that do not say what they measured."""
    methods = "plain,lookup,recycle:budget=8,shape=chain"
    result = run(
        "bench", "-m", folder, "-w", "builtin:3", "--methods", methods, "--max-new-tokens", "12", "--out", str(tmp_path)
    )
    summary = last_json(result)["methods"]
    assert list(summary) == ["plain", "lookup", "recycle:budget=8,shape=chain"]
    for figures in summary.values():
        assert (figures["equal"], figures["ties"], figures["bugs"]) == (1.0, 0, 0)
        assert figures["tokens_per_step"] >= 1.0
    assert summary["plain"]["speedup"] == 1.0
    records = [json.loads(line) for line in (tmp_path / "records.jsonl").read_text().splitlines()]
    assert len(records) == 3 * 3
    for record in records:
        assert record["versions"]["torch"]
        assert record["exactness"]["kind"] in ("bitwise", "rounding")
        assert record["new_tokens"] == sum(len(ids) for ids in record["token_ids"])
        parts = sum(record[f"{phase}_ms"] for phase in ("draft", "forward", "verify", "commit", "observe"))
        assert parts <= record["decode_ms"] * 1.01
        assert record["steps"] + record["accepted"] >= record["new_tokens"] - record["turns"]


def test_bench_in_batches(folder: str, tmp_path: Path) -> None:
    """Guards against an option that does not reach the race, and figures that do not say their batch size."""
    options = ["-m", folder, "-w", "builtin:3", "--methods", "recycle", "--max-new-tokens", "8", "--max-turns", "1"]
    result = run("bench", *options, "--batch-size", "2", "--out", str(tmp_path))
    assert "3 prompts, batch size 2" in result.stdout
    for figures in last_json(result)["methods"].values():
        assert [figures[name] for name in ("prompts", "groups", "batch_size", "equal")] == [3, 2, 2, 1.0]
    records = [json.loads(line) for line in (tmp_path / "records.jsonl").read_text().splitlines()]
    assert [record["group"]["size"] for record in records] == [2, 2, 2, 2, 1, 1]


def test_bench_that_is_stopped_goes_on(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against records written at the end only, silence on the way, and a second run of what is done."""
    options = ["bench", "-m", folder, "-w", "builtin:3", "--methods", "recycle", "--max-new-tokens", "8"]
    options += ["--out", str(tmp_path)]
    measure, measured = BenchRun._measure, list[int]()

    def interrupted(run: BenchRun, number: int, *rest: Any) -> Any:
        measured.append(number)
        if measured == [0, 1]:
            raise KeyboardInterrupt
        return measure(run, number, *rest)

    monkeypatch.setattr(BenchRun, "_measure", interrupted)
    assert run(*options).exit_code != 0
    assert len((tmp_path / "records.jsonl").read_text().splitlines()) == 2
    result = run(*options)
    assert "2 records are there already, of 6" in result.stderr
    assert "bench: 2/3, " in result.stderr
    summary = last_json(result)["methods"]
    assert summary["recycle"]["prompts"] == len((tmp_path / "records.jsonl").read_text().splitlines()) / 2 == 3
    assert last_json(run(*options))["methods"] == summary
    assert measured == [0, 1, 1, 2]
    refused = run(*options, "--temperature", "1")
    assert "its records were made with temperature=0.0, and this run has 1.0" in str(refused.exception)


def test_verify_passes_and_fails(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a certificate that cannot fail: with wrong positions in trees it must exit with 1."""
    options = ["verify", "-m", folder, "-w", "builtin:2", "--method", "recycle:budget=30", "--max-new-tokens", "24"]
    report = last_json(run(*options, "--json"))
    assert (report["equal"], report["bugs"], report["comparisons"]) == (4, 0, 4)
    kind, reason = (report["exactness"][name] for name in ("kind", "reason"))
    said = run(*options)
    (verdict,) = said.stdout.splitlines()  # also where the terminal is narrower, as for scripts
    assert verdict.startswith("LOSSLESS: ")
    assert f", {kind}, batch 1: 4 equal" in verdict
    (line,) = [line for line in said.stderr.splitlines() if line.startswith(f"exactness: {kind} - ")]
    assert line.endswith(reason)
    right = Topology.depth_tensor.func  # type: ignore[attr-defined]
    wrong = property(lambda self: right(self) if self.is_chain else right(self) * 2)
    monkeypatch.setattr(Topology, "depth_tensor", wrong)
    result = run(*options)
    assert result.exit_code == 1
    assert "NOT LOSSLESS" in result.output


def test_a_race_with_a_bug_fails(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against exit status 0, to a script the sign of a sound method, where an output was not plain decoding's;
    without a check nothing is known."""
    answers = BenchRun._run

    def cut(run: BenchRun, method: str, *given: Any) -> list[TurnRun]:
        found = answers(run, method, *given)
        return [replace(one, token_ids=one.token_ids[:-1]) for one in found] if method == "lookup" else found

    options = ["bench", "-m", folder, "-w", "builtin:1", "--methods", "lookup", "--max-new-tokens", "8"]
    assert run(*options).exit_code == 0
    monkeypatch.setattr(BenchRun, "_run", cut)
    result = run(*options, "--json")
    (line,) = result.stdout.splitlines()
    assert (result.exit_code, json.loads(line)["methods"]["lookup"]["bugs"]) == (1, 1), "the figures are there"
    assert run(*options, "--no-check").exit_code == 0


NGRAM = '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}'
CONFIG = ("--speculative-config", NGRAM)
UNUSED = ("--drafter", "early-exit:1")
SERVER = ("--endpoint", "http://127.0.0.1:1")
NOT_USED = "drafter='early-exit:1': it would not be used, because "
REMEDY = "leave it out, or choose a method that drafts with one"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("generate", "x", "--method", "xyzzy"), "unknown; choose one of"),
        (("generate", "x", "--method", "plain", "--budget", "5"), "budget=5: plain decoding drafts nothing"),
        (("verify", "-w", "builtin:1", "--method", "lookup:budget=8", "--budget", "5"), "budget=5: it would not be"),
        (("bench", "-w", "builtin:1", "--methods", "plain,transformers", "--budget", "5"), "budget=5: it would not be"),
        (("generate", "x", "--penalty-window", "8"), "penalty_window=8: does nothing without repetition_penalty"),
        (("generate", "x", "--logit-bias", "5"), "logit_bias='5': must be ID=VALUE"),
        (("generate", "x", "--logit-bias", "5=1", "--logit-bias", "5=2"), "token 5 is given twice"),
        (("generate", "x", "--logprobs", "3"), "with --json only"),
        (("generate", "x", "--speculative-config", "{"), "speculative_config='{': not JSON"),
        (("generate", "x", "--max-model-len", "999999"), "max_model_len=999999"),
        (("verify", "-w", "builtin", "--batch-size", "0"), "batch_size=0"),
        (("bench", "-w", "builtin", "--batch-size", "0"), "batch_size=0"),
        (("bench", "-w", "builtin", "--batch-size", "8"), "--max-turns 1"),
        (("verify", "-w", "builtin:2", "--batch-size", "1", "--batch-size", "4"), "batch_size=4: the workload has"),
        (("bench", "-w", "builtin:1", "--batch-size", "4"), "batch_size=4: the workload has only 1 prompt;"),
        (("bench", "-w", "builtin:1", "--concurrency", "2"), "concurrency=2: the workload has only 1 prompt;"),
        (("generate", "x", "--method", "linear", *CONFIG), "method='linear' and speculative_config="),
        (("chat", "--budget", "3", *CONFIG), "budget=3 and speculative_config="),
        (("bench", "-w", "builtin:1", "--methods", "plain,recycle", *CONFIG), "plain,recycle' and speculative_config="),
        (("bench", "-w", "builtin:1", "--budget", "4", *CONFIG), "budget=4 and speculative_config="),
        (("verify", "-w", "builtin:1", "--drafter", "x", *CONFIG), "drafter='x' and speculative_config="),
        (("chat", "--api-key", "k"), "api_key: no server is used; name one with --url"),
        (("bench", "-w", "builtin:1", "--api-key", "k"), "api_key: no server is used; name one with --endpoint"),
        (("tune", "--forget", "--dry-run"), "dry_run=True: cannot be used when --forget deletes a profile"),
        (("count-ngrams", "-w", "missing.jsonl", "--out", "x", "--keep", "0"), "no such file"),
        (("count-ngrams", "-w", "builtin:1", "--out", "x", "--keep", "0"), "keep=0: must be"),
        (("count-ngrams", "-w", "builtin:1", "--out", "no/x", "--keep", "0"), "its folder does not; name a new file"),
        (("generate", "x", "--method", "recycle", *UNUSED), NOT_USED),
        (("generate", "x", "--method", "outpace:draft=none", *UNUSED), NOT_USED),
        (("chat", "--method", "lookup", *UNUSED), NOT_USED),
        (("verify", "-w", "builtin:1", "--method", "plain,samd", *UNUSED), REMEDY),
        (("bench", "-w", "builtin:1", "--methods", "lookup,transformers", *UNUSED), NOT_USED),
        (("bench", "-w", "builtin:1", "--methods", "transformers", *UNUSED), NOT_USED),
        (("warmup", "-w", "builtin:1", "--out", "x", *UNUSED), NOT_USED),
        (("verify", "-w", "builtin:1", "--method", "plain,transformers"), "'transformers' is stock generate"),
        (("tune", "--methods", "lookup,transformers"), "'transformers' is stock generate"),
        (("bench", "-w", "builtin:1", "--methods", "transformers", *SERVER), "'transformers' is stock generate"),
    ],
)  # fmt: skip
def test_bad_input(
    folder: str, arguments: tuple[str, ...], complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a traceback, or a silent default, where one line should name field, value and remedy; and against
    a drafter that was asked for, loaded and left aside without a word."""
    monkeypatch.chdir(tmp_path)
    assert_refused(run(*arguments, "-m", folder), complaint)


@pytest.mark.parametrize("blank", ["", " "])
def test_a_blank_key_does_not_open_the_server(folder: str, monkeypatch: pytest.MonkeyPatch, blank: str) -> None:
    """Guards against a secret that was not filled in."""
    monkeypatch.setattr("outpace.serve.run.serve", lambda load, settings: None)
    monkeypatch.setenv("OUTPACE_API_KEY", blank)
    assert_refused(run("serve", folder), "an empty key would admit everybody")


def test_a_speculative_config_runs_as_the_method_it_means(folder: str) -> None:
    """Guards against a command that takes vLLM's JSON and drafts as it always did."""
    options = ["-m", folder, "--max-new-tokens", "48", "--ignore-eos", *CONFIG]
    report = last_json(run("generate", "la la la la la la", *options, "--json"))
    plain = last_json(run("generate", "la la la la la la", *options[:-2], "--method", "plain", "--json"))
    assert report["method"] == "lookup:budget=4"
    assert report["samples"][0]["token_ids"] == plain["samples"][0]["token_ids"]
    assert 0 < report["samples"][0]["metrics"]["drafted"] <= 4 * report["samples"][0]["metrics"]["steps"]
    assert list(last_json(run("bench", "-w", "builtin:1", *options))["methods"]) == ["plain", "lookup:budget=4"]
    certificate = last_json(run("verify", "-w", "builtin:1", *options, "--json"))
    assert (certificate["method"], certificate["bugs"]) == ("lookup:budget=4", 0)
    model = json.dumps({"method": "draft_model", "model": folder, "num_speculative_tokens": 3})
    talk = ["chat", "-m", folder, "--max-new-tokens", "4", "--speculative-config", model]
    assert run(*talk, lines="hello\n").exit_code == 0


def test_convert_writes_compares_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a conversion that reports what it did not check, and a wrong file left with status 0."""
    write_net(small_dflash(torch.float32), tmp_path / "in")
    options = ["convert", str(tmp_path / "in"), "--to", "z-lab"]
    report = last_json(run(*options, str(tmp_path / "out"), "--dtype", "bfloat16", "--json"))
    facts: dict[str, Any] = {"in": str(tmp_path / "in"), "out": str(tmp_path / "out"), "kind": "dflash"}
    facts |= {"layout": "z-lab", "dtype": "bfloat16", "weights": "plain"}
    assert report == facts | {"difference": 0.0, "changed": [], "equal": True}
    assert (tmp_path / "out" / "config.json").is_file()
    assert_refused(run(*options, str(tmp_path / "out")), "exists; choose a new folder")
    said = run(*options, str(tmp_path / "second"))
    assert said.exit_code == 0
    assert "EQUAL: dflash as z-lab in float32, largest relative difference of weights 0" in said.stdout
    monkeypatch.setattr(convert, "largest_difference", lambda net, other: float("inf"))
    wrong = run(*options, str(tmp_path / "third"), "--json")
    assert (wrong.exit_code, json.loads(wrong.stdout)["difference"]) == (1, None)
    assert "DIFFERENT" in run(*options, str(tmp_path / "third")).stdout
    assert not (tmp_path / "third").exists()


def test_convert_takes_a_borrowed_head_from_the_target(tmp_path: Path, folder: str) -> None:
    """Guards against an option that does not reach the conversion, and a layout written without the head it holds."""
    net = MedusaNet(MedusaConfig(hidden_size=48, vocab_size=264, heads=2, head="target"))
    for weight in net.parameters():
        weight.zero_()
    write_net(net, tmp_path / "in", "authors")
    command = ["convert", str(tmp_path / "in"), str(tmp_path / "out"), "--to", "vllm"]
    assert_refused(run(*command), "target_weights is missing")
    assert run(*command, "--target-weights", folder).exit_code == 0
    written = load_file(tmp_path / "out" / "model.safetensors")["lm_head.weight"]
    assert torch.equal(written, load_file(Path(folder) / "model.safetensors")["lm_head.weight"])


def test_models(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Guards against a model list that hides what is not pulled, and a pull that guesses names."""
    monkeypatch.setenv("OUTPACE_HOME", str(tmp_path))
    rows = json.loads(run("models", "list", "--json").stdout)
    wanted = ("smollm2-135m", "qwen2.5-coder-1.5b", "qwen2.5-coder-0.5b")
    assert {row["name"]: row["folder"] for row in rows} == dict.fromkeys(wanted)
    assert_refused(run("models", "pull", "gpt-17"), "unknown model 'gpt-17'", kind=ModelError)


def test_a_missing_extra_is_named(tmp_path: Path) -> None:
    """Guards against a traceback for people who installed without an extra."""
    script = (
        "import sys; sys.modules['httpx'] = None; sys.argv = ['outpace', 'bench', '--endpoint', 'http://x', '-w', "
        "'builtin']; from outpace.cli import main; main()"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.returncode == 2
    assert "pip install 'outpace[bench]'" in result.stderr


TABLES: dict[str, tuple[tuple[str, ...], dict[str, Any], str]] = {
    "rank-vocabulary": (("--keep", "2"), {"kept": 2, "of": 264, "tokens": 5, "covered": 0.6}, "linear:vocabulary={}"),
    "count-ngrams": ((), {"kept": [2, 2, 2], "of": 264}, "dart:ngrams={}"),
    "tokenize-corpus": ((), {"kept": 5, "of": 264}, "samd:corpus={},min_match=1,corpus_bias=0,budget=3"),
}
"""What a command is told besides texts, what it reports, and the method that reads its file."""


@pytest.mark.parametrize("command", TABLES)
def test_a_table_of_texts_is_one_that_a_method_reads(command: str, folder: str, tmp_path: Path) -> None:
    """Guards against a file that the option refuses, EOS missing from it, counts of something else, and turns that run
    into one another."""
    more, report, method = TABLES[command]
    texts, out = tmp_path / "texts.jsonl", tmp_path / "made.safetensors"
    texts.write_text('{"turns": ["aaab", "b"]}\n')
    options = [command, "-m", folder, "-w", str(texts), "--out", str(out), *more]
    assert last_json(run(*options)) == {"file": str(out)} | report
    drafting = ["--method", method.format(out), "--max-new-tokens", "8", "--json"]
    if command == "count-ngrams":
        write_net(random_net(DartNet(DartConfig(**OURS, draft_vocab_size=264, draft_length=3))), tmp_path / "dart")
        drafting += ["--drafter", str(tmp_path / "dart")]
    answer = last_json(run("generate", "aaa", "-m", folder, *drafting))
    assert answer["samples"][0]["metrics"]["drafted"] > 0
    assert_refused(run(*options))


def test_a_number_of_ids_is_refused_before_texts_are_counted(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against hours of counting that end with a refusal."""
    monkeypatch.delattr("outpace.drafters.ranked_vocabulary.as_ids")  # nothing can be counted without it
    texts = tmp_path / "texts.jsonl"
    texts.write_text('{"turns": ["aaab"]}\n')
    command = ("rank-vocabulary", "-m", folder, "-w", str(texts), "--out", str(tmp_path / "made.safetensors"))
    assert_refused(run(*command, "--keep", "265"), "keep=265: must be from 1 (the EOS ids) to 264")


def test_a_model_that_is_served_from_where_one_stands(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a server of a model named "", which no request can name, or named with a path: no shell expands
    the ~ of --model=~/NAME."""
    names: list[tuple[str, ...]] = []
    monkeypatch.setattr("outpace.serve.run.serve", lambda loads, settings: names.append(settings.names))
    monkeypatch.chdir(folder)
    for variable in ("HOME", "USERPROFILE"):
        monkeypatch.setenv(variable, str(Path(folder).parent))
    for model in (".", f"~/{Path(folder).name}"):
        assert run("serve", f"--model={model}").exit_code == 0
    assert names == [(Path(folder).name,)] * 2
