"""Which sequences a step gets: the same on any number of processes, and after any interruption."""

import itertools
from dataclasses import replace

import pytest
import torch

from outpace.drafters.training.batch import Batch, TrainingSample
from outpace.lib.errors import InvalidRequest
from outpace.train.data import BatchSampler, SampleSet, TrainingData, collate_examples


def sample(name: str, prompt: int, answer: int, first: int = 0) -> TrainingSample:
    ids = torch.arange(first, first + prompt + answer)
    return TrainingSample(name, ids, torch.arange(len(ids)) >= prompt)


def sample_set(count: int = 23) -> SampleSet:
    return SampleSet(sample(f"p{at}/{at % 2}", 1 + at % 4, 2 + at % 7, at) for at in range(count))


def test_compact_storage_loses_nothing() -> None:
    """Guards against sequences that begin or end in their neighbours."""
    given = [sample("a/0", 3, 4), sample("b/0", 1, 1, 70000), replace(sample("c/0", 5, 2, 9), source="1f")]
    kept = SampleSet(iter(given))
    for one, again in zip(given, (kept[at] for at in range(3)), strict=True):
        assert (again.name, again.key) == (one.name, one.key)
        assert torch.equal(again.ids, one.ids)
        assert again.ids.dtype == torch.int64
        assert torch.equal(again.mask, one.mask)
    assert kept.lengths.tolist() == [7, 2, 7]
    assert kept.supervised == 7


def test_held_out_prompts_stay_held_out() -> None:
    """Guards against turns of one conversation on both sides, and a choice that changes when data is added."""
    names = [f"p{at}" for at in range(40)]
    turns = [sample(f"{name}/{turn}", 2, 3) for name in names for turn in range(2)]
    few, many = SampleSet(turns[:60]), SampleSet(turns)
    held = {few.names[index].rpartition("/")[0] for index in few.held_out(5)}
    assert len(held) == 5
    assert len(few.held_out(5)) == 10, "both turns of each"
    assert {few.names[index].rpartition("/")[0] for index in few.without(few.held_out(5))} & held == set()
    # What was added may be held out too, but nobody else moves to the other side.
    first, second = few.halves(few.held_out(5))
    assert sorted((*first, *second)) == sorted(few.held_out(5))
    prompts = [{few.names[index].rpartition("/")[0] for index in half} for half in (first, second)]
    assert [len(half) for half in prompts] == [3, 2], "whole conversations on one side"
    assert not prompts[0] & prompts[1]
    again = {many.names[index].rpartition("/")[0] for index in many.held_out(5)}
    assert again - {f"p{at}" for at in range(30, 40)} <= held
    with pytest.raises(InvalidRequest, match=r"data.held_out=40"):
        many.held_out(40)


def test_a_prompt_that_is_there_twice_is_on_one_side() -> None:
    """Guards against drafters that are measured on prompts whose answers they were trained on, under another id."""
    samples = SampleSet(replace(sample(f"p{at}/0", 2, 3), asked=1 + at % 20) for at in range(40))
    assert (samples.prompts, samples.distinct) == (40, 20)
    held = samples.held_out(5)
    asked = [{int(samples.names[at][1:-2]) % 20 for at in side} for side in (held, samples.without(held))]
    assert [len(side) for side in asked] == [5, 15]
    assert not asked[0] & asked[1]
    halves = [{int(samples.names[at][1:-2]) % 20 for at in half} for half in samples.halves(held)]
    assert [len(half) for half in halves] == [3, 2]
    assert not halves[0] & halves[1]


def test_facts_count_supervised_tokens() -> None:
    """Guards against a draft vocabulary of prompt words, and a mask token that occurs in prompts."""
    kept = SampleSet([sample("a/0", 2, 2), sample("b/0", 1, 2, 2), sample("c/0", 1, 1, 8)])
    facts = kept.facts([0, 1], 10, [7])
    assert facts.counts.tolist() == [0, 0, 1, 2, 1, 0, 0, 0, 0, 0]
    assert facts.unused.tolist() == [False] * 5 + [True] * 5
    with pytest.raises(InvalidRequest, match="'c/0' has id 9"):
        kept.facts([2], 9, [])


