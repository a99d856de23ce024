"""Draft models: what they compute, what they never compute twice, and what they refuse."""

import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import outpace
from outpace.api import Model
from outpace.core.drafting import Frontier
from outpace.core.protocols import NodeOutputs, Observation, PromptChunk, Verdict
from outpace.core.tree import MAX_TREE_NODES
from outpace.drafters.draft_lm.source import DraftLM, DraftState
from outpace.lib.errors import InvalidRequest, ModelError, UnsupportedModel
from outpace.models.draft import DraftModel, DraftRows, early_exit, level_scores
from outpace.models.packed import PackedModel, PassPart
from outpace.testing.toy import draft_request
from outpace.trees.proposer import StaticProposer
from outpace.trees.shapes.rank_paths import Chain
from tests.unit.drafters.source.learned import PROMPTS
from tests.unit.models.tiny import (
    FAMILIES,
    byte_tokenizer,
    committed_rows,
    open_with,
    random_ids,
    save_tiny_model,
    tiny_config,
    tiny_target,
)

METHODS = ("linear:budget=5", "fixed:budget=14,depth=4,min_path_prob=0", "dynatree:budget=14")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A drafter of another family, with fewer layers and a padded embedding."""
    sizes = {"num_hidden_layers": 1, "hidden_size": 24, "num_attention_heads": 4, "vocab_size": 272}
    return save_tiny_model(tmp_path_factory.mktemp("drafter"), "qwen2", **sizes)


def load(folder: Path, drafter: Path | str | None, **options: Any) -> Model:
    name = None if drafter is None else str(drafter)
    return outpace.load(str(folder), "plain", drafter=name, dtype="float32", device="cpu", **options)


@pytest.fixture(scope="module")
def pair(checkpoint: Path, small: Path) -> Model:
    return load(checkpoint, small)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of every pass of a draft model."""
    rows: list[int] = []
    run = PackedModel.run_tapped

    def count(self: PackedModel, parts: Sequence[PassPart], taps: Any, captured: bool = True) -> Any:
        if isinstance(self, DraftModel):
            rows.append(sum(len(part.tokens) for part in parts))
        return run(self, parts, taps, captured)

    monkeypatch.setattr(PackedModel, "run_tapped", count)
    return rows


