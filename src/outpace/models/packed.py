"""Run a decoder over packed rows of many requests, each attending to the keys and values of its own slot."""

import copy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast
from weakref import proxy, ref

import torch
from torch import Tensor, nn

from outpace.cache.memory import is_lazy
from outpace.cache.passes import PassCache, Tables, TilePlan, Watch
from outpace.cache.slots import Rows, Segment, SlotKV, row_bytes, segments_of
from outpace.core.tree import MAX_TREE_NODES, Topology
from outpace.gpu.capture import CapturedPass, captures_on
from outpace.kernels.attention import has_kernels
from outpace.kernels.blocks import BlockEmbedding
from outpace.kernels.dispatch import COMPILED, NotCompiled, check_kernels, check_same, in_python
from outpace.kernels.linear import KernelLinear
from outpace.lib.errors import InvalidRequest
from outpace.lib.stages import stage
from outpace.models.compiled_decoder import CompiledDecoder
from outpace.models.head import EXACT_ROWS, LmHead, padded
from outpace.models.layers.experts import has_experts

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_COMPARED = 12  # rows of the pass that compares compiled kernels with the decoder's modules
_AVERAGED = 64  # rows of the pass whose keys are averaged
_AVERAGED_POSITIONS = 4096  # range of their positions: keys rotate with positions


@dataclass(frozen=True, eq=False, kw_only=True)
class PassPart(Rows):
    """One request's part of a pass. `tokens`: [N] int64, of the fresh rows."""

    tokens: Tensor

    @classmethod
    def of(cls, slot: int, tokens: Tensor, shape: Topology | None = None) -> "PassPart":
        """Tokens as a tree after the committed rows; None for a chain."""
        shape = Topology.chain(len(tokens)) if shape is None else shape
        return cls(slot, shape.depth_tensor, shape.ancestor_mask, tokens=tokens)


def layers_of(decoder: nn.Module) -> tuple[str, nn.ModuleList]:
    """A decoder's stack of layers, and its attribute name."""
    return next((name, child) for name, child in decoder.named_children() if isinstance(child, nn.ModuleList))


def first_layers(decoder: nn.Module, config: "PretrainedConfig", count: int) -> "tuple[nn.Module, PretrainedConfig]":
    """A decoder made of another's first layers and final norm, and its config; all weights are shared."""
    config = copy.copy(config)
    config.num_hidden_layers = count
    decoder = copy.copy(decoder)
    decoder._modules = dict(decoder._modules)  # a shallow copy would share the table of children
    name, stack = layers_of(decoder)
    decoder._modules[name] = nn.ModuleList(list(stack)[:count])
    decoder.config = config  # type: ignore[assignment]  # families loop over its num_hidden_layers
    return decoder, config


def place_of(decoder: nn.Module) -> tuple[torch.device, torch.dtype]:
    """The device of a decoder, and the dtype of its hidden states."""
    embedding = decoder.get_input_embeddings()  # type: ignore[operator]
    if isinstance(embedding, BlockEmbedding):  # other layers of kernels have no parameters either
        return torch.device("cpu"), embedding.dtype
    weight = next(decoder.parameters())
    return weight.device, weight.dtype


