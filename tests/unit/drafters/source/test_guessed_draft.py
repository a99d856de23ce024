"""Guesses ahead of the target's own drafts: they save passes and change no draft."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from outpace.core.drafting import UNKNOWN, Retrieved
from outpace.core.params import SamplingParams
from outpace.core.protocols import DraftRequest, Stateless
from outpace.core.tree import Topology
from outpace.drafters.build_context import BuildContext
from outpace.drafters.draft_lm.source import DraftLM
from outpace.drafters.method import LANGUAGE_MODEL
from outpace.drafters.ranked_vocabulary import save_vocabulary
from outpace.drafters.self_draft.guessed import GUESSES, GuessedSelfDraft, ModelGuesser
from outpace.drafters.self_draft.selectors import Chunks
from outpace.drafters.self_draft.source import SelfDraft
from outpace.engine.engine import Engine
from outpace.methods.catalog import build_proposer, parse_method
from outpace.models.attention import ATTENTION_NAME
from outpace.models.draft import draft_model_of
from outpace.testing import decode
from outpace.trees.proposer import EmptyDraft, StaticProposer
from outpace.trees.shapes.rank_paths import Chain
from tests.unit.drafters.source.learned import Every
from tests.unit.engine.doubles import heard
from tests.unit.models.tiny import VOCAB, random_ids, stock_model, tiny_config, tiny_target

KEEP, GAMMA = 40, 6
PROMPTS = [random_ids(90, 2), random_ids(70, 1), random_ids(61, 3)]
CPU = torch.device("cpu")


Drafts = dict[tuple[int, ...], list[int]]
"""The chain of every round by the ids that it continues."""


def recorded(source: Any, drafts: Drafts) -> Any:
    """A proposer of chains that notes them."""
    proposer = StaticProposer(source, Chain(), GAMMA, CPU)
    return heard(proposer, lambda request, tree: drafts.update({tuple(request.ids): tree.tokens.tolist()[1:]}))


class Oracle(Stateless):
    """Guesses the chains of `drafts`: all tokens right, or up to three of them and then a wrong one, or none."""

    def __init__(self, drafts: Drafts, is_perfect: bool) -> None:
        self._drafts, self._is_perfect = drafts, is_perfect

    def prepare(
        self, states: Sequence[Any], requests: Sequence[DraftRequest], paths: Sequence[Tensor]
    ) -> list[Retrieved]:
        found = []
        for request, path in zip(requests, paths, strict=True):
            known = self._drafts[tuple(request.ids)]
            assert path.tolist() == [request.ids[-1], *known[: len(path) - 1]], "guesses continue the chain"
            guesses = known[len(path) - 1 :]
            if not self._is_perfect:
                right = (len(request.ids) + len(path)) % 4
                guesses = [*guesses[:right], *((token + 1) % VOCAB for token in guesses[right:])]
                guesses = guesses if right else [UNKNOWN, *guesses]
            found.append(Retrieved(torch.tensor([UNKNOWN, *guesses]), Topology.chain(1 + len(guesses))))
        return found


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("is_perfect", [True, False])
def test_guesses_save_passes_and_change_no_draft(is_perfect: bool, temperature: float) -> None:
    """Guards against rows of wrong guesses that are seen or handed out, scores of another level or request, noise of
    another position, and rows of the round before: alone and in a batch the chains are those without guesses."""
    target = tiny_target(tiny_config("llama"))
    params = [SamplingParams(max_new_tokens=29, temperature=temperature, seed=seed) for seed in range(3)]
    plain = decode(Engine(target), PROMPTS, params, [EmptyDraft()] * 3)
    unguessed, guessed = Drafts(), Drafts()
    self_draft = recorded(SelfDraft(target, Chunks(target, KEEP)), unguessed)
    without = decode(Engine(target), PROMPTS, params, [self_draft] * 3)
    source = GuessedSelfDraft(target, Chunks(target, KEEP), Oracle(unguessed, is_perfect))
    proposer = recorded(source, guessed)
    for first, last in ((0, 3), (0, 1), (1, 2)):
        guessed.clear()
        count = last - first
        sessions = decode(Engine(target), PROMPTS[first:last], params[first:last], [proposer] * count)
        assert [one.generated for one in sessions] == [one.generated for one in plain[first:last]]
        assert guessed.items() <= unguessed.items()
        for session, other in zip(sessions, without[first:last], strict=True):
            assert session.metrics.accepted == other.metrics.accepted
            if is_perfect:
                assert session.metrics.draft_passes <= 2 * session.metrics.steps, "6 drafts, 1 + GUESSES in a pass"
            assert session.metrics.draft_passes < other.metrics.draft_passes


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_model_guesses_along_the_chain(temperature: float) -> None:
    """Guards against ids that the draft model misses or sees twice, rows of dropped drafts, and noise of another
    position: the target's copy guesses right wherever it continues, and a smaller model changes no answer."""
    config = tiny_config("llama")
    target = tiny_target(config)
    count = 1 + 6 * (GAMMA + 1)
    params = [SamplingParams(max_new_tokens=count, temperature=temperature, seed=seed) for seed in range(3)]
    plain = decode(Engine(target), PROMPTS, params, [EmptyDraft()] * 3)
    for layers in (config.num_hidden_layers, 1):
        stock = stock_model(tiny_config("llama", num_hidden_layers=layers), ATTENTION_NAME)
        model = draft_model_of(stock, target.max_length, target.max_slots)
        source = GuessedSelfDraft(target, Every(target, 1), ModelGuesser(DraftLM(model, VOCAB), CPU))
        sessions = decode(Engine(target), PROMPTS, params, [StaticProposer(source, Chain(), GAMMA, CPU)] * 3)
        assert [one.generated for one in sessions] == [one.generated for one in plain]
        for slot, session in enumerate(sessions):
            assert session.metrics.accepted == 6 * GAMMA, "all rows are in view"
            assert model.kv.lengths[slot] <= len(session.ids), "rows are of verified ids alone"
            if layers > 1:
                assert session.metrics.draft_passes == -(-GAMMA // (1 + GUESSES)) * session.metrics.steps


def test_what_guesses_is_an_option(tmp_path: Path) -> None:
    """Guards against a draft model that is not loaded for `triforce`, or loaded for nothing, and the frequent ids of a
    draft model that bound what the target drafts."""
    assert parse_method("triforce").drafter is None
    assert parse_method("triforce:guess=model").drafter == LANGUAGE_MODEL
    target = tiny_target(tiny_config("llama"))
    model = draft_model_of(stock_model(tiny_config("llama"), ATTENTION_NAME), target.max_length, target.max_slots)
    file = tmp_path / "vocabulary.safetensors"
    save_vocabulary(file, torch.arange(20), VOCAB)
    around = BuildContext(VOCAB, CPU, lambda: model, target=target, vocabulary=file)
    kinds = {"suffix": "SuffixRetriever", "model": "ModelGuesser"}
    for guess, kind in kinds.items():
        proposer: Any = build_proposer(parse_method(f"triforce:guess={guess}"), around)
        assert type(proposer.source.guesser).__name__ == kind
        assert (proposer.budget, proposer.source.selector) == (GAMMA, Chunks(target, 4096))
        assert proposer.source._head.ids is None
    assert len(proposer.source.guesser.source._head.ids) == 20
