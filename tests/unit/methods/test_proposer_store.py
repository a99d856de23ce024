"""How many methods a model keeps, for how long, and what they share."""

import gc
from collections import Counter
from pathlib import Path
from threading import Thread
from typing import Any
from weakref import WeakSet

import pytest
import torch

import outpace
from outpace.lib.quick import without_collection
from outpace.methods import stores
from outpace.methods.catalog import methods
from outpace.methods.stores import MOST_KEPT, stored_proposer
from outpace.models.head import LmHead
from outpace.trees.proposer import EmptyDraft
from tests.unit.methods.test_trained_drafters import write_drafter
from tests.unit.models.tiny import save_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("target"), max_position_embeddings=512)


def loaded(folder: Path, **options: Any) -> outpace.Model:
    return outpace.load(folder, "plain", dtype="float32", device="cpu", max_num_seqs=2, **options)


def ours() -> Counter[type]:
    """Objects of this package's types and ctypes' in memory, those that wait for the garbage collector included."""
    found, own = Counter(type(one) for one in gc.get_objects()), ("outpace.", "_ctypes")
    return Counter({kind: count for kind, count in found.items() if str(kind.__module__).startswith(own)})


@pytest.mark.parametrize("kind", ["eagle3", "dflash", "domino", "medusa", "dart", None])
def test_methods_in_rotation_leave_nothing_behind(
    kind: str | None, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against reference cycles in drafters."""
    model = loaded(folder, drafter=None if kind is None else write_drafter(kind, tmp_path))
    free = (None,) if kind else (None, "draft-lm")
    left_out = ("plain", "fr-spec", "self")  # the last one refuses rows of 48 numbers; test_four_bits.py drops copies
    names = [name for name, one in methods().items() if one.drafter in (kind, *free) and name not in left_out]
    names = [name for name in names if name != "outpace" or kind == "domino"] + ["outpace:draft=none"]
    named = [f"{name}{',' if ':' in name else ':'}budget={budget}" for budget in (1, 2, 3, 4, 5) for name in names][:20]
    assert len(set(named)) == 20 > MOST_KEPT
    alive, counts = WeakSet[object](), list[Counter[type]]()
    monkeypatch.setattr(gc, "collect", lambda *_: 0)  # nor does the store call it
    with without_collection():
        for rotation in range(20):
            for name in named:
                alive.add(model.proposer(name))
                if rotation in (0, 1, 19):
                    model.generate("Hello there, hello there", method=name, max_new_tokens=3)
            assert len(alive) <= MOST_KEPT + model.target.max_slots
            if rotation in (1, 18, 19):
                counts.append(ours())
        before, idle, after = counts
        assert (idle - before, after - before) == (Counter(), Counter())


def test_a_method_in_use_is_neither_dropped_nor_built_twice(folder: Path) -> None:
    """Guards against a second proposer, with slots of its own, beside that of an open request."""
    model = loaded(folder)
    proposer = model.proposer("recycle:budget=3")
    stream = model.stream("Hello there", method="recycle:budget=3", max_new_tokens=9)
    used = WeakSet([proposer])
    del proposer
    for budget in range(4, 40):
        model.proposer(f"recycle:budget={budget}")
    model.reset()
    assert list(used) == [model.proposer("recycle:budget=3")]
    plain = model.generate("Hello there", max_new_tokens=9).token_ids
    assert tuple(token for event in stream for token in event.tokens) == plain


def test_what_ends_with_a_dropped_proposer_may_ask_for_a_method(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against proposers that end under the lock of methods: a finaliser that generates waited for ever."""
    model, asked = loaded(folder), list[object]()

    class Asks(EmptyDraft):
        def __del__(self) -> None:
            asked.append(model.proposer("plain"))

    built = iter([Asks()])
    monkeypatch.setattr(stores, "stored_proposer", lambda *given: next(built, None) or stored_proposer(*given))

    def fill() -> None:
        for budget in range(1, MOST_KEPT + 3):
            model.proposer(f"recycle:budget={budget}")

    thread = Thread(target=fill, daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
    assert len(asked) == 1


def test_a_proposer_that_nothing_can_refer_to_weakly_is_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a plugin's proposer with slots refused as a TypeError."""

    class Slotted:
        __slots__ = ()

    model = loaded(folder)
    monkeypatch.setattr(stores, "stored_proposer", lambda *_: Slotted())
    assert isinstance(model.proposer("recycle:budget=3"), Slotted)
    assert model.proposer("recycle:budget=3") is model.proposer("recycle:budget=3")


def test_spellings_of_a_method_are_one(folder: Path) -> None:
    """Guards against a proposer per text: a method may be written in thousands of ways."""
    model = loaded(folder)
    first = model.proposer("recycle:budget=8")
    spellings = (" recycle:budget=8", "recycle:budget=08", "recycle:budget=8,", "recycle:budget= 8")
    assert {model.proposer(text) for text in spellings} == {first}
    assert model.proposer(outpace.method("recycle", budget=8)) is first


def test_the_last_ones_asked_for_are_kept(folder: Path) -> None:
    """Guards against a method that is given up although it was just used, with what it has learned."""
    model = loaded(folder)
    kept = WeakSet([model.proposer("recycle:budget=1"), model.proposer("recycle:budget=2")])
    for budget in range(3, 3 + MOST_KEPT):
        model.proposer("recycle:budget=1")
        model.proposer(f"recycle:budget={budget}")
    gc.collect()
    assert list(kept) == [model.proposer("recycle:budget=1")]


def test_methods_that_differ_in_budget_share_net_and_head(folder: Path, tmp_path: Path) -> None:
    """Guards against a copy of the drafter's vocabulary layer for each budget: 18 MB of SmolLM2's."""
    model = loaded(folder, drafter=write_drafter("eagle3", tmp_path))
    one, other = (model.proposer(f"eagle3:budget={budget}").source for budget in (3, 5))  # type: ignore[attr-defined]
    assert one is not other
    assert one.net is other.net
    assert one._head is other._head
    slots = WeakSet([one.slots.kv, other.slots.kv])
    del one, other
    model.reset()
    assert not slots


def test_parts_of_a_head_are_shared_where_they_are_the_same() -> None:
    """Guards against one vocabulary drafted from the rows of another, and copies that outlive whoever used them."""
    head, another = (LmHead(torch.nn.Linear(8, 30, bias=False)) for _ in range(2))
    ids, rows = torch.tensor([3, 5, 7]), torch.randn(2, 8)
    part = head.restricted(ids)
    assert head.restricted(ids.clone()) is part
    for other, which in ((head, torch.tensor([3, 5, 8])), (another, ids)):
        scores = other.restricted(which).own_scores(rows)
        assert torch.allclose(scores, other.scores(rows)[:, which], atol=1e-5)  # products of other shapes round
        assert other.restricted(which) is not part
