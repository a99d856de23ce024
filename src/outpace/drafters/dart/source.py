"""DART as a source: one pass over mask rows guesses all depths at once (arXiv 2601.19278)."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from outpace.core.protocols import DraftRequest
from outpace.core.timing import LM_HEAD, NET
from outpace.drafters.dart.net import DartNet
from outpace.drafters.dart.ngrams import Continuity, ContinuousDraft
from outpace.drafters.depthwise import Depthwise, DepthwiseSource
from outpace.drafters.net_slots import Rows
from outpace.drafters.pairs import PairSource, PairState
from outpace.drafters.ranked_vocabulary import head_of


class DartSource(DepthwiseSource, PairSource[PairState]):
    """A DART net on slots of its own.

    A round writes the pairs that are new, as EAGLE-3 does, and behind them `draft_length` mask rows, which are
    forgotten when the pass ends. The last pair guesses depth 1, mask row j (from 1) depth j + 1.

    Args:
        embed: the target's embedding, ids [T] -> [T, H].
        noise: draft with the request's keyed noise at temperature > 0.
        vocabulary: [K] the only ids to draft; None for all that the net has.
        continuity: what moves guesses by the path before them; None to leave a depth the same below every node.
    """

    def __init__(
        self,
        net: DartNet,
        embed: Callable[[Tensor], Tensor],
        taps: tuple[int, ...],
        max_length: int,
        max_slots: int,
        noise: bool = True,
        vocabulary: Tensor | None = None,
        continuity: Continuity | None = None,
    ) -> None:
        masks = net.config.draft_length
        super().__init__(net, taps, max_length, max_slots, masks, depth=masks + 1)
        self.net, self._embed, self._noise, self._masks = net, embed, noise, masks
        self._continuity = continuity
        self._head = head_of(net.lm_head.weight, self._target_ids, vocabulary, net.config.vocab_size)

    def _new_state(self, slot: int) -> PairState:
        return PairState(slot, features=self._no_features())

    def _guess(self, states: Sequence[PairState]) -> Tensor:
        logits: Tensor = self._logits(self._run(states, self._unwritten(states), self._masks))  # [R * D, V]
        return logits.unflatten(0, (len(states), -1))  # type: ignore[no-any-return]

    def _draft(self, request: DraftRequest, logits: Tensor) -> Depthwise:
        if self._continuity is None:
            return super()._draft(request, logits)
        return ContinuousDraft(request, logits, self._continuity)

    def _write(self, states: Sequence[PairState], ids: Sequence[Sequence[int]]) -> Tensor:
        return self._run(states, ids, masks=0)

    @LM_HEAD
    @torch.inference_mode()
    def _logits(self, hidden: Tensor) -> Tensor:
        """[N, V] float32 logits in the target's ids; ids that the drafter does not have are -inf."""
        return self._head.scores(hidden)

    @NET
    @torch.inference_mode()
    def _run(self, states: Sequence[PairState], ids: Sequence[Sequence[int]], masks: int) -> Tensor:
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
    return Rows(pairs.slot, masks, torch.arange(count + masks), visible, scratch=count)
