"""Windowed drafters: they see the first four tokens and the last ones, and change no answer."""

from typing import Any

import pytest
import torch
from torch import Tensor

from outpace.cache.slots import Segment, SlotKV
from outpace.core.drafting import Frontier
from outpace.core.params import SamplingParams
from outpace.core.protocols import NO_TOKEN, PromptChunk
from outpace.drafters.build_context import BuildContext
from outpace.drafters.draft_lm.source import DraftLM
from outpace.drafters.model_options import ModelOptions
from outpace.drafters.shaped import shaped
from outpace.engine.engine import Engine
from outpace.lib.errors import InvalidRequest
from outpace.methods.catalog import build_proposer, parse_method
from outpace.models.attention import ATTENTION_NAME
from outpace.models.draft import draft_model_of, early_exit
from outpace.models.target import PackedTarget
from outpace.testing import decode
from outpace.testing.toy import draft_request, no_draft_model
from outpace.trees.proposer import EmptyDraft
from tests.unit.drafters.source import learned
from tests.unit.drafters.source.learned import proposer_of, source_of
from tests.unit.drafters.source.test_learned import prefilled
from tests.unit.models.tiny import VOCAB, random_ids, stock_model, tiny_config, tiny_target

KINDS = ("eagle3", "dart", "dflash", "dflash-sliding", "domino", "lattice", "dspark", "dflash2", "draft-lm")
WINDOW = 6
PROMPTS = [random_ids(30, 2), random_ids(9, 1), random_ids(17, 3)]


def windowed(kind: str, target: PackedTarget, window: int | None, pack: bool = False) -> Any:
    if kind == "draft-lm":
        config = tiny_config("qwen2", num_hidden_layers=2)
        model = draft_model_of(stock_model(config, ATTENTION_NAME), target.max_length, target.max_slots, pack)
        source: Any = DraftLM(model, VOCAB)
    else:
        source = source_of(kind, target, pack=pack and kind != "dart")
    holder_of(source).window = window
    return source


def holder_of(source: Any) -> Any:
    """What has a source's window."""
    return source if isinstance(source, DraftLM) else source.slots


def drafts(source: Any, target: PackedTarget, masked: int | None = None) -> Tensor:
    """Scores of two levels behind 29 committed ids, all of whose rows are written without a window.

    Args:
        masked: rows that a reference of the source sees of the last, with the first four, in the place of its window.
    """
    ids, own = PROMPTS[0], holder_of(source)
    window, own.window = own.window, None
    state = prefilled(source, target, 0, ids)
    own.window = window
    if masked is not None:
        holder, name = (source.model, "_segments") if isinstance(source, DraftLM) else (source.slots, "segments")
        kv = holder.kv

        def segments(parts: Any) -> Any:
            found, start = [], 0
            for part in parts:
                count = len(part.offsets) - part.scratch
                found.append(segment_of(kv, part, start, masked))
                start += count
            if name == "segments":
                return found
            return found, torch.cat([one.positions[-one.count :] for one in found])

        setattr(holder, name, segments)
    source.begin([state], [draft_request(ids, 20, 4)])
    root = source.expand([state], Frontier(torch.tensor(ids[-1:]), [0], [-1]), 3)
    below = source.expand([state], Frontier(root.tokens[0], [0] * 3, [0] * 3), 2)
    return torch.cat([root.log_probs.flatten(), below.log_probs.flatten()])


def segment_of(kv: SlotKV, part: Any, start: int, window: int) -> Segment:
    """A part whose committed rows are all scratch, masked but for the first four and the last ones."""
    length = kv.lengths[part.slot]
    visible = torch.ones(len(part.offsets) - part.scratch, length + len(part.offsets), dtype=torch.bool)
    visible[:, 4 : max(length - window, 4)] = False
    if part.visible is not None:
        visible[:, length:] = part.visible
    positions = torch.cat([torch.arange(length), part.offsets + length])
    kv.lengths[part.slot] = 0
    segment = Segment(kv, part.slot, start, positions, visible, scratch=length + part.scratch)
    kv.lengths[part.slot] = length
    return segment


