"""What a round of a block drafter costs, counted in operations, and that the host reads nothing of it too early."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from outpace.core.drafting import Candidates, Frontier
from outpace.core.protocols import PromptChunk
from outpace.core.tree import DraftTree
from outpace.models.attention import ATTENTION_NAME
from outpace.models.target import PackedTarget
from outpace.sampling import warp
from outpace.testing.toy import draft_request
from tests.unit.drafters.source.learned import BLOCK, KINDS, PROMPTS, SIZES, proposer_of, source_of
from tests.unit.models.tiny import VOCAB, stock_model, tiny_config, tiny_target

pytestmark = pytest.mark.usefixtures("without_kernels")  # what compiled kernels multiply cannot be counted

DEPTHS = BLOCK["block_size"] - 1
HIDDEN, STATE, RANK = SIZES["hidden_size"], 12, 8  # H, G and r of the tiny Domino; V, H, G, r and the pool all differ
POOL = 11
PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "linear", "matmul", "gru_cell", "_linear_pointwise"}
FULL_KINDS = [kind for kind in KINDS if not kind.endswith("-subset")]  # subsets are worked out at load, which reads
SHARP: dict[str, Any] = {"temperature": 0.3}  # random nets are unsure of themselves, and DynaTree then drafts little
SAMPLED: dict[str, Any] = {"temperature": 0.7, "top_k": 40, "top_p": 0.9, "min_p": 0.01}


class Product(NamedTuple):
    """A product of matrices [rows, inner] x [inner, columns]. A GRU step counts as one, its columns the state's."""

    rows: int
    inner: int
    columns: int


