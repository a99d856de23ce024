"""DART as a source: one pass over mask rows guesses all depths at once (arXiv 2601.19278)."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from outpace.cache.slots import Rows
from outpace.core.timing import LM_HEAD, NET
from outpace.drafters.build_context import TargetParts
from outpace.drafters.dart.net import DartNet
from outpace.drafters.dart.ngrams import CANDIDATES, Continuity
from outpace.drafters.levels import DepthwiseSource, DraftLevel
from outpace.drafters.pairs import PairSource, PairState
from outpace.drafters.ranked_vocabulary import head_of
from outpace.sampling.scores import Pool


@dataclass(eq=False)
class DartState(PairState):
    """One request in a DART drafter; with an n-gram table `base` holds the best `CANDIDATES` of each depth.

    Attributes:
        pool: [D, C] ids of the columns of `base`.
        totals: [D] logsumexp of all logits of each depth.
        context: [N, 2] the last two tokens of the path to each node, on the device: drafts are not read back.
        mass: [N] log of the sum of the probabilities of each node's children.
    """

    pool: Tensor = field(default_factory=lambda: torch.empty(0))
    totals: Tensor = field(default_factory=lambda: torch.empty(0))
    context: Tensor = field(default_factory=lambda: torch.empty(0))
    mass: Tensor = field(default_factory=lambda: torch.empty(0))


class DartSource(DepthwiseSource, PairSource[DartState]):
    """A DART net on slots of its own.

    A round writes the pairs that are new, as EAGLE-3 does, and behind them `draft_length` mask rows, which are
    forgotten when the pass ends. The last pair guesses depth 1, mask row j (from 1) depth j + 1.

    Args:
        target: whose embedding it reads.
        noise: draft with the request's keyed noise at temperature > 0.
        vocabulary: [K] the only ids to draft; None for all that the net has.
        continuity: what moves guesses by the path before them; None to leave a depth the same below every node.
    """

    def __init__(
        self,
        net: DartNet,
        target: TargetParts,
        noise: bool = True,
        vocabulary: Tensor | None = None,
        continuity: Continuity | None = None,
    ) -> None:
        masks = net.config.draft_length
        super().__init__(net, target, masks, depth=masks + 1)
        self.net, self._embed, self._noise, self._masks = net, target.embedding, noise, masks
        self._continuity, self.shares = continuity, continuity is None
        self._head = head_of(net.lm_head.weight, self._target_ids, vocabulary, net.config.vocab_size)

    def _new_state(self, slot: int) -> DartState:
        return DartState(slot, features=self._no_features())

    def _start(self, states: Sequence[DartState], pending: Tensor) -> None:
        for state, logits in zip(states, self._guess(states), strict=True):
            state.base = logits
            if self._continuity is not None:
                state.totals = logits.logsumexp(dim=-1)
                state.base, state.pool = logits.topk(min(CANDIDATES, logits.shape[1]), dim=-1)
                ids = state.asked.ids
                state.context = torch.tensor([[ids[-2] if len(ids) > 1 else -1, ids[-1]]], device=logits.device)

    def _guess(self, states: Sequence[DartState]) -> Tensor:
        """[R, D, V] float32 logits in the target's ids; ids that the drafter does not have are -inf."""
        hidden = self._run(states, self._unwritten(states), self._masks)
        with LM_HEAD:
            logits: Tensor = self._head.scores(hidden)  # [R * D, V]
        return logits.unflatten(0, (len(states), -1))  # type: ignore[no-any-return]

    def _logits(self, level: DraftLevel) -> Tensor:
        if self._continuity is None:
            return super()._logits(level)
        depth, decay = level.depth, self._continuity.search_decay
        weight, parts = self._continuity.weight / (decay or 1.0) ** depth, list[Tensor]()
        tokens = level.tokens.split(level.sizes)
        for state, above, own in zip(level.states, level.above, tokens, strict=True):
            if depth:
                state.context = torch.stack([state.context[above, 1], own.to(state.context.device)], dim=1)
            ids = state.pool[depth].expand(len(above), -1)
            parts.append(state.base[depth] + weight * self._continuity.ngrams.log_probs(state.context, ids))
            # Rounding must not lift it above 0: a child would score more than its parent.
            state.mass = (parts[-1].logsumexp(dim=-1) - state.totals[depth]).clamp(max=0)
        return torch.cat(parts)

    def _pool_of(self, level: DraftLevel) -> Pool | None:
        if self._continuity is None:
            return None
        rows = level.repeated([state.pool[level.depth] for state in level.states])
        return Pool(rows, self._continuity.ngrams.vocab_size)

    def _log_mass(self, level: DraftLevel) -> Tensor | None:
        is_added = self._continuity is not None and self._continuity.search_decay is not None
        return torch.cat([state.mass for state in level.states]) if is_added else None

    def _write(self, states: Sequence[DartState], ids: Sequence[Sequence[int]]) -> Tensor:
        return self._run(states, ids, masks=0)

    @NET
    @torch.inference_mode()
    def _run(self, states: Sequence[DartState], ids: Sequence[Sequence[int]], masks: int) -> Tensor:
        """Write and commit the pairs that are due, with mask rows behind them. `masks`: rows per request, 0 to draft
        nothing. Returns [R * (1 + masks), H], for the head: the last pair and the mask rows of each request."""
        pairs, tokens, features = self._due(states, ids)
        behind = [_masks_behind(part, masks) for part in pairs] if masks else []
        positions = self.slots.positions(pairs).to(self._device)
        beyond = self.slots.positions(behind).to(self._device) if behind else positions[:0]
        # Rows are packed as all pairs, then all masks: a request's masks see its pairs, written in the same pass.
        last = torch.tensor([part.count for part in pairs]).cumsum(0) - 1  # [R]
        rows = len(tokens) + torch.arange(len(pairs) * masks).unflatten(0, (len(pairs), masks))  # [R, masks]
        hidden: Tensor = self.net(
            self._embed(tokens.to(self._device)),
            self.net.fuse(features),
            positions,
            beyond,
            torch.cat([last[:, None], rows], dim=1).flatten().to(self._device),
            self.slots.attention([*pairs, *behind]),
        )
        self._commit(states, pairs)
        return hidden


def _masks_behind(pairs: Rows, masks: int) -> Rows:
    """Mask rows that see the pairs of their request in this pass and the mask rows before them."""
    count = pairs.count
    visible = torch.ones(masks, count + masks, dtype=torch.bool).tril(diagonal=count)
    return Rows(pairs.slot, torch.arange(count + masks), visible, scratch=count)
