"""Captures hidden states and top-k ids of vLLM's passes, where the model is called.

vLLM passes no hidden states to `custom_class` proposers. So two methods of the model's instance are wrapped: `forward`,
whose hidden states are kept until the end of the round, and `compute_logits`, whose best ids are read before the
sampler changes the logits. Layers return their states through vLLM's own `set_aux_hidden_state_layers`, set before the
model is compiled. vLLM itself is not patched, and the model's outputs are unchanged.

An exception here only loses features: it is kept in `fault` for the proposer, and never raised.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import wraps
from itertools import pairwise
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from outpace.core.protocols import Needs
from outpace.lib.errors import UnsupportedModel


@dataclass(frozen=True, eq=False)
class TargetPass:
    """One pass of the target: T tokens of R requests (rows of vLLM's batch), one after another.

    Attributes:
        starts: [R + 1] index of each row's first token; the last one is T.
        positions: [R] of each row's first query token.
        tokens: [T] input ids.
        features: [T, taps * H] tapped hidden states, concatenated; None without taps.
        top_ids: [L, k] best ids after the tokens whose logits vLLM computed: for each row its last token, and as many
            before it as it had drafts; None without top-k.
        began: its start in seconds, by a clock of this process.
    """

    starts: Sequence[int]
    positions: Sequence[int]
    tokens: Sequence[int]
    features: Tensor | None
    top_ids: Tensor | None
    began: float = 0.0


class Capture:
    """Wraps a vLLM model.

    Args:
        needs: the proposer's needs.
        layers: the model's number of layers.

    Attributes:
        fault: the exception of a failed capture; None without one.
    """

    def __init__(self, needs: Needs, layers: int) -> None:
        self._needs, self._layers = needs, layers
        # vLLM numbers states as taps are numbered. The exception is the last layer's, where vLLM has the state before
        # the final norm.
        self._aux = tuple(sorted({min(tap, layers) for tap in needs.taps if tap != layers}))
        self.fault: Exception | None = None
        self._last: TargetPass | None = None

    def install(self, target: Any) -> None:
        """Wrap a model."""
        if not getattr(target, "do_not_compile", True):  # ERNIE 4.5; other models compile what their forward calls
            raise UnsupportedModel(
                f"vLLM compiles {type(target).__name__} as a whole, which hides its passes: run with --enforce-eager"
            )
        if self._aux:
            if not hasattr(target, "set_aux_hidden_state_layers"):
                raise UnsupportedModel(
                    f"{type(target).__name__} in vLLM cannot hand out hidden states (no SupportsEagle3), which this "
                    "method's drafter reads; choose one without a drafter, such as outpace:draft=none"
                )
            target.set_aux_hidden_state_layers(self._aux)
        forward, compute = target.forward, target.compute_logits
        # vLLM gives models that read images embeddings, and the ids only if they ask. These ids are not passed on.
        reads_ids = getattr(target, "requires_raw_input_tokens", True)
        target.requires_raw_input_tokens = True

        @wraps(forward)
        def forward_seen(input_ids: Any = None, positions: Any = None, *args: Any, **kwargs: Any) -> Any:
            began = perf_counter()
            is_embedded = not reads_ids and kwargs.get("inputs_embeds") is not None
            output = forward(None if is_embedded else input_ids, positions, *args, **kwargs)
            hidden, aux = output if isinstance(output, tuple) else (output, [])
            self._note(input_ids, positions, hidden, aux, began)
            return hidden

        @wraps(compute)
        def compute_seen(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
            logits = compute(hidden, *args, **kwargs)
            self._note_best(logits)
            return logits

        target.forward, target.compute_logits = forward_seen, compute_seen

    def take(self) -> TargetPass | None:
        """The last pass, only once; None if no pass was captured since the last call."""
        last, self._last = self._last, None
        return None if self.fault is not None else last

    def _note(self, input_ids: Any, positions: Any, hidden: Any, aux: Sequence[Tensor], began: float) -> None:
        """Keep a pass, unless it is one of vLLM's dummy runs, which have no requests."""
        self._last = None
        if self.fault is not None:
            return
        try:
            rows = _rows_of_pass(positions)
            if rows is None or input_ids is None:
                return
            starts, firsts = rows
            count = starts[-1]
            self._last = TargetPass(
                starts,
                positions=firsts,
                tokens=input_ids[:count].tolist(),
                features=self._features(hidden[:count], aux, count),
                top_ids=None,
                began=began,
            )
        except Exception as error:
            self.fault = error

    def _features(self, hidden: Tensor, aux: Sequence[Tensor], count: int) -> Tensor | None:
        if not self._needs.taps:
            return None
        if len(aux) != len(self._aux):
            raise RuntimeError(f"the model handed out {len(aux)} hidden states, not the {len(self._aux)} asked for")
        known, layers = dict(zip(self._aux, aux, strict=True)), self._layers
        states = [hidden if tap == layers else known[min(tap, layers)][:count] for tap in self._needs.taps]
        return torch.cat(states, dim=-1)  # a copy, even of one state: vLLM reuses its buffers

    def _note_best(self, logits: Tensor | None) -> None:
        """Keep the best ids of the pass's own logits: later calls of a step are for log-probabilities of prompts."""
        if not self._needs.top_k or self._last is None or self._last.top_ids is not None or logits is None:
            return
        try:
            best = logits.topk(self._needs.top_k, dim=-1).indices.cpu()
            self._last = replace(self._last, top_ids=best)
        except Exception as error:
            self.fault = error


def _rows_of_pass(positions: Tensor) -> tuple[list[int], list[int]] | None:
    """For the running pass, [R + 1] the index of each row's first token, then T; and [R] that token's position. None
    for passes without requests.

    Layers of chunked local attention count a row that crosses chunks several times: a layer with the fewest rows tells.
    Lengths of rows, from which the positions follow too, serve only models that number the tokens of images otherwise:
    MLA's backends state none, and those of chunked local attention the length of a row's last chunk.

    Args:
        positions: [T] of the pass, or [3, T] for such models.

    Raises:
        UnsupportedModel: the attention backend does not state the rows.
    """
    from vllm.forward_context import get_forward_context

    metadata = get_forward_context().attn_metadata
    if not isinstance(metadata, dict) or not metadata:
        return None  # no requests, or micro-batches
    needed = ("query_start_loc",) if positions.ndim == 1 else ("query_start_loc", "seq_lens")
    stated = [layer for layer in metadata.values() if all(getattr(layer, name, None) is not None for name in needed)]
    if stated:
        rows = min(stated, key=lambda layer: len(layer.query_start_loc))
        places = rows.query_start_loc.tolist()
        if positions.ndim == 1:
            return places, positions[places[:-1]].tolist()
        sizes = [end - start for start, end in pairwise(places)]
        return places, [length - size for length, size in zip(rows.seq_lens.tolist(), sizes, strict=True)]
    found = ", ".join(sorted({type(layer).__name__ for layer in metadata.values()}))
    raise UnsupportedModel(
        f"vLLM's attention backend does not state the rows of a pass ({found}): choose another, such as "
        "--attention-backend FLASH_ATTN"
    )