class Counting(TorchDispatchMode):
    """Notes every product of matrices."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.products: list[Product] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in PRODUCTS:
            self.products.append(Product(result.shape[:-1].numel(), args[0].shape[-1], result.shape[-1]))
        return result


class Counted:
    """A block drafter's source that counts what it does.

    Attributes:
        levels: per level, the nodes of its frontier, all requests together, and its products.
        backbones: passes of the backbone.
    """

    def __init__(self, source: Any) -> None:
        self._source, self._block = source, source.net.block
        self.levels: list[tuple[int, list[Product]]] = []
        self.backbones = 0
        source.net.block = self._counted_block

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def _counted_block(self, *args: Any) -> Tensor:
        self.backbones += 1
        outputs: Tensor = self._block(*args)
        return outputs

    def expand(self, states: Sequence[Any], frontier: Frontier, width: int) -> Candidates:
        with Counting() as counting:
            found: Candidates = self._source.expand(states, frontier, width)
        self.levels.append((len(frontier.tokens), counting.products))
        return found


def propose(shape: str, source: Any, count: int, device: str = "cpu", **options: Any) -> list[DraftTree]:
    """One round of requests whose prompts the source has seen."""
    proposer = proposer_of(shape, source, device)
    states = [proposer.open(slot) for slot in range(count)]
    for seed, (state, ids) in enumerate(zip(states, PROMPTS, strict=False)):
        generator = torch.Generator().manual_seed(seed)
        features = torch.randn(len(ids) - 1, len(source.needs.taps) * HIDDEN, generator=generator).to(device)
        proposer.prefill([state], [PromptChunk(torch.tensor(ids[:-1]), None, features)])
    wanted = [draft_request(ids, proposer.budget, DEPTHS, seed=4, **options) for ids in PROMPTS[:count]]
    return proposer.propose(states, wanted)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("shape", ["chain", "fixed", "beam", "dynatree"])
@pytest.mark.parametrize("kind", ["dflash", "domino", "domino-shifted"])
def test_a_depth_is_one_gru_step_and_one_correction(kind: str, shape: str, count: int) -> None:
    """Guards against products per request or per branch."""
    source = Counted(source_of(kind, tiny_target(tiny_config("llama"))))
    propose(shape, source, count, **SHARP)
    assert len(source.levels) >= 3
    assert source.backbones == 1
    assert shape == "chain" or max(nodes for nodes, _ in source.levels) > count, "nothing branched"
    for depth, (nodes, products) in enumerate(source.levels, start=1):
        expected = [] if kind == "dflash" else [Product(nodes, HIDDEN, STATE)]
        if kind != "dflash" and source.net.config.corrects(depth):
            expected += [Product(nodes, HIDDEN + STATE, RANK), Product(nodes, RANK, VOCAB)]
        head = products.index(Product(count * DEPTHS, HIDDEN, VOCAB)) + 1 if depth == 1 else 0
        assert products[head:] == expected, f"depth {depth}"


@pytest.mark.parametrize("shape", ["chain", "fixed"])
def test_a_pool_is_all_that_a_depth_multiplies(shape: str) -> None:
    """Guards against a pool that is cut out of a product with the whole vocabulary."""
    source = Counted(source_of("domino", tiny_target(tiny_config("llama")), pool=POOL))
    propose(shape, source, 3)
    for depth, (nodes, products) in enumerate(source.levels, start=1):
        head = products.index(Product(3 * DEPTHS, HIDDEN, VOCAB)) + 1 if depth == 1 else 0
        step, low, *corrections = products[head:]
        assert step == Product(nodes, HIDDEN, STATE)
        assert low == Product(nodes, HIDDEN + STATE, RANK)
        assert [(found.inner, found.columns) for found in corrections] == [(RANK, POOL)] * 3
        assert sum(found.rows for found in corrections) == nodes, "each node once"


def unreadable_target() -> PackedTarget:
    """A target on the meta device, whose tensors have shapes and no contents: every host read of one raises, and so
    does every product of host and device, as on an accelerator. Copies to it are free."""
    model = stock_model(tiny_config("llama"), ATTENTION_NAME).to("meta")  # type: ignore[arg-type]
    return PackedTarget(model, 256, 4, ())


@pytest.mark.parametrize("options", [{}, {"temperature": 0.7}, SAMPLED], ids=["greedy", "T=0.7", "truncated"])
@pytest.mark.parametrize("kind", [*FULL_KINDS, "domino-pool"])
def test_the_host_reads_nothing_of_a_chain(kind: str, options: dict[str, Any]) -> None:
    """Guards against a read before the verdict, for which the host would wait at every depth."""
    own: dict[str, Any] = {"pool": POOL} if kind == "domino-pool" else {}
    source = source_of(kind.removesuffix("-pool"), unreadable_target(), **own)
    trees = propose("chain", source, 3, "meta", **options)
    for tree in trees:
        assert len(tree) > 1
        assert tree.tokens.is_meta
        with pytest.raises((NotImplementedError, RuntimeError), match="meta"):
            tree.tokens.tolist()


def test_top_p_over_a_large_vocabulary_is_no_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against asking the device, depth by depth, whether the likeliest ids reached top_p."""
    monkeypatch.setattr(warp, "_TOP_P_GUESS", 8)
    (tree,) = propose("chain", source_of("domino", unreadable_target()), 1, "meta", **SAMPLED)
    assert len(tree) > 1


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("shape", ["fixed", "beam", "dynatree"])
@pytest.mark.parametrize("kind", ["dflash", "domino", "eagle3", "dart", "medusa"])
def test_a_growing_tree_is_read_once_per_level(
    kind: str, shape: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against reads per request or node: a level's tokens and scores, all requests together."""
    read: list[tuple[int, ...]] = []

    def made_up(tensor: Tensor) -> Tensor:
        read.append(tuple(tensor.shape))
        ranks = torch.arange(tensor.shape[1]).expand(tensor.shape)
        return -0.2 - ranks if tensor.is_floating_point() else ranks

    monkeypatch.setattr(Tensor, "cpu", made_up)
    trees = propose(shape, source_of(kind, unreadable_target()), count, "meta")
    depths = {tree.topology.max_depth for tree in trees}
    assert len(read) == 2 * max(depths)
    assert max(depths) >= 2
    assert [tokens == scores for tokens, scores in zip(read[::2], read[1::2], strict=True)] == [True] * max(depths)
    assert read[0][0] == count
