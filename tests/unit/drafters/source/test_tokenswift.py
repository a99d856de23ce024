"""TokenSwift: which tokens drafting sees, when they are selected anew, what is guessed from them, and that answers stay
what they are."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from outpace.core.params import SamplingParams
from outpace.drafters.build_context import BuildContext
from outpace.drafters.medusa.net import MedusaConfig, MedusaNet
from outpace.drafters.self_draft.selectors import TOKEN_SINKS, Tokens, TokenSelection
from outpace.drafters.tokenswift.source import TokenSwift
from outpace.engine.engine import Engine
from outpace.lib.errors import InvalidRequest
from outpace.methods.catalog import build_proposer, parse_method
from outpace.models.packed import layers_of
from outpace.testing import decode
from outpace.testing.toy import draft_request, no_draft_model
from tests.pairwise import covering
from tests.unit.drafters.source.learned import proposer_of, random_net
from tests.unit.drafters.source.test_self_draft import PROMPTS, decoded_twice, proposer_for
from tests.unit.models.tiny import VOCAB, open_with, random_ids, stock_model, tiny_config, tiny_target

KEEP = 24
OPTIONS = ["retrieve=none,budget=40", "budget=15", "retrieve=none,shape=chain"]
SIZES: dict[str, Any] = {"hidden_size": 48, "vocab_size": VOCAB, "heads": 3}
CHAINED: dict[str, Any] = {"head": "target", "bias": False, "chained": True}


def heads(**kind: Any) -> MedusaNet:
    net: MedusaNet = random_net(MedusaNet(MedusaConfig(**SIZES, **(kind or CHAINED))))
    return net


@pytest.mark.parametrize(
    ("options", "temperature", "pack"), covering(list(product(OPTIONS, [0.0, 1.0], [False, True])))
)
def test_lossless(options: str, temperature: float, pack: bool) -> None:
    """Guards against rows of the drafting pass that survive the verifying one, a view that reaches it, and a penalty
    whose window is not that of the token's own path: together, and behind a prefix that was copied."""
    target = tiny_target(tiny_config("llama"), pack=pack)
    params = [
        SamplingParams(max_new_tokens=40, temperature=temperature, seed=seed, repetition_penalty=1.2, penalty_window=16)
        for seed in range(3)
    ]
    _, together = decoded_twice(target, proposer_for(target, f"tokenswift:keep={KEEP},{options}"), params)
    assert together[0].metrics.reused_tokens > KEEP
    assert all(one.metrics.drafted for one in together), "the short prompt's once its answer is long enough"


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_tokens_are_those_with_the_largest_products(family: str) -> None:
    """Guards against another position's query, weights instead of products, other heads' keys, and ranks of other rows:
    products are, but for a constant, logarithms of the attention weights of transformers' eager implementation."""
    config, ids = tiny_config(family), PROMPTS[0]
    target = tiny_target(config)
    slot, _ = open_with(target, ids)
    selected = Tokens(target, KEEP).select(slot, ids)
    assert selected is not None
    with torch.inference_mode():
        attentions = stock_model(config)(torch.tensor([ids]), output_attentions=True).attentions
    assert selected.rows.shape == selected.ranks.shape == (len(attentions), config.num_key_value_heads, KEEP)
    for layer, weights in enumerate(attentions):
        products = weights[0, :, -1].double().log().unflatten(0, (config.num_key_value_heads, -1)).sum(dim=1)
        for head, own in enumerate(products):
            own[:TOKEN_SINKS] = torch.inf
            rows, ranks = selected.rows[layer, head], selected.ranks[layer, head]
            assert rows.tolist() == sorted(set(rows.tolist()))
            assert rows[:TOKEN_SINKS].tolist() == list(range(TOKEN_SINKS))
            best = rows[ranks.argsort()].long()
            assert sorted(ranks.tolist()) == list(range(KEEP))
            scores = own[best]
            assert bool((scores[TOKEN_SINKS + 1 :] <= scores[TOKEN_SINKS:-1] + 1e-3).all()), "best first"
            others = own[~torch.isin(torch.arange(len(ids)), best)]
            assert float(scores[-1]) >= float(others.max()) - 1e-3, (layer, head)


def test_new_tokens_take_the_places_of_the_worst() -> None:
    """Guards against a view that grows with the answer, gives up the first or the best rows, or names a row twice."""
    target = tiny_target(tiny_config("llama"))
    slot, _ = open_with(target, PROMPTS[0])
    selector, length = Tokens(target, KEEP), len(PROMPTS[0])
    selected = selector.select(slot, PROMPTS[0])
    assert selected is not None
    for new in range(KEEP - TOKEN_SINKS + 2):
        target.kv.lengths[slot] = length + new
        is_spent = new > KEEP - TOKEN_SINKS
        assert selector.is_spent(slot, selected) == is_spent
        if is_spent:
            break
        view = selector.view(slot, selected)
        assert view is not None
        assert view.shape == selected.rows.shape
        kept, own = view[..., : KEEP - new], view[..., KEEP - new :]
        assert torch.equal(own, torch.arange(length, length + new).expand_as(own))
        best = selected.rows.gather(-1, selected.ranks.argsort(-1))[..., : KEEP - new]
        assert torch.equal(kept, best.sort(-1).values)
    target.kv.lengths[slot] = length - 1
    assert selector.is_spent(slot, selected), "selected rows are gone"
    assert [selector.select(slot, PROMPTS[0][:KEEP]), selector.view(slot, None)] == [None, None]


