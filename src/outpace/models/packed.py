"""A decoder on slots: rows of many requests in one packed pass, each request behind its own keys and values."""

import copy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from outpace.cache.passes import PassCache
from outpace.cache.slots import Segment, SlotKV
from outpace.cache.tiles import Tables, TilePlan
from outpace.core.tree import MAX_TREE_NODES, Topology
from outpace.gpu.capture import captures_on
from outpace.gpu.captured_pass import CapturedPass
from outpace.kernels.attention import has_kernels
from outpace.kernels.exact import NotCompiled, check_kernels, check_same, path_taken
from outpace.kernels.linear import KernelLinear
from outpace.lib.errors import InvalidRequest
from outpace.lib.stages import stage
from outpace.models.head import EXACT_ROWS, LmHead, padded
from outpace.models.layers.experts import has_experts
from outpace.models.native import NativeDecoder

_COMPARED = 12  # rows of the pass that tells whether the kernels compute what a decoder's modules do


@dataclass(frozen=True, eq=False)
class Part:
    """One request's share of a pass: N fresh rows, which may see S scratch rows that earlier passes left behind.

    Attributes:
        slot: where its keys and values lie.
        tokens: [N] int64.
        offsets: [S + N] logical positions of the scratch and the fresh rows, counted from the committed length.
        visible: [N, S + N] bool, which of those each fresh row sees; None if all.
        scratch: S.
        is_prompt: a prefill chunk, whose numbers every method shares.
    """

    slot: int
    tokens: Tensor
    offsets: Tensor
    visible: Tensor | None = None
    scratch: int = 0
    is_prompt: bool = False


def layers_of(decoder: nn.Module) -> tuple[str, nn.ModuleList]:
    """A decoder's stack of layers and its name there."""
    return next((name, child) for name, child in decoder.named_children() if isinstance(child, nn.ModuleList))


def first_layers(decoder: nn.Module, config: PretrainedConfig, count: int) -> tuple[nn.Module, PretrainedConfig]:
    """A decoder of another's first layers and its final norm, and its config; every weight is shared."""
    config = copy.copy(config)
    config.num_hidden_layers = count
    decoder = copy.copy(decoder)
    decoder._modules = dict(decoder._modules)  # a shallow copy would share the table of children
    name, stack = layers_of(decoder)
    decoder._modules[name] = nn.ModuleList(list(stack)[:count])
    decoder.config = config  # type: ignore[assignment]  # families loop over its num_hidden_layers
    return decoder, config


@contextmanager
def tapped(decoder: nn.Module, taps: Iterable[int]) -> Iterator[dict[int, Tensor]]:
    """Collect hidden states [T, H] while a decoder runs a pass of one row of tokens.

    Args:
        decoder: a transformers decoder.
        taps: 0 for what goes into the first layer, i for what comes out of layer i - 1; the number of layers stands
            for what the LM head reads, the last layer's output after the final norm.

    Raises:
        InvalidRequest: a tap that the decoder does not have.
    """
    _, layers = layers_of(decoder)
    features: dict[int, Tensor] = {}
    with ExitStack() as hooks:
        for tap in sorted(set(taps)):
            check_tap(tap, len(layers))

            def before(module: nn.Module, args: Any, kwargs: Any, tap: int = tap) -> None:
                features[tap] = (args[0] if args else kwargs["hidden_states"])[0]

            def after(module: nn.Module, args: Any, output: Any, tap: int = tap) -> None:
                features[tap] = output.last_hidden_state[0]

            if tap < len(layers):
                hooks.callback(layers[tap].register_forward_pre_hook(before, with_kwargs=True).remove)
            else:
                hooks.callback(decoder.register_forward_hook(after).remove)
        yield features


def check_tap(tap: int, layers: int) -> None:
    """Refuse a hidden state that there is not.

    Raises:
        InvalidRequest: not from 0 to the number of layers.
    """
    if not 0 <= tap <= layers:
        raise InvalidRequest(
            f"tap {tap}: the target has hidden states 0 to {layers}, the last one what its LM head reads"
        )