@contextmanager
def tapped(decoder: nn.Module, taps: Iterable[int]) -> Iterator[dict[int, Tensor]]:
    """Collect hidden states [T, H] while a decoder runs a pass of one row of tokens.

    Args:
        decoder: a transformers decoder.
        taps: 0 for the input of the first layer, i for the output of layer i - 1; the number of layers for the input
            of the LM head, after the final norm, and one more for what that norm reads.

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

            def last(module: nn.Module, args: Any, output: Any, tap: int = tap) -> None:
                features[tap] = (output[0] if isinstance(output, tuple) else output)[0]

            if tap < len(layers):
                hooks.callback(layers[tap].register_forward_pre_hook(before, with_kwargs=True).remove)
            elif tap == len(layers):
                hooks.callback(decoder.register_forward_hook(after).remove)
            else:
                hooks.callback(layers[-1].register_forward_hook(last).remove)
        yield features


def check_tap(tap: int, layers: int) -> None:
    """Check the number of a hidden state.

    Raises:
        InvalidRequest: not from 0 to the number of layers and one.
    """
    if not 0 <= tap <= layers + 1:
        raise InvalidRequest(
            f"tap {tap}: the target has hidden states 0 to {layers + 1}, the last two after and before its final norm"
        )


class PackedModel:
    """Runs parts of many requests in one packed pass [1, T].

    Args:
        decoder: a transformers decoder whose attention implementation is `models.attention.ATTENTION_NAME`.
        head: its LM head.
        config: the decoder's text configuration.
        max_length: tokens of one request; fewer where memory holds no more.
        max_slots: requests at a time.
        key_dtype, value_dtype: of the stored keys and values.
        memory: bytes that keys and values may take; None without a limit.
        tiled: one attention call per layer for all requests; None for everywhere but on a CPU.
        exact: tiled passes of fixed shapes, which are batch-invariant.

    Attributes:
        asked_length: `max_length` as it was given, whatever memory holds.
        row_bytes: bytes of the keys and values of a token.
        captures: tiled passes run over static buffers, on CUDA as graphs.
        compiled: the decoder run by compiled kernels; None where its own modules run.
        computed_by: which of the two runs, and why.
        four_bits: a copy with fewer bits (`models.four_bits`), while a method uses it.
    """

    def __init__(
        self,
        decoder: nn.Module,
        head: LmHead,
        config: "PretrainedConfig",
        max_length: int,
        max_slots: int,
        key_dtype: torch.dtype,
        value_dtype: torch.dtype,
        tiled: bool | None = None,
        exact: bool = False,
        memory: int | None = None,
    ) -> None:
        self.max_slots, self.config = max_slots, config
        self.decoder, self.head = decoder, head
        self.device, self.dtype = place_of(decoder)
        self.tiled, self.exact = self.device.type != "cpu" if tiled is None else tiled, exact
        assert self.tiled or not exact, "exact mode is for tiled passes"
        head.fixed_rows = EXACT_ROWS if exact else head.fixed_rows
        self.vocab_size = head.vocab_size
        heads = config.num_attention_heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        of_head = row_bytes(head_dim, key_dtype) + row_bytes(head_dim, value_dtype)
        self.row_bytes = config.num_hidden_layers * kv_heads * of_head
        self.asked_length = max_length
        budget = None if memory is None else memory // self.row_bytes
        if budget is not None:
            # Where memory is taken at once, each slot has its share from the start.
            most = budget if is_lazy(self.device) else budget // max_slots
            max_length = min(max_length, max(most - MAX_TREE_NODES, 1))
        self.max_length = max_length
        self._slots = partial(
            SlotKV,
            layers=config.num_hidden_layers,
            kv_heads=kv_heads,
            head_dim=head_dim,
            device=self.device,
        )
        self.kv = self._slots(
            slots=max_slots,
            capacity=max_length + MAX_TREE_NODES,
            key_dtype=key_dtype,
            value_dtype=value_dtype,
            budget=budget,
        )
        # The number of rows per expert is read on the host, which a graph cannot do.
        self.captures = self.tiled and captures_on(self.device, self.dtype) and not has_experts(decoder)
        self._captured: dict[tuple[int, ...], CapturedPass] = {}  # by taps
        self.four_bits: ref[PackedModel] | None = None
        self.compiled, self.computed_by = self._choose_code()
        if self.kv.scales and not getattr(config, "attn_logit_softcapping", None):  # a cap applies to unshifted scores
            self.kv.key_offsets.copy_(self._mean_keys())

    def with_weights(self, decoder: nn.Module, head: LmHead) -> "PackedModel":
        """The same model on the same slots, computed by a decoder and a head with other weights."""
        made = copy.copy(self)
        made.decoder, made.head = decoder, head
        made.compiled, made.computed_by = made._choose_code()
        return made

    @property
    def embedding(self) -> nn.Embedding:
        """The decoder's input embedding."""
        return cast(nn.Embedding, self.decoder.get_input_embeddings())  # type: ignore[operator]

    @property
    def memory(self) -> SlotKV:
        """The slots, whose rows the engine counts."""
        return self.kv

    def share_memory(self, draft: "PackedModel") -> None:
        """Count the rows of a draft model towards the memory of the slots, and give them back with these. What the
        longest request needs here stays."""
        self.kv.companion = ref(draft.kv)
        if self.kv.budget is not None and is_lazy(self.device):  # elsewhere slots have all their memory from the start
            rows = self.kv.budget * self.row_bytes // (self.row_bytes + draft.row_bytes)
            self.kv.budget = min(self.kv.budget, max(rows, self.max_length + MAX_TREE_NODES))

    def rewind_slot(self, slot: int, length: int) -> None:
        """Drop a slot's rows from `length` on."""
        self.kv.truncate(slot, length)

    @torch.inference_mode()
    def copy_slot(self, source: int, goal: int, length: int) -> None:
        """Replace a slot's rows by the first `length` committed rows of a slot, or as many as there are."""
        self.kv.copy(source, goal, length)

    def commit(self, slots: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        self.kv.commit(slots, paths)

    @torch.inference_mode()
    def run(self, parts: Sequence[PassPart], captured: bool = True) -> Tensor:
        """[T, H] final hidden states of the parts' fresh rows, packed; their keys and values become scratch rows.

        Args:
            parts: of the requests.
            captured: use CUDA graphs, if any; not for prompts, whose lengths rarely recur.
        """
        return self.run_tapped(parts, (), captured)[0]

    @torch.inference_mode()
    def run_tapped(
        self, parts: Sequence[PassPart], taps: Iterable[int], captured: bool = True
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """As `run`, with the hidden states [T, H] at `taps` (`tapped`)."""
        if not self.exact:
            return self._run_once(parts, taps, captured)
        taps, hidden, features = tuple(taps), [], []
        for piece in pieces_of(parts):
            count = sum(len(part.tokens) for part in piece)
            rows, tapped = self._run_once(piece, taps, captured)
            hidden.append(rows[:count])  # without padding
            features.append({tap: states[:count] for tap, states in tapped.items()})
        return torch.cat(hidden), {tap: torch.cat([one[tap] for one in features]) for tap in features[0]}

    @torch.inference_mode()
    def run_watched(self, parts: Sequence[PassPart], watch: Watch) -> None:
        """A pass of the decoder's own modules on a CPU that hands out the queries of each layer, once the layer's keys
        and values are written."""
        segments, positions = self._segments(parts)
        ids = torch.cat([part.tokens for part in parts])
        self._run_modules(ids, positions, PassCache(segments, watch=watch), ())

    def _run_once(
        self, parts: Sequence[PassPart], taps: Iterable[int], captured: bool
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """One pass; in exact mode the result may end with padding."""
        segments, positions = self._segments(parts)
        ids = torch.cat([part.tokens.to(self.device) for part in parts])
        if self.tiled:
            return self._run_tiled(Tables.of(segments, self.exact), ids, taps, captured)
        if self.compiled is not None:
            return self.compiled.run(ids, segments, self._known_taps(taps))
        return self._run_modules(ids, positions.to(self.device), PassCache(segments), taps)

    def _run_tiled(
        self, tables: Tables, ids: Tensor, taps: Iterable[int], captured: bool
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """A pass with one attention call per layer; over static buffers if it fits one."""
        wanted = tuple(sorted(self._known_taps(taps)))
        if captured and self.captures:
            if wanted not in self._captured:
                rows = EXACT_ROWS if self.exact else None
                # By a weak reference: a cycle would keep the weights until the garbage collector comes.
                run = partial(PackedModel._run_plan, proxy(self), taps=wanted)
                self._captured[wanted] = CapturedPass(self.kv, run, rows)
            found = self._captured[wanted]([tables], [ids])
            if found is not None:
                return found[0], dict(zip(wanted, found[1:], strict=True))
        hidden, *features = self._run_plan([tables.on(self.device)], ids, wanted)
        return hidden, dict(zip(wanted, features, strict=True))

    def _run_plan(self, plans: Sequence[TilePlan], ids: Tensor, taps: Sequence[int]) -> tuple[Tensor, ...]:
        """Final hidden states and those at taps, [T, H] each."""
        (plan,) = plans
        positions = plan.rows[:, 2].long()
        if self.exact:
            ids, positions = padded(ids), padded(positions)
        hidden, features = self._run_modules(ids, positions, PassCache((), plan, self.kv), taps)
        return hidden, *(features[tap] for tap in taps)

    def _segments(self, parts: Sequence[Rows], kv: SlotKV | None = None) -> tuple[list[Segment], Tensor]:
        """The parts' segments, and the positions [T] of their rows. `kv`: slots to use instead of the model's."""
        segments = segments_of(self.kv if kv is None else kv, parts)
        return segments, torch.cat([one.positions[one.scratch :] for one in segments])

    def _run_modules(
        self, ids: Tensor, positions: Tensor, cache: PassCache, taps: Iterable[int]
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """A pass by the decoder's own modules."""
        # Within a table of learned positions: tree nodes beyond the longest request are never accepted.
        positions = positions.clamp(max=self.max_length - 1)
        with tapped(self.decoder, taps) as features:
            output = self.decoder(
                input_ids=ids[None], position_ids=positions[None], past_key_values=cache, use_cache=True, slots=cache
            )
        return output.last_hidden_state[0], features

    def _known_taps(self, taps: Iterable[int]) -> set[int]:
        count = len(layers_of(self.decoder)[1])
        wanted = set(taps)
        for tap in wanted:
            check_tap(tap, count)
        return wanted

    @stage("measuring")
    @torch.inference_mode()
    def _choose_code(self) -> tuple[CompiledDecoder | None, str]:
        """The decoder in one compiled call, if a short pass shows that the kernels compute what its modules do; None
        otherwise. And which code computes passes, in words."""
        try:
            check_kernels(self.device)
            if self.tiled or not has_kernels(self.kv):
                raise NotCompiled("no kernel computes passes in " + ("tiles" if self.tiled else str(self.dtype)))
            if not any(isinstance(module, KernelLinear) for module in self.decoder.modules()):
                raise NotCompiled("its weights are not packed for the kernels")
            return self._compiled_decoder(), COMPILED
        except NotCompiled as reason:
            return None, in_python(reason)
        except AttributeError as error:
            return None, in_python(f"its layers have a layout of their own: {error}")

    @torch.inference_mode()
    def _mean_keys(self) -> Tensor:
        """[layers, kv_heads, 1, head_dim] means of the keys of some tokens, mostly biases (SageAttention, arXiv
        2410.02367)."""
        count = min(_AVERAGED, self.max_length)
        ids = torch.arange(count) * 7 % self.config.vocab_size
        offsets = torch.linspace(0, min(self.max_length, _AVERAGED_POSITIONS) - 1, count).long()
        kv = self._slots(slots=1, capacity=count, key_dtype=self.dtype, value_dtype=self.dtype)
        segments, positions = self._segments([Rows(0, offsets, Topology.chain(count).ancestor_mask)], kv)
        if self.compiled is None:
            self._run_modules(ids, positions, PassCache(segments), ())
        else:
            self.compiled.run(ids, segments, ())
        return kv.keys[:, 0, :, :count].float().mean(dim=-2, keepdim=True)

    def _compiled_decoder(self) -> CompiledDecoder:
        count = min(_COMPARED, self.max_length)
        ids = torch.arange(count) * 7 % self.config.vocab_size
        # Slots of its own: rounding of keys and values would hide what is compared.
        kv = self._slots(slots=1, capacity=count, key_dtype=self.dtype, value_dtype=self.dtype)
        segments, positions = self._segments([PassPart.of(0, ids)], kv)
        taps = range(len(layers_of(self.decoder)[1]) + 2)
        cache = PassCache(segments)
        _, expected = self._run_modules(ids, positions, cache, taps)
        settings = [cache.settings[layer] for layer in sorted(cache.settings)]
        compiled = CompiledDecoder(self.decoder, self.config, settings, self.kv.capacity)
        _, found = compiled.run(ids, segments, taps)
        is_coarse = self.dtype == torch.bfloat16 or compiled.layers.is_quantized
        for tap in taps:
            check_same(f"the layers of {type(self.decoder).__name__}", found[tap], expected[tap], is_coarse)
        return compiled


def pieces_of(parts: Sequence[PassPart], rows: int = EXACT_ROWS) -> Iterator[list[PassPart]]:
    """Split parts into passes of at most `rows` rows, in order."""
    piece: list[PassPart] = []
    free = rows
    for part in parts:
        start, count = 0, len(part.tokens)
        while start < count:
            end = min(count, start + free)
            piece.append(_cut(part, start, end))
            free -= end - start
            start = end
            if free == 0:
                yield piece
                piece, free = [], rows
    if piece:
        yield piece


def _cut(part: PassPart, start: int, end: int) -> PassPart:
    """Rows `start` to `end` of a part; the rows before them become scratch rows of an earlier pass."""
    if (start, end) == (0, len(part.tokens)):
        return part
    assert part.visible is not None, "rows that all see each other cannot be split"
    seen = part.scratch + end
    assert not part.visible[start:end, seen:].any(), "no row sees a later one"
    return replace(
        part,
        tokens=part.tokens[start:end],
        offsets=part.offsets[:seen],
        visible=part.visible[start:end, :seen],
        scratch=part.scratch + start,
    )
