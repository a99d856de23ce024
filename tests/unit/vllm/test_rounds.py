"""Rows of vLLM's batches as rounds of a proposer: whatever the scheduler does, what is told is true."""

import pytest

from outpace.vllm.rounds import Rounds
from tests.unit.vllm.simulated import LENGTH, Simulated, Witness, random_prompts, said


def plain(prompt: list[int], new: int) -> list[int]:
    ids = list(prompt)
    while len(ids) < len(prompt) + new:
        ids.append(said(ids))
    return ids


def check(engine: Simulated, prompts: list[list[int]], new: int) -> int:
    """Decode; every answer is plain decoding's."""
    steps, wanted = engine.run(), sorted(plain(prompt, new) for prompt in prompts)
    assert [ids[: len(one)] for ids, one in zip(sorted(engine.done), wanted, strict=True)] == wanted
    return steps


@pytest.mark.parametrize("taps", [True, False])
@pytest.mark.parametrize(("paused", "steps"), [(0.0, range(10, 11)), (0.5, range(13, 42))])
def test_without_disturbances_every_step_is_a_round_that_is_observed(taps: bool, paused: float, steps: range) -> None:
    """Guards against rounds that are lost where nothing disturbs: every row drafts at every step and learns of it; and
    against what was said without drafts being read again as a prompt is."""
    witness = Witness(taps, truth=1.0)
    engine = Simulated(Rounds(witness, 8, LENGTH, 4), seed=0)
    engine.paused = paused
    prompts = random_prompts(1, 5)
    for prompt in prompts:
        engine.add(prompt, 40)
    # A prompt of up to 32 tokens takes two steps of 16, and a step with drafts says 5 tokens.
    assert check(engine, prompts, 40) in steps
    assert witness.prompt_rows == sum(map(len, prompts))
    assert witness.proposed - witness.observed == len(prompts)  # the last chain of each is never verified


@pytest.mark.parametrize("block", [0, 4])
@pytest.mark.parametrize("taps", [True, False])
@pytest.mark.parametrize("seed", range(6))
def test_a_proposer_is_shown_the_truth_whatever_the_scheduler_does(taps: bool, block: int, seed: int) -> None:
    """Guards against states that go with a row when its request has moved, was preempted, left out, cut short or came
    back behind a cached beginning; against features, best ids or verdicts of another request; against slots that two
    share; against passes that were not seen."""
    witness = Witness(taps)
    engine = Simulated(Rounds(witness, 3 + seed % 4, LENGTH, 5), seed, 7, block, upset=0.4)
    engine.paused = 0.3 * (seed % 2)
    prompts = random_prompts(seed, 9, shared=12)
    prompts += [prompts[0], prompts[0]]  # samples of one prompt
    for count, prompt in enumerate(prompts):
        engine.add(prompt, 20)
        for _ in range(count):
            engine.step()
    check(engine, prompts, 20)
    assert witness.observed > 20


@pytest.mark.parametrize(("shared", "taken"), [(16, 16), (18, 17)])
def test_a_common_beginning_is_taken_over(shared: int, taken: int) -> None:
    """Guards against drafters that know nothing of what vLLM had in its cache, though another request had told it; and
    against the last common id with the token that follows it in the other request, where it can be read again."""
    witness = Witness(True)
    engine = Simulated(Rounds(witness, 4, LENGTH, 4), seed=0, block=4)
    prompts = random_prompts(2, 3, shared=shared)
    for prompt in prompts:
        engine.add(prompt, 8)
        check(engine, [prompt], 8)
        engine.done.clear()
    assert witness.taken == [taken] * 2


def test_without_what_came_before_drafts_follow_from_less() -> None:
    """Guards against rows that never draft because a cached beginning was never seen here."""
    witness = Witness(True, truth=1.0)
    rounds = Rounds(witness, 2, LENGTH, 4)
    engine = Simulated(rounds, seed=0, block=4)
    (prompt,) = random_prompts(3, 1, shared=16)
    engine._cached.append(prompt)
    engine.add(prompt, 10)
    check(engine, [prompt], 10)
    assert [text.offset for text in rounds.roster.known] == [len(prompt) // 4 * 4 - (4 if len(prompt) % 4 == 0 else 0)]
    assert witness.observed >= 1


def test_rows_without_a_slot_go_without_drafts() -> None:
    """Guards against a batch larger than the drafter's slots: who is drafted for keeps its slot, the others wait."""
    witness = Witness(True)
    engine = Simulated(Rounds(witness, 2, LENGTH, 4), seed=0, chunk=64)
    prompts = random_prompts(4, 5)
    for prompt in prompts:
        engine.add(prompt, 12)
    engine.step()
    assert sum(bool(request.drafts) for request in engine.requests) == 2
    check(engine, prompts, 12)


def test_no_draft_goes_beyond_the_longest_request() -> None:
    """Guards against drafts for positions that vLLM has no room for."""
    engine = Simulated(Rounds(Witness(False, truth=1.0), 1, 30, 8), seed=0, chunk=64)
    engine.add(list(range(20)), 10)
    while engine.requests:
        engine.step()
        assert all(len(one.ids) + len(one.drafts) < 30 for one in engine.requests)


def test_drafts_that_were_not_proposed_are_no_round() -> None:
    """Guards against a verdict on tokens that were not proposed."""
    witness = Witness(True, truth=1.0)
    rounds = Rounds(witness, 1, LENGTH, 4)
    engine = Simulated(rounds, seed=0, chunk=64)
    engine.add([1, 2, 3, 4], 30)
    engine.step()
    (request,) = engine.requests
    request.drafts = [request.drafts[0], (request.drafts[1] + 1) % 50]
    before = witness.prompt_rows
    engine.step()
    assert witness.observed == 0
    assert witness.prompt_rows == before + 2
    engine.run()
    assert witness.observed > 2
