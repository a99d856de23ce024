"""Measure, when a model loads, whether its passes are batch-invariant on this machine.

Kernel libraries do not guarantee it, and it depends on the CPU, the number of threads and the shapes of layers. Each
probe computes a row alone and together with others, and describes the first difference. The result holds for the number
of threads at load.
"""

import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from time import perf_counter
from typing import Literal

import torch
from torch import Tensor, nn

from outpace.cache.slots import in_blocks
from outpace.core.tree import Topology
from outpace.kernels.attention import has_kernels
from outpace.kernels.linear import KernelLinear
from outpace.lib.errors import InvalidRequest
from outpace.lib.stages import stage
from outpace.models.attention import products
from outpace.models.layers.linear import PackedLinear, SiblingLinear, is_conv1d
from outpace.models.packed import PackedModel, PassPart, first_layers, layers_of
from outpace.models.target import PackedTarget

# Numbers of rows of a product, as batches and trees have them, on both sides of where kernels change.
_ROWS = (2, 3, 5, 8, 17, 33, 64)
_ROWS_OF_WIDEST = (2, 17)  # an LM head costs as much as several layers
_WIDEST = 2**15
# Tree nodes and context lengths of attention scores, around blocks of rows and keys and where threads split them.
_NODES = (1, 6, 33)
_LENGTHS = (1, 20, 99, 150, 300)
# A pass: sizes of its trees, length of the prompt, and of the path that is also decoded token by token.
_TREES = (9, 61)
_PROMPT, _PATH = 18, 3
_SLOTS = 3


@dataclass(frozen=True)
class Exactness:
    """How a method's tokens can differ from plain decoding's.

    Attributes:
        kind: "bitwise": passes are batch-invariant, and tokens are equal; "rounding": they may not be, and where two
            tokens have almost the same score the other one may be generated (a tie).
        reason: what the probe found.
        milliseconds: how long the probe took; 0 if there was nothing to probe.
    """

    kind: Literal["bitwise", "rounding"]
    reason: str
    milliseconds: float = 0.0

    @property
    def is_bitwise(self) -> bool:
        return self.kind == "bitwise"

    def __str__(self) -> str:
        """A sentence for users: what it means, and why."""
        meaning = "every method's tokens are plain decoding's on this machine"
        if not self.is_bitwise:
            meaning += ", except where two tokens have almost the same score and rounding may choose the other one"
        return f"exactness: {self.kind} - {meaning}; found at load: {self.reason}"


@stage("measuring")
@torch.inference_mode()
def probe(target: PackedTarget) -> Exactness:
    """Compare rows computed alone and with others: products of the model's shapes, attention scores, short passes.

    It costs about as much as a prompt of 20 tokens and uses none of the target's slots.

    Raises:
        InvalidRequest: exact mode on a CPU whose passes are not batch-invariant.
    """
    width = _name(target.dtype)
    if target.rounded_to != target.dtype:
        width += f", weights rounded to {_name(target.rounded_to)}, which this CPU has no instructions for"
    if target.tiled:
        if not target.exact:
            return Exactness("rounding", f"kernels of a GPU sum in an order that depends on the other rows ({width})")
        bitwise = "exact mode: passes gave every row the same bits alone and with others"
        return _result(differing_passes(target), width, bitwise, "in exact mode ")
    found = _probe_cpu(target, width)
    if not target.wants_exact:
        return found
    if not found.is_bitwise:
        raise InvalidRequest(
            f"exact=True: a CPU has only one way to compute, and on this one {found.reason}; leave it out, or take "
            "dtype='float32' or 'bfloat16' and install a C++ compiler"
        )
    return replace(found, reason=f"{found.reason}; exact=True changes nothing on a CPU")


def _probe_cpu(target: PackedTarget, width: str) -> Exactness:
    layers = list(chain(target.decoder.modules(), target.head.layer.modules()))
    if any(type(layer) is nn.Linear or is_conv1d(layer) for layer in layers):
        return Exactness("rounding", f"products of layers that are not packed depend on the other rows ({width})")
    faults, probed = [differing_passes(target)], "passes"
    if not has_kernels(target.kv):  # which sum a row's keys in logical order; the passes show whether they do
        _, _, groups, _, head_dim = target.kv.keys.shape
        faults.insert(0, differing_scores(target.config.num_attention_heads, groups, head_dim))
        probed = f"attention, {probed}"
    if packed := [layer for layer in layers if isinstance(layer, PackedLinear)]:
        faults.insert(0, differing_products(packed))
        probed = f"products, {probed}"
    return _result(chain(*faults), width, f"{probed} gave every row the same bits alone and with others")


def _result(faults: Iterator[str], width: str, bitwise: str, prefix: str = "") -> Exactness:
    started = perf_counter()
    fault = next(faults, None)
    milliseconds = (perf_counter() - started) * 1e3
    if fault is not None:
        return Exactness("rounding", f"{prefix}{fault} ({width})", milliseconds)
    return Exactness("bitwise", f"{bitwise} ({width})", milliseconds)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def differing_products(layers: Iterable[PackedLinear]) -> Iterator[str]:
    """Products, one per shape, in which the other rows change a row's bits.

    Rounding to bfloat16 would hide most differences. A float32 bias that cancels nearly all of the result leaves the
    last bits of the sum, which show its order: two rounds cancel 18 of bfloat16's 24 bits, one all of float32's.
    """
    generator = torch.Generator().manual_seed(0)
    shapes = {(layer.outputs, layer.inputs): layer for layer in layers}
    for (outputs, inputs), layer in shapes.items():
        bare = copy.copy(layer)
        bare.bias = torch.zeros(outputs)
        row = torch.randn(1, inputs, generator=generator).to(layer.dtype)
        for _ in range(1 if row.dtype == torch.float32 else 2):
            bare.bias = bare.bias - bare(row)[0].float()
        alone = bare(row)
        for count in _ROWS_OF_WIDEST if outputs >= _WIDEST else _ROWS:
            if not torch.equal(bare(row.repeat(count, 1)), alone.expand(count, -1)):
                yield f"a product of {inputs} by {outputs} sums otherwise for {count} rows than for one"
                break


