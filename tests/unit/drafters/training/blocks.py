"""What tests of DFlash's and Domino's training share: more text than others need, a slow second opinion.

The second opinion goes block by block and row by row through `block_reference`, in float64.
"""

import math
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor

from outpace.drafters.dflash.objective import DFlashObjective
from outpace.drafters.domino.objective import DominoObjective
from outpace.drafters.domino.source import block_source
from outpace.drafters.training.batch import Anchors, Batch, TrainingSample, collate, sample_seed
from tests.unit.drafters.net.block_reference import correction, dflash_block, gru
from tests.unit.drafters.training import pairs, tiny

BlockObjective = DFlashObjective | DominoObjective

COUNT = 198
NET: dict[str, Any] = {"layers": 1, "block_size": 5, "mask_token_id": tiny.MASK}


@cache
def _features(taps: tuple[int, ...]) -> list[Tensor]:
    """Of each sample; the same in every epoch."""
    return [features_of(sample, taps) for sample in tiny.samples(COUNT)]


def features_of(sample: TrainingSample, taps: tuple[int, ...]) -> Tensor:
    return tiny.frozen().features(sample.ids[None], (len(sample.ids),), taps)[0]


def batches(taps: tuple[int, ...], size: int, epoch: int) -> Iterator[Batch]:
    """Of the samples to train on, shuffled."""
    samples, features = tiny.samples(COUNT)[tiny.HELD_OUT :], _features(taps)[tiny.HELD_OUT :]
    order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(epoch)).tolist()
    for start in range(0, len(order), size):
        group = order[start : start + size]
        seeds = [sample_seed(0, epoch, samples[at].name) for at in group]
        yield collate([samples[at] for at in group], seeds, [features[at] for at in group])


def learn(objective: BlockObjective, epochs: int) -> None:
    tiny.train(objective, epochs, 1e-2, 16, batches, falls=True)


def held_out(objective: BlockObjective) -> Batch:
    return tiny.held_out(objective.taps)


def held_out_losses(objective: BlockObjective) -> dict[str, float]:
    terms = objective(held_out(objective), 1.0)
    return {name: float(value.detach() / terms["weight"]) for name, value in terms.items()}


def assert_engine_agrees(objective: BlockObjective, make: Callable[..., Any] = block_source) -> None:
    """What is simulated on held-out sequences is what the engine counts when it decodes their prompts."""
    model, net = tiny.target(), objective.net.requires_grad_(False)
    source = make(net, model, model.head)
    assert source.depth == objective.depth
    pairs.assert_engine_agrees(pairs.played(objective), pairs.chain_of(source, objective.depth))
    net.requires_grad_(True)


def wild(objective: BlockObjective) -> BlockObjective:
    """In float64 with wide random weights: what is seen, read or left out wrongly then changes everything."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in objective.net.parameters():
            offset = 1.0 if weight.ndim == 1 else 0.0
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.3 + offset)
    objective.net.double()
    return objective


def short(taps: tuple[int, ...]) -> Batch:
    return pairs.some(taps, cuts=((0, 13), (1, 10)))


def reference(objective: BlockObjective, batch: Batch, anchors: Anchors, gamma: float) -> tuple[float, float, float]:
    """Base loss, final loss and weight of these anchors; for DFlash both losses are the same."""
    config, chosen = objective.net.config, objective.settings.model_dump()
    domino = config.model_dump() if isinstance(objective, DominoObjective) else None
    is_shifted = domino is not None and domino["shift_label"]
    sizes = config.model_dump() | {"layer_types": config.layer_types or ("full_attention",) * config.layers}
    weights = objective.whole({name: weight.detach() for name, weight in objective.net.named_parameters()})
    embedding, head = tiny.frozen().embedding.double(), tiny.frozen().head.double()
    compared = objective.vocabulary.draw(batch.step_seed)
    ids_of = list(range(tiny.VOCAB)) if compared.ids is None else compared.ids.tolist()
    shift = torch.zeros(len(ids_of)) if compared.shift is None else compared.shift
    ranked = ids_of if objective.vocabulary.ranked is None else objective.vocabulary.ranked.tolist()
    base = final = total = 0.0
    for row, anchor in zip(anchors.rows.tolist(), anchors.positions.tolist(), strict=True):
        ids, features = batch.ids[row, : batch.lengths[row]].tolist(), batch.features[row].double()
        block = embedding[[ids[anchor]] + [config.mask_token_id] * (config.block_size - 1)]
        outputs = dflash_block(weights, sizes, features[:anchor, : objective.net.fc.in_features], block)
        seen = [ids[anchor]]
        for depth in range(1, config.block_size + is_shifted):
            if anchor + depth >= len(ids):
                break
            hidden = outputs[depth - 1 if is_shifted else depth]
            scores = corrected = head @ hidden
            if domino is not None and depth > domino["pure_draft_prefix_len"]:
                state = gru(weights, [embedding[token] for token in seen], domino["gru_hidden_dim"])
                corrected = scores + correction(weights, hidden, state)
            share, right = math.exp(-(depth - 1) / gamma), ids[anchor + depth]
            is_own = domino is not None and chosen["strategy"] == "training-time-test"
            seen.append(max(ranked, key=lambda token, made=corrected: float(made[token])) if is_own else right)
            if right not in ranked:
                continue
            distribution = torch.eye(len(ids_of))[ids_of.index(right)].double()
            if chosen["labels"] == "target-softmax":
                told = head @ features[anchor + depth - 1, -tiny.frozen().hidden_size :]
                distribution = (told[ids_of] + shift).softmax(dim=0)
            losses = [-float(distribution @ (made[ids_of] + shift).log_softmax(dim=0)) for made in (scores, corrected)]
            base, final, total = base + share * losses[0], final + share * losses[1], total + share
    return base, final, total
