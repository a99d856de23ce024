"""The target as its own drafter on a part of its keys and values: what it sees, drafts and leaves alone."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from outpace.cache.slots import SINKS
from outpace.core.params import SamplingParams
from outpace.drafters.build_context import BuildContext
from outpace.drafters.medusa.net import MedusaConfig, MedusaNet
from outpace.drafters.self_draft.selectors import CHUNK, OBSERVED, Chunks, OfPrompt, Snap, Window
from outpace.drafters.self_draft.source import SelfDraft
from outpace.engine.engine import Engine
from outpace.engine.session import Session
from outpace.lib.errors import InvalidRequest
from outpace.methods.catalog import build_proposer, parse_method
from outpace.models.target import PackedTarget
from outpace.testing import decode
from outpace.testing.toy import draft_request, no_draft_model
from outpace.trees.proposer import EmptyDraft, GrowingProposer, StaticProposer
from outpace.trees.shapes.dynatree import FixedTree, FixedTreeConfig
from outpace.trees.shapes.rank_paths import Chain
from tests.pairwise import covering
from tests.statistics import chi_square_p
from tests.unit.drafters.source.learned import Every, proposer_of, random_net
from tests.unit.models.tiny import VOCAB, open_with, random_ids, stock_model, tiny_config, tiny_target

KEEP = 40
PROMPTS = [random_ids(90, 2), random_ids(9, 1), random_ids(61, 3)]
OPTIONS = ["select=window", "select=snap", "select=snap,shape=beam", "select=window,shape=fixed",
           "select=chunks,guess=suffix"]  # fmt: skip


def proposer_for(target: PackedTarget, text: str) -> Any:
    sizes = {"hidden_size": target.config.hidden_size, "vocab_size": target.vocab_size, "heads": 3}
    config = MedusaConfig(**sizes, head="target", bias=False, chained=True)
    heads = random_net(MedusaNet(config))  # which only tokenswift asks for
    around = BuildContext(target.vocab_size, target.device, no_draft_model, target, lambda: heads)
    return build_proposer(parse_method(text), around)


def decoded_twice(
    target: PackedTarget, proposer: Any, params: Sequence[SamplingParams]
) -> tuple[list[Session], list[Session]]:
    """Answers to all prompts, which are plain decoding's, and the same again from the prefix cache."""
    plain = decode(Engine(target), PROMPTS, params, [EmptyDraft()] * 3)
    engine = Engine(target, prefill_chunk=16)
    first, second = (decode(engine, PROMPTS, params, [proposer] * 3) for _ in range(2))
    for together in (first, second):
        assert [one.generated for one in together] == [one.generated for one in plain]
    return first, second


@pytest.mark.parametrize(
    ("options", "temperature", "pack"), covering(list(product(OPTIONS, [0.0, 1.0], [False, True])))
)
def test_lossless(options: str, temperature: float, pack: bool) -> None:
    """Guards against scratch rows that survive the verifying pass, drafts that are committed, a selecting pass that
    writes into the prompt, or a view that reaches verification: alone, in a batch, and behind a prefix that was
    copied."""
    target = tiny_target(tiny_config("llama"), pack=pack)
    params = [SamplingParams(max_new_tokens=40, temperature=temperature, seed=seed) for seed in range(3)]
    proposer = proposer_for(target, f"magicdec:keep={KEEP},{options}")
    _, together = decoded_twice(target, proposer, params)
    assert together[0].metrics.reused_tokens > KEEP
    assert all(one.metrics.drafted for one in together[::2])
    for prompt, own, expected in zip(PROMPTS, params, together, strict=True):
        (alone,) = decode(Engine(target), [prompt], [own], [proposer])
        assert alone.generated == expected.generated