def test_an_epoch_shows_every_sequence_once() -> None:
    """Guards against an order that drops the tail of an epoch or shows a sequence twice."""
    samples = sample_set()
    sampler = BatchSampler(tuple(range(3, 23)), batch_size=8, micro_batch_size=2, seed=1)
    assert sampler.steps(2.0) == 5
    sampled = list(itertools.chain(*sampler.micro_batches(samples, 0, 5)))
    assert sorted(sampled) == sorted((index, epoch) for index in range(3, 23) for epoch in range(2))
    by_epoch = [[index for index, epoch in sampled if epoch == wanted] for wanted in range(2)]
    assert by_epoch[0] != by_epoch[1], "each epoch has an order of its own"


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_processes_share_each_step(processes: int) -> None:
    """Guards against processes that see the same sequences, or a step that depends on how many there are."""
    samples = sample_set()
    alone = BatchSampler(tuple(range(23)), 8, 8, 5)
    wanted = [set(group) for group in alone.micro_batches(samples, 0, 6)]
    shared: list[set[tuple[int, int]]] = [set() for _ in wanted]
    for rank in range(processes):
        sampler = BatchSampler(tuple(range(23)), 8, 2, 5, rank, processes)
        groups = list(sampler.micro_batches(samples, 0, 6))
        assert len(groups) == 6 * sampler.passes
        for at, group in enumerate(groups):
            assert not shared[at // sampler.passes] & set(group)
            shared[at // sampler.passes] |= set(group)
    assert shared == wanted


def test_a_tiny_set_serves_large_steps() -> None:
    """Guards against an order that is forgotten when one step takes more than an epoch."""
    sampler = BatchSampler((0, 1, 2), 8, 8, 0)
    (group,) = sampler.micro_batches(sample_set(), 0, 1)
    assert sorted(one for one in group if one[1] < 2) == [(index, epoch) for index in range(3) for epoch in range(2)]
    assert [epoch for _, epoch in group].count(2) == len(group) - 6 == 2


def test_batch_size_must_divide() -> None:
    """Guards against steps that silently leave sequences out."""
    with pytest.raises(InvalidRequest, match=r"training.batch_size=6.*micro_batch_size=2 times 2"):
        BatchSampler((0, 1), 6, 2, 0, 0, 2)


def test_seeds_are_of_sequence_and_epoch() -> None:
    """Guards against anchors that are the same in every epoch, or depend on the neighbours."""
    examples = TrainingData(sample_set(), ())

    def seeds(*wanted: tuple[int, int]) -> tuple[int, ...]:
        batch: Batch = collate_examples(3, [examples[place] for place in wanted])
        return batch.seeds

    assert seeds((4, 0), (5, 0))[1] == seeds((5, 0))[0]
    assert seeds((4, 0)) != seeds((4, 1))
    assert seeds((4, 0)) != seeds((5, 0))


def test_stored_features_are_read() -> None:
    """Guards against features of another sequence, or of a longer one than the batch has."""
    samples = SampleSet(replace(sample_set()[at], source="0" * (at % 2)) for at in range(23))
    examples = TrainingData(samples, (), lambda key: torch.full((20, 2), float(len(key))))
    batch = collate_examples(0, [examples[3, 0], examples[12, 0]])
    assert batch.features.shape == (2, max(batch.lengths), 2)
    assert batch.features[0, 0, 0] == 6, "of p3/1:0"
    assert batch.features[1, 0, 0] == 5
    short = batch.lengths.index(min(batch.lengths))
    assert bool((batch.features[short, min(batch.lengths) :] == 0).all())