class Counted(Tokens):
    """Remembers what was selected, and the widest view."""

    def select(self, slot: int, prompt: Sequence[int]) -> TokenSelection | None:
        CALLS.append(len(prompt))
        return super().select(slot, prompt)

    def view(self, slot: int, selected: TokenSelection | None) -> Tensor | None:
        view = super().view(slot, selected)
        if view is not None:
            WIDTHS.add(view.shape[-1])
        return view


CALLS: list[int] = []
WIDTHS: set[int] = set()


@pytest.mark.parametrize("length", [90, KEEP - 2])
def test_tokens_are_selected_anew_when_new_ones_have_taken_the_budget(length: int) -> None:
    """Guards against a selection that ends with the prompt or is made in every round, from the prompt alone or from
    rows that are not yet written, and a view wider than the budget."""
    target = tiny_target(tiny_config("llama"))
    source = TokenSwift(target, heads(), Counted(target, KEEP))
    CALLS.clear()
    WIDTHS.clear()
    prompt = random_ids(length, 2)
    (session,) = decode(Engine(target), [prompt], [SamplingParams(max_new_tokens=60)], [proposer_of("chain", source)])
    assert CALLS[0] == length
    gaps = [after - before for before, after in pairwise(CALLS)]
    most = KEEP - TOKEN_SINKS
    assert len(gaps) > 3
    first = 0 if length > KEEP else 1  # until there are more tokens than the budget
    assert all(most < gap <= most + 4 for gap in gaps[first:]), "within the tokens of a round"
    assert {KEEP} == WIDTHS
    assert session.metrics.drafted > 0


class All(Tokens):
    """Every committed row."""

    def is_spent(self, slot: int, selected: TokenSelection | None) -> bool:
        return False

    def view(self, slot: int, selected: TokenSelection | None) -> Tensor:
        return torch.arange(self.model.kv.lengths[slot], dtype=torch.int32)[None, None]


@pytest.mark.parametrize("kind", [CHAINED, {"head": "target"}, {"head": "own"}], ids=["chained", "target", "own"])
@torch.inference_mode()
def test_guesses_are_those_of_the_whole_model(kind: dict[str, Any]) -> None:
    """Guards against heads that read another state or row, and depths that are shifted: with all rows in view, against
    stock transformers and the heads in plain torch."""
    config, ids = tiny_config("llama"), [*PROMPTS[0], 5]
    target, net, stock = tiny_target(config), heads(**kind), stock_model(config)
    open_with(target, PROMPTS[0])
    source = TokenSwift(target, net, All(target, KEEP))
    state = source.open(0)
    assert source.begin([state], [draft_request(ids, 9, 9)]) == [4]
    source._start([state], torch.tensor(ids[-1:]))
    states: list[Tensor] = []
    layers_of(stock.base_model)[1][-1].register_forward_hook(lambda *args: states.append(args[2]))
    logits = stock(torch.tensor([ids])).logits[0, -1]
    row = states[0].view(len(ids), -1)[-1]
    expected = [logits]
    last_norm: Any = stock.base_model.norm
    weights = net.state_dict()
    for head in range(3):
        if kind == CHAINED:
            norm, out_norm = (weights[f"heads.{head}.{name}.weight"] for name in ("norm", "out_norm"))
            row = row + weights[f"heads.{head}.linear.weight"] @ nn.functional.rms_norm(row, (48,), norm, 1e-5)
            read = nn.functional.rms_norm(row, (48,), out_norm, 1e-5)
        else:
            normed = last_norm(row)
            inner = weights[f"heads.{head}.blocks.0.weight"] @ normed + weights[f"heads.{head}.blocks.0.bias"]
            read = normed + nn.functional.silu(inner)
        own = weights.get(f"heads.{head}.lm_head.weight", stock.lm_head.weight)
        expected.append(own @ read)
    torch.testing.assert_close(state.base, torch.stack(expected), atol=1e-3, rtol=1e-3)


def test_the_tree_is_the_papers() -> None:
    """Guards against another branching than [1, 3, 3, 3], and a share of the budget that leaves less room for it."""
    target = tiny_target(tiny_config("llama"))
    open_with(target, PROMPTS[0])
    proposer = proposer_for(target, f"tokenswift:as=paper,keep={KEEP}")
    request = draft_request([*PROMPTS[0], 5], 100, 9)
    (tree,) = proposer.propose(
        [proposer.open(0)], [replace(request, sampling=replace(request.sampling, prompt_length=90))]
    )
    drafted = [depth for depth, origin in zip(tree.topology.depths, tree.origins, strict=True) if origin == "drafted"]
    assert [drafted.count(depth) for depth in range(1, 6)] == [1, 3, 9, 27, 0]


def test_what_cannot_be_is_refused() -> None:
    """Guards against a method without heads that fails in its first round, or drafts from a budget of no tokens."""
    target = tiny_target(tiny_config("llama"))
    bare = BuildContext(VOCAB, target.device, no_draft_model, target)
    with pytest.raises(InvalidRequest, match="'tokenswift' needs a trained drafter: name its checkpoint with drafter="):
        build_proposer(parse_method("tokenswift"), bare)
    with pytest.raises(InvalidRequest, match="'tokenswift' needs a drafter of kind medusa"):
        build_proposer(parse_method("tokenswift"), replace(bare, net=lambda: nn.Linear(2, 2)))
    with pytest.raises(InvalidRequest, match="window=512: does nothing with TokenSwift"):
        proposer_for(target, "tokenswift:window=512")
    with pytest.raises(InvalidRequest, match="keep=16"):
        parse_method("tokenswift:keep=16")