@pytest.mark.parametrize("pack", [False, True], ids=["python", "packed"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("shape", ["chain", "fixed"])
def test_a_view_of_all_rows_drafts_what_the_target_says(shape: str, temperature: float, pack: bool) -> None:
    """Guards against shifted positions, stale or missing scratch rows, and noise of another position: with all rows in
    view every chain, and the best path of every tree, is right."""
    target = tiny_target(tiny_config("llama"), pack=pack)
    params = [SamplingParams(max_new_tokens=41, temperature=temperature, seed=seed) for seed in range(3)]
    source = SelfDraft(target, Every(target, 1))
    proposer: Any = StaticProposer(source, Chain(), 3, target.device)
    if shape == "fixed":
        proposer = GrowingProposer(source, FixedTree(FixedTreeConfig(depth=3, breadth=2, min_path_prob=0)), 14)
    for one in decode(Engine(target), PROMPTS, params, [proposer] * 3):
        assert one.metrics.steps == 10, "four tokens in each round, after the first one"
        assert one.metrics.accepted == 30


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_snap_selects_what_the_end_of_the_prompt_attends_to(family: str) -> None:
    """Guards against weights of other rows or heads, a missing scale, cap or sliding window, and pooling at the wrong
    place: compared with the attention weights of transformers' eager implementation."""
    config = tiny_config(family, **({"sliding_window": 50} if family == "gemma2" else {}))
    target, ids = tiny_target(config), PROMPTS[0]
    slot, _ = open_with(target, ids)
    selected = Snap(target, KEEP).select(slot, ids)
    assert selected is not None
    before = len(ids) - OBSERVED
    stock = stock_model(config)
    with torch.inference_mode():
        attentions = stock(torch.tensor([ids]), output_attentions=True).attentions
    assert selected.shape == (len(attentions), config.num_key_value_heads, KEEP)
    for layer, weights in enumerate(attentions):
        of_heads = weights[0, :, -OBSERVED:, :before].sum(dim=1)  # [heads, before]
        of_groups = of_heads.unflatten(0, (config.num_key_value_heads, -1)).sum(dim=1)
        for head, sums in enumerate(of_groups):
            pooled = [float(sums[max(0, at - 2) : at + 3].sum()) / 5 for at in range(before)]
            least = sorted(pooled)[-(KEEP - OBSERVED)]
            rows = selected[layer, head].tolist()
            assert rows == sorted(set(rows))
            assert rows[-OBSERVED:] == list(range(before, len(ids)))
            assert all(pooled[row] >= least - 1e-4 for row in rows[:-OBSERVED]), (layer, head)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("length", [88, 90], ids=["whole", "short"])
def test_chunks_are_those_with_the_best_mean_keys(length: int, family: str) -> None:
    """Guards against keys or queries of other rows or heads, chunks that are shifted by one, a last chunk that is lost,
    and chunks beyond a sliding window: compared with queries and keys of transformers' eager implementation."""
    config = tiny_config(family, **({"sliding_window": 50} if family == "gemma2" else {}))
    target, ids = tiny_target(config), PROMPTS[0][:length]
    slot, _ = open_with(target, ids)
    selected = Chunks(target, KEEP).select(slot, ids)
    assert selected is not None
    last = (length - 1) // CHUNK
    for layer, (query, keys) in enumerate(eager_queries_and_keys(config, ids)):
        of_groups = query.unflatten(0, (len(keys), -1)).sum(dim=1)  # [kv_heads, head_dim]
        is_local = family == "gemma2" and config.layer_types[layer] == "sliding_attention"
        for head, of_group in enumerate(of_groups):
            starts = range(0, last * CHUNK, CHUNK)
            scores = [float(of_group @ keys[head, start : start + CHUNK].mean(dim=0)) for start in starts]
            reached = [chunk for chunk in range(1, last) if not is_local or (chunk + 1) * CHUNK > length - 50]
            best = sorted(reached, key=lambda chunk: -scores[chunk])[: KEEP // CHUNK - 2]
            expected = [row for chunk in sorted([0, *best]) for row in range(chunk * CHUNK, (chunk + 1) * CHUNK)]
            assert selected[layer, head].tolist() == [*expected, *range(last * CHUNK, length)], (layer, head)


def eager_queries_and_keys(config: Any, ids: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
    """Per layer the rotated query of the last token [heads, head_dim] and all keys [kv_heads, L, head_dim], of stock
    layers around a dense attention."""
    found: list[tuple[Tensor, Tensor]] = []

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **own: Any) -> Any:
        found.append((query[0, :, -1], key[0]))
        keys, values = (part.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for part in (key, value))
        scores = query @ keys.transpose(2, 3) * scaling
        if own.get("softcap"):
            scores = torch.tanh(scores / own["softcap"]) * own["softcap"]
        distances = torch.arange(len(ids))[:, None] - torch.arange(len(ids))
        hidden = (distances < 0) | (distances >= (own.get("sliding_window") or len(ids)))
        return (scores.masked_fill(hidden, -torch.inf).softmax(-1) @ values).transpose(1, 2), None

    ALL_ATTENTION_FUNCTIONS.register("dense", attend)
    with torch.inference_mode():
        stock_model(config, "dense")(torch.tensor([ids]))
    return found


def test_verified_tokens_join_the_view() -> None:
    """Guards against a selection that ends with the prompt, has a token twice, or names a row that is not there."""
    target = tiny_target(tiny_config("llama"))
    slot, _ = open_with(target, PROMPTS[0])
    for selector in (Snap(target, KEEP), Chunks(target, KEEP), Window(target, KEEP)):
        target.kv.lengths[slot] = len(PROMPTS[0])
        selected = selector.select(slot, PROMPTS[0])
        recent = len(PROMPTS[0]) % CHUNK if isinstance(selector, Chunks) else OBSERVED
        kept = KEEP - CHUNK + recent if isinstance(selector, Chunks) else KEEP
        for more in (0, 5):
            target.kv.lengths[slot] = length = len(PROMPTS[0]) + more
            view = selector.view(slot, selected)
            assert view is not None
            assert view.shape[-1] == kept + (more if isinstance(selector, OfPrompt) else 0)
            assert view[0, 0, -recent:].tolist() == list(range(length - recent, length))
            if isinstance(selector, Window):
                assert view[0, 0, :SINKS].tolist() == list(range(SINKS))


def test_a_context_that_is_seen_whole_is_not_drafted_for() -> None:
    """Guards against drafts that cost what decoding costs; with `window` they begin once the answer is long enough."""
    for select, begins in (("snap", False), ("window", True)):
        target = tiny_target(tiny_config("llama"))
        proposer = proposer_for(target, f"magicdec:select={select},keep={KEEP}")
        prompt, params = [random_ids(KEEP, 4)], [SamplingParams(max_new_tokens=20)]
        (session,) = decode(Engine(target), prompt, params, [proposer])
        assert bool(session.metrics.drafted) == begins


class Counted(Snap):
    """Remembers what was selected for which prompt."""

    def select(self, slot: int, prompt: Sequence[int]) -> Tensor | None:
        found = super().select(slot, prompt)
        CALLS.append((list(prompt), found))
        return found


CALLS: list[tuple[list[int], Tensor | None]] = []


def test_every_prompt_gets_one_selection_of_its_own() -> None:
    """Guards against a request that takes over a cached prefix or goes on with a conversation and has no selection, or
    that of the prompt before; and against selecting anew in every round."""
    target = tiny_target(tiny_config("llama"))
    engine, proposer = Engine(target), proposer_of("chain", SelfDraft(target, Counted(target, KEEP)))
    CALLS.clear()

    def ask(prompt: list[int]) -> Any:
        (session,) = engine.add(prompt, SamplingParams(max_new_tokens=12), proposer)
        engine.run_until(lambda: session.has_ended, [session])
        return session

    first = ask(PROMPTS[0])
    prompts = [PROMPTS[0], [*first.ids, *random_ids(7, 8)], [*PROMPTS[0][:80], *random_ids(30, 9)]]
    second = ask(prompts[1])
    third = ask(prompts[2])
    assert second.metrics.reused_tokens > len(PROMPTS[0])
    assert third.metrics.reused_tokens == 80
    assert [prompt for prompt, _ in CALLS] == prompts
    for prompt, selected in list(CALLS):
        fresh = tiny_target(tiny_config("llama"))
        expected = Snap(fresh, KEEP).select(open_with(fresh, prompt)[0], prompt)
        assert expected is not None
        assert selected is not None
        assert float((expected == selected).float().mean()) > 0.99, "but for ties"


def test_a_selection_ends_with_its_prompt() -> None:
    """Guards against rows of a prompt that was rewound, where another one as long follows."""
    target = tiny_target(tiny_config("llama"))
    source = SelfDraft(target, Counted(target, KEEP))
    slot, _ = open_with(target, PROMPTS[0])
    state = source.open(slot)
    CALLS.clear()
    length = len(PROMPTS[0])
    for rewound, calls in ((length + 1, 1), (length, 1), (length - 1, 2)):
        source.begin([state], [request_after(PROMPTS[0])])
        source.rewind(state, rewound)
        source.begin([state], [request_after(PROMPTS[0])])
        assert len(CALLS) == calls


def request_after(prompt: list[int]) -> Any:
    request = draft_request([*prompt, 5], 3, 9)
    return replace(request, sampling=replace(request.sampling, prompt_length=len(prompt)))


@pytest.mark.thorough
@pytest.mark.parametrize("method", ["magicdec:", "triforce:", "tokenswift:retrieve=none,"])
def test_the_distribution_of_what_is_said(method: str) -> None:
    """Guards against drafts that shift what is sampled: two tokens of 2,000 samples, the second one drafted, by
    chi-square against the target's distribution; false alarm: 1e-6 per case."""
    target = tiny_target(tiny_config("llama", vocab_size=5), max_slots=64)
    prompt = random_ids(50, 3, vocab=5)
    params = SamplingParams(max_new_tokens=4, temperature=3.0, n=2000, seed=11, verification="rejection")
    proposer = proposer_for(target, f"{method}keep={KEEP}")
    sessions = decode(Engine(target), [prompt], [params], [proposer])
    stock = stock_model(tiny_config("llama", vocab_size=5))
    with torch.inference_mode():
        logits = stock(torch.tensor([[*prompt, token] for token in range(5)])).logits[:, -2:] / 3.0
    first, second = logits[0, 0].softmax(-1), logits[:, 1].softmax(-1)
    distribution = {pair: float(first[pair[0]] * second[pair]) for pair in product(range(5), repeat=2)}
    seen = Counter(tuple(session.generated[:2]) for session in sessions)
    rare = [pair for pair, share in distribution.items() if share < 5 / 2000]
    common = [pair for pair in distribution if pair not in rare]
    assert len(common) > 8, "or the test has no power"
    counts = [*(seen[pair] for pair in common), sum(seen[pair] for pair in rare)]
    shares = [*(distribution[pair] for pair in common), sum(distribution[pair] for pair in rare)]
    assert chi_square_p(counts, shares) > 1e-6
    accepted, drafted = (sum(getattr(s.metrics, count) for s in sessions) for count in ("accepted", "drafted"))
    assert 0 < accepted < drafted


def test_what_cannot_be_is_refused() -> None:
    """Guards against tables of a GPU that know no views, a target that is not ours, and options without effect."""
    on_gpu = PackedTarget(stock_model(tiny_config("llama"), "outpace"), 64, 1, (), pack=False, tiled=True)
    with pytest.raises(InvalidRequest, match="with the target itself is for CPUs"):
        proposer_for(on_gpu, "magicdec")
    with pytest.raises(InvalidRequest, match=r"a model that outpace\.load has loaded"):
        build_proposer(parse_method("magicdec"), BuildContext(VOCAB, torch.device("cpu"), no_draft_model))
    for text, complaint in (
        ("magicdec:window=512", "name select=window,keep=512"),
        ("magicdec:keep=32", "keep=32"),
        ("magicdec:select=best", "select=best"),
        ("magicdec:guess=suffix,shape=beam", "guess=suffix: continues chains"),
        ("triforce:warm=shipped", "warm=shipped"),
    ):
        with pytest.raises(InvalidRequest, match=complaint):
            parse_method(text)