def plain(model: Model, prompt: list[int], **options: Any) -> tuple[int, ...]:
    ids: tuple[int, ...] = model.generate(prompt, method="plain", **options).token_ids
    return ids


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("method", METHODS)
def test_the_target_as_its_own_drafter_is_always_right(method: str, temperature: float, checkpoint: Path) -> None:
    """Guards against stale or shifted draft rows: positions, masks, catching up, and noise of the wrong position."""
    model = load(checkpoint, checkpoint)
    options: dict[str, Any] = {"max_new_tokens": 61, "temperature": temperature, "seed": 9}
    answer = model.generate(PROMPTS[0], method=method, **options)
    assert answer.token_ids == plain(model, PROMPTS[0], **options)
    metrics = answer.metrics
    if method.startswith("dynatree"):
        assert metrics.accepted == metrics.new_tokens - 1 - metrics.steps, "each round emits its deepest path"
        return
    depth = 5 if method.startswith("linear") else 2
    assert metrics.steps <= -(-60 // (depth + 1)) + 1
    assert metrics.accepted_per_depth[depth - 1] >= metrics.accepted_per_depth[0] - 1, "the last round may be cut"


def test_without_noise_sampled_drafts_are_greedy(checkpoint: Path) -> None:
    """Guards against the option doing nothing: without noise even a perfect drafter misses sampled tokens."""
    model = load(checkpoint, checkpoint)
    options: dict[str, Any] = {"max_new_tokens": 60, "temperature": 1.5, "seed": 9}
    keyed = model.generate(PROMPTS[0], method="linear:budget=5", **options)
    silent = model.generate(PROMPTS[0], method="linear:budget=5,noise=false", **options)
    assert keyed.token_ids == silent.token_ids
    assert keyed.metrics.accepted > silent.metrics.accepted


@pytest.mark.parametrize("method", METHODS)
def test_one_pass_per_level_and_no_row_twice(method: str, pair: Model, counted: list[int]) -> None:
    """Guards against one pass per node, one per request, and against prompts or accepted drafts computed again."""
    answers = pair.generate(PROMPTS, method=method, max_new_tokens=25)
    draft_rounds = sum(answer.metrics.draft_passes for answer in answers)
    assert len(counted) - 1 < draft_rounds, "requests share their passes, and the prompts share one"
    del counted[:]
    answer = pair.generate(PROMPTS[1], method=method, max_new_tokens=25)
    assert len(counted) == 1 + answer.metrics.draft_passes
    known = len(PROMPTS[1]) + answer.metrics.new_tokens
    assert sum(counted) - counted[0] <= known - counted[0] + answer.metrics.drafted, "each id and each node once"


def test_draft_rows_after_many_rounds_equal_a_fresh_prefill(pair: Model) -> None:
    """Guards against draft KV that drifts: rejected rows kept, accepted ones filed in the wrong order."""
    model, draft = pair, pair.drafters.language_model()
    for method in METHODS:
        prompt = PROMPTS[1]
        with model.stream(prompt, method=method, max_new_tokens=40) as stream:
            emitted = [token for _ in range(9) for token in next(stream).tokens]
            slot = stream._session.state.of_source.slot
            length = draft.kv.lengths[slot]
            assert length >= len(prompt) + len(emitted) - 2, "at most a leaf and the pending token are missing"
            fresh = (slot + 1) % model.target.max_slots
            draft.rewind_slot(fresh, 0)
            draft.fill([fresh], [torch.tensor((prompt + emitted)[:length])])
            for rows in (draft.kv.keys, draft.kv.values):
                torch.testing.assert_close(rows[:, slot, :, :length], rows[:, fresh, :, :length], atol=1e-4, rtol=1e-4)


def test_a_round_that_it_was_left_out_of_commits_none_of_its_rows() -> None:
    """Guards against rows of an earlier round's tree kept as those of tokens that retrieval brought."""
    target = tiny_target(tiny_config("llama"))
    source = DraftLM(early_exit(target, 2), target.vocab_size)
    proposer = StaticProposer(source, Chain(), 3, torch.device("cpu"))
    state, ids = proposer.open(0), list(PROMPTS[0])
    proposer.prefill([state], [PromptChunk(torch.tensor(ids[:-1]))])
    (tree,) = proposer.propose([state], [draft_request(ids, 3, 9)])
    logits = torch.zeros(4, 8)
    outputs = NodeOutputs(logits, *reversed(logits.topk(8)))
    proposer.observe([state], [Observation(tree, Verdict((0, 1), 5), outputs)])
    rows = source.model.kv.lengths[state.of_source.slot]
    assert rows == len(ids) + 1
    proposer.observe([state], [Observation(tree, Verdict((0, 1, 2), 5), outputs)])
    assert source.model.kv.lengths[state.of_source.slot] == rows


def test_a_prompt_after_an_accepted_leaf_is_written_as_it_comes() -> None:
    """Guards against a conversation's next prompt of which no row is written before its first round, and then all in
    that round, because the last draft of the turn before was accepted: a leaf, which has no row."""
    target = tiny_target(tiny_config("llama"))
    source = DraftLM(early_exit(target, 2), target.vocab_size)
    proposer = StaticProposer(source, Chain(), 3, torch.device("cpu"))
    state, ids = proposer.open(0), list(PROMPTS[0])
    proposer.prefill([state], [PromptChunk(torch.tensor(ids[:-1]))])
    (tree,) = proposer.propose([state], [draft_request(ids, 3, 9)])
    logits = torch.zeros(4, 8)
    outputs = NodeOutputs(logits, *reversed(logits.topk(8)))
    proposer.observe([state], [Observation(tree, Verdict((0, 1, 2, 3), 5), outputs)])
    known = [*ids, *tree.tokens[1:].tolist()]
    assert source.model.kv.lengths[0] == len(known) - 1
    ids = known + random_ids(20, 3)
    forked = proposer.fork(state, 1, len(known))
    for first in range(len(known), len(ids), 10):
        chunk = torch.tensor(ids[first : first + 10])
        proposer.prefill([forked], [PromptChunk(chunk, before=ids[first - 1])])
        assert source.model.kv.lengths[1] == first + 10
    source.model.fill([2], [torch.tensor(ids)])
    for rows in (source.model.kv.keys, source.model.kv.values):
        torch.testing.assert_close(rows[:, 1, :, : len(ids)], rows[:, 2, :, : len(ids)], atol=1e-4, rtol=1e-4)


def test_many_missing_ids_are_written_in_several_passes(counted: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a long prompt, written by another method, in one pass: its mask takes memory with the square."""
    target, drafts, work = tiny_target(tiny_config("llama")), [], []
    for most in (64, 8):
        monkeypatch.setattr("outpace.drafters.draft_lm.source._AT_ONCE", most)
        source = DraftLM(early_exit(target, 2), target.vocab_size)
        proposer = StaticProposer(source, Chain(), 3, torch.device("cpu"))
        state = proposer.fork(None, 0, 20)
        (tree,) = proposer.propose([state], [draft_request(PROMPTS[1], 3, 9)])
        drafts.append(tree.tokens.tolist())
        work.append((len(counted), sum(counted)))
        counted.clear()
    (passes, rows), several = work
    assert drafts[0] == drafts[1]
    assert several == (passes + 3, rows), "30 ids are 8, 8, 8 and 6, each once"


def test_a_node_is_scored_on_its_own_path(pair: Model) -> None:
    """Guards against siblings that see each other: a level's scores equal those of each path decoded alone."""
    draft = pair.drafters.language_model()
    source: Any = DraftLM(draft, pair.target.vocab_size)
    request = draft_request(PROMPTS[1], 20, 8)
    state = source.open(0)
    source.prefill([state], [PromptChunk(torch.tensor(PROMPTS[1][:20]))])
    assert source.begin([state], [request]) == [8]
    root = source.expand([state], Frontier(torch.tensor([PROMPTS[1][-1]]), [0], [-1]), 3)
    first = source.expand([state], Frontier(root.tokens[0], [0] * 3, [0] * 3), 2)
    second = source.expand([state], Frontier(first.tokens[[0, 2], 1], [0] * 2, [0, 2]), 2)
    third = source.expand([state], Frontier(second.tokens[1, :1], [0], [1]), 2)
    path = [int(root.tokens[0, 2]), int(first.tokens[2, 1]), int(second.tokens[1, 0])]
    for depth, (found, place) in enumerate(((root, 0), (first, 2), (second, 1), (third, 0))):
        alone, ids = source.open(1), PROMPTS[1] + path[:depth]
        source.begin([alone], [draft_request(ids, 20, 8)])
        expected = source.expand([alone], Frontier(torch.tensor(ids[-1:]), [0], [-1]), 2)
        torch.testing.assert_close(found.log_probs[place, :2], expected.log_probs[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_early_exit_is_the_targets_first_layers(family: str) -> None:
    """Guards against a copy that costs memory, a layer too many, or a target that lost its own layers."""
    target = tiny_target(tiny_config(family))
    draft = early_exit(target, 2)
    slot = 0
    draft.fill([slot], [torch.tensor(PROMPTS[1])])
    wanted, _ = open_with(target, PROMPTS[1])
    keys, values = committed_rows(target, wanted)
    torch.testing.assert_close(draft.kv.keys[:, slot, :, : len(PROMPTS[1])], keys[:2], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(draft.kv.values[:, slot, :, : len(PROMPTS[1])], values[:2].float(), atol=1e-5, rtol=1e-5)
    assert draft.head is target.head
    assert (draft.config.num_hidden_layers, target.config.num_hidden_layers) == (2, 3)
    own = {id(weight) for weight in target.decoder.parameters()}
    assert all(id(weight) in own for weight in draft.decoder.parameters())
    rows = DraftRows(slot, torch.tensor([0, 0]), torch.eye(2).bool(), tokens=torch.tensor([1, 2]), wanted=2)
    logits = level_scores(draft, [rows], draft.head)
    assert torch.isfinite(logits).all()


@pytest.mark.parametrize("name", ["early-exit:0", "early-exit:3", "early-exit:x"])
def test_an_early_exit_that_does_not_exist_is_refused(name: str, checkpoint: Path) -> None:
    """Guards against an exit after the last layer, which would be the target at twice the price."""
    with pytest.raises(InvalidRequest, match=f"drafter='{name}'"):
        load(checkpoint, name)


def test_a_context_longer_than_the_drafters(checkpoint: Path, tmp_path: Path) -> None:
    """Guards against positions the drafter never learned, and against a request that fails half-way through."""
    short = save_tiny_model(tmp_path, num_hidden_layers=1, max_position_embeddings=40)
    with pytest.warns(UserWarning, match=r"positions for 40 tokens.*drafts nothing"):
        model = load(checkpoint, short, max_model_len=100)
    for method in METHODS:
        for prompt in (PROMPTS[1], random_ids(60, 4)):
            answer = model.generate(prompt, method=method, max_new_tokens=38)
            assert answer.token_ids == plain(model, prompt, max_new_tokens=38), f"{method}, prompt of {len(prompt)}"
            assert (answer.metrics.drafted > 0) == (len(prompt) < 40)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(checkpoint, short, max_model_len=40)


def test_the_rows_of_a_draft_model_count_towards_the_memory(
    checkpoint: Path, small: Path, pair: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a draft model whose keys and values take the memory of others, until the process is killed: they
    were in no budget; and against a budget that fits no request any more, or is less where memory is taken at once and
    nothing is saved."""
    own, draft = pair.target.row_bytes, pair.drafters.language_model().row_bytes
    for is_lazy, budget in ((True, 5000 * own // (own + draft)), (False, 5000)):
        monkeypatch.setattr("outpace.models.packed.is_lazy", lambda device, is_lazy=is_lazy: is_lazy)
        loaded = load(checkpoint, small, kv_cache_memory_bytes=5000 * own, max_model_len=100)
        assert loaded.target.memory.budget == budget
    monkeypatch.setattr("outpace.models.packed.is_lazy", lambda device: True)
    tight = load(checkpoint, small, kv_cache_memory_bytes=(MAX_TREE_NODES + 100) * own, max_model_len=100)
    assert tight.target.memory.budget == MAX_TREE_NODES + 100


def test_the_memory_of_a_draft_models_rows_is_given_back(checkpoint: Path, small: Path) -> None:
    """Guards against rows of a long request that a draft model keeps where the target gave up its own: in a slot that
    has become free, or that a short request began in with a prefix of another one."""
    loaded = load(checkpoint, small)
    model, ids = loaded.drafters.language_model(), torch.tensor(random_ids(60, 4))
    for slot in range(3):
        model.fill([slot], [ids])
    DraftLM(model, loaded.target.vocab_size).fork(DraftState(0), 1, 9)
    loaded.target.kv.lengths[1] = 9
    for slot in (1, 2):
        loaded.target.memory.trim(slot)
    assert [(model.kv.lengths[slot], model.memory.held(slot)) for slot in range(3)] == [(60, 60), (9, 9), (0, 0)]


def test_another_vocabulary_is_refused_with_the_first_difference(checkpoint: Path, tmp_path: Path) -> None:
    """Guards against drafts in other ids: never accepted, and nobody would know why."""
    other = save_tiny_model(tmp_path / "other")
    file = other / "tokenizer.json"
    contents = json.loads(file.read_text())
    vocab = contents["model"]["vocab"]
    first, second = (next(text for text, number in vocab.items() if number == wanted) for wanted in (40, 60))
    vocab[first], vocab[second] = 60, 40
    file.write_text(json.dumps(contents))
    with pytest.raises(ModelError, match=r"id 40 is .* there and 'H' in the target, 2 of 257 ids differ"):
        load(checkpoint, other)


def test_files_write_one_vocabulary_in_two_ways(tmp_path: Path) -> None:
    """Guards against refusing a folder of Gemma's as the drafter of a GGUF file of Gemma's, and a GGUF file of
    Qwen2.5, which names the ids that pad, as the drafter of Qwen3, which has tokens there."""
    target, drafter = (save_tiny_model(tmp_path / name) for name in ("target", "drafter"))
    for place, added in ((target, ["  ", "<think>"]), (drafter, ["▁▁", "[PAD258]"])):
        tokenizer = byte_tokenizer()
        tokenizer.add_tokens(added)
        tokenizer.save_pretrained(place)
    assert load(target, drafter).generate(PROMPTS[1], max_new_tokens=2).token_ids


def test_more_ids_behind_the_last_common_one_are_padding(checkpoint: Path, tmp_path: Path) -> None:
    """Guards against refusing a drafter for a token that only one side added, and against drafting such a token."""
    more = save_tiny_model(tmp_path / "more", vocab_size=300)
    fewer = save_tiny_model(tmp_path / "fewer", vocab_size=257)
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([f"<extra-{index}>" for index in range(40)])
    tokenizer.save_pretrained(more)
    for drafter in (more, fewer):
        model = load(checkpoint, drafter)
        for method in METHODS:
            answer = model.generate(PROMPTS[1], method=method, max_new_tokens=30)
            assert answer.token_ids == plain(model, PROMPTS[1], max_new_tokens=30)


def test_what_cannot_draft_is_refused_at_load(checkpoint: Path, tmp_path: Path) -> None:
    """Guards against a drafter that fails at the first request instead of when it is named."""
    with pytest.raises(ModelError, match="no such folder"):
        load(checkpoint, tmp_path / "missing")
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(vocab_size=264, hidden_size=16, state_size=4, num_hidden_layers=1)
    MambaForCausalLM(config).save_pretrained(tmp_path / "mamba")
    byte_tokenizer().save_pretrained(tmp_path / "mamba")
    with pytest.raises(UnsupportedModel, match=r"mamba.*rolled back"):
        load(checkpoint, tmp_path / "mamba")