def differing_scores(heads: int, groups: int, head_dim: int) -> Iterator[str]:
    """Products of queries and keys in float32 whose bits depend on the other queries, the other keys or positions."""
    generator = torch.Generator().manual_seed(0)
    longest, moved = max(_LENGTHS), 7
    keys = torch.randn(groups, in_blocks(longest + moved), head_dim, generator=generator)
    rows = torch.randn(groups, heads // groups * max(_NODES), head_dim, generator=generator)
    whole = products(rows, keys, longest + moved)
    for nodes in _NODES:
        for length in _LENGTHS:
            count = heads // groups * nodes
            for first in (0, moved):
                part = products(rows[:, :count], keys[:, first:], length)
                if not torch.equal(part, whole[:, :count, first : first + length]):
                    yield f"attention scores of {nodes} tokens over {length} keys depend on the other rows"
                    return


def differing_passes(target: PackedTarget) -> Iterator[str]:
    """Passes in which a token's hidden states, keys, values or logits differ from those of the token decoded alone.
    They use the first layers, up to one of each kind."""
    decoder, config = first_layers(target.decoder, target.config, _until_every_kind(target.decoder))
    longest, kv = min(target.max_length, _PROMPT + max(_TREES)), target.kv
    model = PackedModel(
        decoder,
        target.head,
        config,
        max_length=longest,
        max_slots=_SLOTS,
        key_dtype=kv.keys.dtype,
        value_dtype=kv.values.dtype,
        tiled=target.tiled,
        exact=target.exact,
    )
    ids = torch.randint(target.vocab_size, (max(_TREES),), generator=torch.Generator().manual_seed(0))
    slots = range(_SLOTS)
    prompts = [PassPart.of(slot, ids[slot : _PROMPT - slot]) for slot in slots]
    slot = slots[0]
    model.run(prompts[:1])
    prompt = _written(model, slot, range(_PROMPT))
    model.run(prompts)
    if not torch.equal(_written(model, slot, range(_PROMPT)), prompt):
        yield "a prompt has other bits with other prompts than alone"
    for part in prompts:
        model.commit([part.slot], [range(len(part.tokens))])
    alone = torch.cat([_decoded(model, slot, token) for token in ids[:_PATH]])  # [P, H]
    model.rewind_slot(slot, _PROMPT)
    written = _written(model, slot, range(_PATH))
    for size in _TREES:
        places = (0, size // 2, size - 1)
        hidden = model.run([_tree(slot, size, places, ids)])
        if not torch.equal(hidden[list(places)], alone) or not torch.equal(_written(model, slot, places), written):
            yield f"a token has other bits in a pass of {size} rows than alone"
    one, several = model.head(alone[:1]), model.head(alone)
    if not all(
        torch.equal(getattr(one, name)[0], getattr(several, name)[0]) for name in ("logits", "top_ids", "top_logits")
    ):
        yield "the LM head gives a row other bits with others than alone"
    singles = [PassPart.of(each, ids[:1]) for each in slots[:2]]
    together = model.run([*singles, _tree(slots[2], min(_TREES), (0, 4, 8), ids)])
    if not torch.equal(together[0], alone[0]):
        yield "a token has other bits in a batch than alone"


def _until_every_kind(decoder: nn.Module) -> int:
    """Number of first layers that include one layer of each kind in the decoder."""
    kinds = [_kind(layer) for layer in layers_of(decoder)[1]]
    return 1 + max(kinds.index(kind) for kind in kinds)


def _kind(layer: nn.Module) -> list[object]:
    """A layer's modules, the shapes of its products, and its settings except its index."""
    kind: list[object] = []
    for module in layer.modules():
        kind.append(type(module))
        if isinstance(module, PackedLinear | KernelLinear):
            kind.append((module.outputs, module.inputs, getattr(module, "formats", None)))
        elif not isinstance(module, SiblingLinear):
            settings = vars(module).items()
            kind += [(key, value) for key, value in settings if type(value) in (bool, int, str) and "idx" not in key]
    return kind


def _decoded(model: PackedModel, slot: int, token: Tensor) -> Tensor:
    """[1, H] of a token by plain decoding."""
    hidden = model.run([PassPart.of(slot, token[None])])
    model.commit([slot], [[0]])
    return hidden


def _tree(slot: int, size: int, places: Sequence[int], ids: Tensor) -> PassPart:
    """A tree whose path through `places` has the first ids, with other nodes between them."""
    parents = [-1, *((node - 1) // 2 for node in range(1, size))]
    tokens = ids.roll(_PATH)[:size].clone()
    for depth, node in enumerate(places):
        tokens[node] = ids[depth]
        parents[node] = places[depth - 1] if depth else -1
    return PassPart.of(slot, tokens, Topology.of(parents))


def _written(model: PackedModel, slot: int, places: Sequence[int]) -> Tensor:
    """Keys and values of rows after the committed ones with their scales, as float64 [layers, kv_heads, P, all]."""
    rows = [model.kv.lengths[slot] + place for place in places]
    return torch.cat([storage[:, slot][:, :, rows].double() for storage in model.kv.storages], dim=-1)
