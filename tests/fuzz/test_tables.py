"""Damaged tables and records: refused by name, left aside, or used; whatever drafts come of them, answers stay."""

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import outpace
from outpace.budget.costs import ROWS, PassCosts
from outpace.core.drafting import Gates
from outpace.data.workload import read_workload
from outpace.drafters.dart.ngrams import count_ngrams, save_ngrams
from outpace.drafters.load import fingerprint, load_net
from outpace.drafters.ranked_vocabulary import save_vocabulary
from outpace.methods.profile import read_profile
from outpace.trees.retrieval.samd import save_corpus
from outpace.trees.retrieval.transition_matrix import TransitionMatrix
from outpace.trees.retrieval.warm_file import Calibration, save_matrix
from tests.fuzz.mutation import byte_mutants, deep, factor, json_mutants, tensor_mutants
from tests.fuzz.outcome import Campaign
from tests.unit.methods.test_trained_drafters import write_drafters
from tests.unit.models.tiny import random_ids

VOCAB = 264
IDS = [5, 60, 7, 8, 130, 5, 60, 7]
TEXTS = [random_ids(200, seed, VOCAB) for seed in range(3)]


@pytest.fixture(scope="module")
def drafters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_drafters(tmp_path_factory.mktemp("drafters"))


def write_warm(file: Path, drafter: str) -> None:
    matrix = TransitionMatrix(VOCAB, torch.device("cpu"), context=2)
    ids = torch.tensor(TEXTS[0])
    matrix.update(ids[:-1], torch.stack([(ids[1:] + step) % VOCAB for step in range(8)], dim=1))
    save_matrix(file, matrix, Calibration(Gates((1, 2, 3), (0.2, 0.3, 0.4)), drafter, 4, 0.0))


def write(kind: str, file: Path, drafter: Path | None) -> None:
    if kind == "vocabulary":
        save_vocabulary(file, torch.arange(0, VOCAB, 2), VOCAB)
    elif kind == "ngrams":
        save_ngrams(file, count_ngrams(TEXTS, VOCAB, 100))
    elif kind == "corpus":
        save_corpus(file, TEXTS, VOCAB)
    else:
        write_warm(file, "none" if drafter is None else fingerprint(load_net(str(drafter))))


METHODS = {
    "warm": ("recycle:context=2,warm={}", None),
    "gates": ("eagle3:shape=gated,warm={}", "eagle3"),
    "vocabulary": ("eagle3:budget=4,vocabulary={}", "eagle3"),
    "ngrams": ("dart:budget=4,ngrams={}", "dart"),
    "corpus": ("samd:corpus={}", None),
}


@pytest.mark.costly
@pytest.mark.parametrize("kind", METHODS)
def test_tables(kind: str, checkpoint: Path, drafters: dict[str, Path], tmp_path: Path) -> None:
    """Guards against ids out of range in the middle of an answer, counts of nothing, and rows that are none."""
    method, drafter = METHODS[kind]
    options: dict[str, Any] = {"dtype": "float32", "device": "cpu"}
    model = outpace.load(str(checkpoint), drafter=None if drafter is None else str(drafters[drafter]), **options)
    wanted = model.generate(IDS, max_new_tokens=6, method="plain").token_ids
    whole = tmp_path / "whole.safetensors"
    write(kind, whole, drafters.get(drafter or ""))
    tensors, content = load_file(whole), whole.read_bytes()
    with safe_open(whole, framework="pt") as opened:
        about = opened.metadata()

    def answer(file: Path) -> Any:
        model.engine.forget_prefixes()
        return model.generate(IDS, max_new_tokens=6, method=method.format(file)).token_ids

    assert answer(whole) == wanted
    campaign = Campaign(f"tables: {kind}")
    for number, (what, mutant) in enumerate(tensor_mutants(tensors, 20 * factor(), 21)):
        file = tmp_path / f"t{number}.safetensors"
        save_file({name: one.contiguous() for name, one in mutant.items()}, file, about)
        campaign.run(what, partial(answer, file), wanted)
    for number, (what, changed) in enumerate(number_mutants(tensors, 15 * factor(), 22)):
        file = tmp_path / f"n{number}.safetensors"
        save_file(changed, file, about)
        campaign.run(what, partial(answer, file), wanted)
    for number, (what, damaged) in enumerate(byte_mutants(content, len(content), 15 * factor(), 23)):
        file = tmp_path / f"b{number}.safetensors"
        file.write_bytes(damaged)
        campaign.run(what, partial(answer, file), wanted)
    campaign.finish(least_refused=20)


def number_mutants(
    tensors: dict[str, torch.Tensor], cases: int, seed: int
) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """Copies with one number that should not be there; checkpoints' numbers are their own business, tables' are ids."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(cases):
        name = sorted(tensors)[int(torch.randint(len(tensors), (), generator=generator))]
        one = tensors[name].clone()
        if not one.numel():
            continue
        place = int(torch.randint(one.numel(), (), generator=generator))
        if one.is_floating_point():
            odd = [float("nan"), float("inf"), -1.0, 2.0, 1e30]
        else:
            odd = [-1, VOCAB, 2**31 - 1, -(2**31), 0]
        one.view(-1)[place] = odd[int(torch.randint(len(odd), (), generator=generator))]
        yield f"{name}[{place}]={one.view(-1)[place]}", tensors | {name: one}


def records(kind: str) -> Any:
    if kind == "costs":
        return {"rows": list(ROWS), "ms": [1.0 + 0.1 * rows for rows in ROWS], "context_ms": [0.1, 0.01]}
    if kind == "profile":
        measured = {"speedup": 1.2, "speedup_interval": [1.1, 1.3], "tokens_per_step": 2.0, "drafting_share": 0.1,
                    "break_even": 1.5, "prompts": 4}  # fmt: skip
        return {"method": "recycle:budget=4", "drafter": None, "model": "m", "measured": measured, "prompts": "4",
                "workload": ["builtin"], "max_new_tokens": 8, "made": "2026-11-23", "version": "0.1", "hardware": "x",
                "threads": 1, "dtype": "float32", "quantize": "none", "kv_cache_dtype": "float32"}  # fmt: skip
    return {"id": "a", "dataset": "b", "turns": ["hello", "and?"], "raw": False}


READERS: dict[str, Callable[[Path], Any]] = {
    "costs": lambda file: costs(file),
    "profile": lambda file: read_profile(file) and None,
    "workload": lambda file: read_workload(str(file)) and None,
}


def costs(file: Path) -> None:
    """What rounds ask of them."""
    found = PassCosts(file)
    if found.is_known:
        found.learn(1, 5, 100, 2.0)
        found.learn(1, 5, 100, 3.0)
        assert all(one >= 0 for one in found.times(2, 100, 30).least_ms)


@pytest.mark.parametrize("kind", READERS)
def test_records(kind: str, tmp_path: Path) -> None:
    """Guards against a traceback for a file of the user's cache folder or of prompts that is not as it was written."""
    content = records(kind)
    campaign, file = Campaign(f"records: {kind}"), tmp_path / "file.json"
    for what, mutant in json_mutants(content, 150 * factor(), 31):
        file.write_text(json.dumps(mutant))
        campaign.run(what, lambda: READERS[kind](file), None)
    whole = json.dumps(content).encode()
    for what, damaged in byte_mutants(whole, len(whole), 50 * factor(), 32):
        file.write_bytes(damaged)
        campaign.run(what, lambda: READERS[kind](file), None)
    file.write_text(deep())
    campaign.run("nested", lambda: READERS[kind](file), None)
    campaign.finish(least_refused=0 if kind in ("costs", "profile") else 50)