class PackedModel:
    """Runs parts of many requests in one packed pass [1, T].

    Args:
        decoder: a transformers decoder whose attention implementation is `models.attention.ATTENTION_NAME`.
        head: its LM head.
        config: the decoder's text configuration.
        max_length: tokens of one request.
        max_slots: requests at a time.
        key_dtype, value_dtype: in which keys and values are kept.
        tiled: one call per layer attends for all requests; by default on everything but a CPU.
        exact: tiled passes of fixed shapes, whose sums do not depend on what stands beside a row.

    Attributes:
        captures: tiled passes run over static buffers, on CUDA as graphs.
    """

    def __init__(
        self,
        decoder: nn.Module,
        head: LmHead,
        config: PretrainedConfig,
        max_length: int,
        max_slots: int,
        key_dtype: torch.dtype,
        value_dtype: torch.dtype,
        tiled: bool | None = None,
        exact: bool = False,
    ) -> None:
        self.max_length, self.max_slots, self.config = max_length, max_slots, config
        self.decoder, self.head = decoder, head
        weight = next(decoder.parameters())
        self.device, self.dtype = weight.device, weight.dtype
        self.tiled, self.exact = self.device.type != "cpu" if tiled is None else tiled, exact
        assert self.tiled or not exact, "a CPU has no exact mode: its passes are exact, or cannot be made so"
        head.fixed_rows = EXACT_ROWS if exact else head.fixed_rows
        self.vocab_size = head.vocab_size
        heads = config.num_attention_heads
        self.kv = SlotKV(
            layers=config.num_hidden_layers,
            slots=max_slots,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            capacity=max_length + MAX_TREE_NODES,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            key_dtype=key_dtype,
            value_dtype=value_dtype,
            device=self.device,
        )
        # How many rows an expert gets is read on the host.
        self.captures = self.tiled and captures_on(self.device) and not has_experts(decoder)
        self._captured: dict[tuple[int, ...], CapturedPass] = {}  # by taps
        self.native, self.computed_by = self._derive()

    @property
    def embedding(self) -> nn.Embedding:
        """The decoder's input embedding."""
        return cast(nn.Embedding, self.decoder.get_input_embeddings())  # type: ignore[operator]

    def rewind_slot(self, slot: int, length: int) -> None:
        """Forget what a slot holds from `length` on."""
        self.kv.truncate(slot, length)

    @torch.inference_mode()
    def copy_slot(self, source: int, goal: int, length: int) -> None:
        """Let a slot hold the first `length` committed rows of another, or of itself; fewer where there are fewer."""
        self.kv.copy(source, goal, length)

    def commit(self, slots: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        self.kv.commit(slots, paths)

    @torch.inference_mode()
    def run(self, parts: Sequence[Part], captured: bool = True) -> Tensor:
        """[T, H] final hidden states of the parts' fresh rows, packed; their keys and values become scratch rows.

        Args:
            parts: requests' shares.
            captured: as a graph, where passes are; prompts, whose lengths hardly recur, are better off without.
        """
        return self.run_tapped(parts, (), captured)[0]

    @torch.inference_mode()
    def run_tapped(
        self, parts: Sequence[Part], taps: Iterable[int], captured: bool = True
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """As `run`, with the hidden states [T, H] at `taps`, numbered as transformers' `hidden_states`."""
        if not self.exact:
            return self._run_once(parts, taps, captured)
        taps, pieces = tuple(taps), list(pieces_of(parts))
        counts = [sum(len(part.tokens) for part in piece) for piece in pieces]
        return joined([self._run_once(piece, taps, captured) for piece in pieces], counts)

    def _run_once(self, parts: Sequence[Part], taps: Iterable[int], captured: bool) -> tuple[Tensor, dict[int, Tensor]]:
        """One pass; in exact mode rows of padding may come back too."""
        segments, positions = self._segments(parts)
        ids = torch.cat([part.tokens.to(self.device) for part in parts])
        if self.tiled:
            return self._run_tiled(Tables.of(segments, self.exact), ids, taps, captured)
        positions = self._within_reach(positions).to(self.device)
        if self.native is not None:
            return self.native.run(ids, positions, segments, self.kv, self._known_taps(taps))
        return self._run_modules(ids, positions, PassCache(segments), taps)

    def _run_tiled(
        self, tables: Tables, ids: Tensor, taps: Iterable[int], captured: bool
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """A pass whose requests are attended in one call per layer; over static buffers, if one holds it."""
        wanted = tuple(sorted(self._known_taps(taps)))
        if captured and self.captures:
            if wanted not in self._captured:
                rows = EXACT_ROWS if self.exact else None
                self._captured[wanted] = CapturedPass(self.kv, partial(self._run_plan, taps=wanted), rows)
            found = self._captured[wanted]([tables], [ids])
            if found is not None:
                return found[0], dict(zip(wanted, found[1:], strict=True))
        hidden, *features = self._run_plan([tables.on(self.device)], ids, wanted)
        return hidden, dict(zip(wanted, features, strict=True))

    def _run_plan(self, plans: Sequence[TilePlan], ids: Tensor, taps: Sequence[int]) -> tuple[Tensor, ...]:
        """Hidden states and those at taps, [T, H] each, of a pass that has one plan."""
        (plan,) = plans
        positions = self._within_reach(plan.rows[:, 2].long())
        if self.exact:
            ids, positions = padded(ids), padded(positions)
        hidden, features = self._run_modules(ids, positions, PassCache((), plan, self.kv), taps)
        return hidden, *(features[tap] for tap in taps)

    def _within_reach(self, positions: Tensor) -> Tensor:
        """A tree may reach beyond the last token a request can have, where a table of learned positions ends. Nothing
        there is ever emitted or seen by a node that is."""
        return positions.clamp(max=self.max_length - 1)

    def _segments(self, parts: Sequence[Part]) -> tuple[list[Segment], Tensor]:
        """The parts' segments, and the positions [T] of their rows."""
        segments, positions, start = [], [], 0
        for part in parts:
            # The position of a row is the committed length plus its depth, never its index in the tree.
            where = part.offsets + self.kv.lengths[part.slot]
            sight = where, part.visible
            segments.append(Segment(self.kv, part.slot, start, *sight, scratch=part.scratch, is_prompt=part.is_prompt))
            positions.append(where[part.scratch :])
            start += len(part.tokens)
        return segments, torch.cat(positions)

    def _run_modules(
        self, ids: Tensor, positions: Tensor, cache: PassCache, taps: Iterable[int]
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """A pass by the decoder's own modules."""
        with tapped(self.decoder, taps) as features:
            output = self.decoder(
                input_ids=ids[None], position_ids=positions[None], past_key_values=cache, use_cache=True, slots=cache
            )
        return output.last_hidden_state[0], features

    def _known_taps(self, taps: Iterable[int]) -> set[int]:
        count = len(layers_of(self.decoder)[1])
        for tap in taps:
            check_tap(tap, count)
        return set(taps)

    @stage("measuring")
    @torch.inference_mode()
    def _derive(self) -> tuple[NativeDecoder | None, str]:
        """The decoder in one call, if the kernels compute what its modules do, which a short pass of both shows; and
        which code computes passes."""
        try:
            check_kernels(self.device)
            if self.tiled or not has_kernels(self.kv):
                raise NotCompiled("no kernel computes passes in " + ("tiles" if self.tiled else str(self.dtype)))
            if not any(isinstance(module, KernelLinear) for module in self.decoder.modules()):
                raise NotCompiled("its weights are not packed for the kernels")
            return self._compared(), path_taken(None)
        except NotCompiled as reason:
            return None, path_taken(str(reason))
        except AttributeError as error:
            return None, path_taken(f"its layers have a layout of their own: {error}")

    def _compared(self) -> NativeDecoder:
        count = min(_COMPARED, self.max_length)
        ids = torch.arange(count) * 7 % self.config.vocab_size
        chain = Topology.chain(count)
        segments, positions = self._segments([Part(0, ids, chain.depth_tensor, chain.ancestor_mask)])
        taps = range(len(layers_of(self.decoder)[1]) + 1)
        cache = PassCache(segments)
        _, expected = self._run_modules(ids, positions, cache, taps)
        settings = [cache.asked[layer] for layer in sorted(cache.asked)]
        native = NativeDecoder(self.decoder, self.config, settings, self.max_length)
        _, found = native.run(ids, positions, segments, self.kv, taps)
        is_coarse = self.dtype == torch.bfloat16 or native.layers.is_quantized
        for tap in taps:
            check_same(f"the layers of {type(self.decoder).__name__}", found[tap], expected[tap], is_coarse)
        return native


def pieces_of(parts: Sequence[Part], rows: int = EXACT_ROWS) -> Iterator[list[Part]]:
    """Parts of passes of at most `rows` rows, in their order."""
    piece: list[Part] = []
    room = rows
    for part in parts:
        start, count = 0, len(part.tokens)
        while start < count:
            end = min(count, start + room)
            piece.append(_cut(part, start, end))
            room -= end - start
            start = end
            if room == 0:
                yield piece
                piece, room = [], rows
    if piece:
        yield piece


def joined(
    found: Sequence[tuple[Tensor, dict[int, Tensor]]], counts: Sequence[int]
) -> tuple[Tensor, dict[int, Tensor]]:
    """Hidden states and taps of several passes as if of one, without what was padded."""
    hidden = torch.cat([rows[:count] for (rows, _), count in zip(found, counts, strict=True)])
    taps = {
        tap: torch.cat([features[tap][:count] for (_, features), count in zip(found, counts, strict=True)])
        for tap in found[0][1]
    }
    return hidden, taps


def _cut(part: Part, start: int, end: int) -> Part:
    """Rows of a part from one to another, which see nothing behind themselves."""
    if (start, end) == (0, len(part.tokens)):
        return part
    assert part.visible is not None, "rows that all see each other cannot be computed one after the other"
    seen = part.scratch + end
    assert not part.visible[start:end, seen:].any(), "no row sees a later one"
    return replace(
        part,
        tokens=part.tokens[start:end],
        offsets=part.offsets[:seen],
        visible=part.visible[start:end, :seen],
        scratch=part.scratch + start,
    )