@pytest.mark.parametrize("pack", [False, True], ids=["python", "packed"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_windowed_drafter_sees_the_first_four_rows_and_the_last(kind: str, pack: bool) -> None:
    """Guards against a window that is a row too wide or too narrow, or moves while a tree grows; compared with passes
    that mask the other rows. One row more or less would show."""
    target = tiny_target(tiny_config("llama"))
    found = drafts(windowed(kind, target, WINDOW, pack), target)
    references = {
        width: drafts(windowed(kind, target, None), target, masked=width) for width in (WINDOW - 1, WINDOW, WINDOW + 1)
    }
    torch.testing.assert_close(found, references[WINDOW], atol=1e-3, rtol=1e-3)
    for width in (WINDOW - 1, WINDOW + 1):
        assert not torch.allclose(found, references[width], atol=2e-3, rtol=2e-3), f"{width} rows"


def test_a_window_wider_than_the_nets_own_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a net's own sliding window that counts rows of the view, or lets the first four through."""
    monkeypatch.setitem(learned.KINDS["dflash-sliding"], "layer_types", ("sliding_attention", "sliding_attention"))
    target = tiny_target(tiny_config("llama"))
    found, whole = (drafts(windowed("dflash-sliding", target, window), target) for window in (WINDOW, None))
    torch.testing.assert_close(found, whole, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", KINDS)
def test_a_windowed_drafter_changes_no_answer(kind: str, temperature: float) -> None:
    """Guards against a view that reaches the target's pass, and rows of a neighbour: alone and in a batch."""
    target = tiny_target(tiny_config("llama"))
    params = [SamplingParams(max_new_tokens=20, temperature=temperature, seed=seed) for seed in range(3)]
    plain = decode(Engine(target), PROMPTS, params, [EmptyDraft()] * 3)
    for shape in ("chain", "beam"):
        proposer = proposer_of(shape, windowed(kind, target, WINDOW))
        together = decode(Engine(target, prefill_chunk=8), PROMPTS, params, [proposer] * 3)
        assert [one.generated for one in together] == [one.generated for one in plain]
        assert all(one.metrics.drafted for one in together)


def test_how_a_prompt_is_divided_changes_no_draft_under_rejection() -> None:
    """Guards against an answer under rejection, where drafts affect it, that follows clocks and neighbours: they decide
    how many rows of a prompt a pass writes, and through a window a draft model's rows see those of their own pass."""
    found = []
    for size in (29, 7):
        source, ids = windowed("draft-lm", tiny_target(tiny_config("llama")), WINDOW), PROMPTS[0]
        state = source.open(0, alone=True)
        for first in range(0, 29, size):
            before = ids[first - 1] if first else NO_TOKEN
            source.prefill([state], [PromptChunk(torch.tensor(ids[first : min(first + size, 29)]), before=before)])
        source.begin([state], [draft_request(ids, 20, 4)])
        found.append(source.expand([state], Frontier(torch.tensor(ids[-1:]), [0], [-1]), 3).log_probs)
    torch.testing.assert_close(found[0], found[1], atol=0, rtol=0)


def test_a_window_leaves_short_contexts_whole() -> None:
    """Guards against a view of rows that are not there, or of some twice."""
    kv = SlotKV(1, 1, 1, 64, 8, torch.float32, torch.float32, torch.device("cpu"))
    kv.lengths = [10]
    assert kv.windowed(0, None) is None
    assert kv.windowed(0, 6) is None
    kv.lengths = [11]
    view = kv.windowed(0, 6)
    assert view is not None
    assert view.tolist() == [[[0, 1, 2, 3, 5, 6, 7, 8, 9, 10]]]


def test_the_option_reaches_the_source_or_is_refused() -> None:
    """Guards against a window that changes nothing: for heads without slots, on a GPU, and inside the union."""
    target = tiny_target(tiny_config("llama"))
    options = ModelOptions(window=512)
    on_cpu, on_gpu = (BuildContext(VOCAB, torch.device(name), no_draft_model) for name in ("cpu", "cuda"))
    assert shaped(windowed("eagle3", target, None), options, on_cpu, 4).source.slots.window == 512  # type: ignore[attr-defined]
    with pytest.raises(InvalidRequest, match="window=512: does nothing with MedusaSource"):
        shaped(source_of("medusa", target), options, on_cpu, 4)
    with pytest.raises(InvalidRequest, match="window=512: drafters on cuda"):
        shaped(windowed("eagle3", target, None), options, on_gpu, 4)
    around = BuildContext(VOCAB, target.device, lambda: early_exit(target, 2))
    union: Any = build_proposer(parse_method("outpace:draft=linear,window=32"), around)
    assert union.base.source.window == 32
    for text in ("eagle3:window=0", "eagle3:window=wide", "outpace:draft=none,window=512"):
        with pytest.raises(InvalidRequest, match="window="):
            parse_method(text)
