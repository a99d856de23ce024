"""The losslessness certificate: per prompt equal, tie or bug, with the evidence."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from math import isfinite
from typing import Any

from outpace.api import Model, load
from outpace.core.events import Generation
from outpace.core.params import SamplingParams
from outpace.data.workload import WorkItem
from outpace.lib.errors import InvalidRequest
from outpace.methods.catalog import parse_method

# The largest difference of deciding scores that rounding explains, in logits (nats when sampling). In bfloat16 the
# widest margin of a flip that float32 did not repeat was 0.257, over 23 flips.
ROUNDING_BOUND = {"bfloat16": 0.5, "float16": 0.1, "float32": 1e-3, "float64": 1e-9}
HIGHER_PRECISION = {"bfloat16": "float32", "float16": "float32", "float32": "float64"}


@dataclass(frozen=True)
class Classification:
    """What one comparison showed.

    Attributes:
        kind: "equal", "tie" or "bug".
        turn, token: where the outputs first differ; None when equal.
        margin: the smallest rounding error that could have changed the decision there; None where none could.
        top2: difference of the best two scores there; None where one token was left to choose.
        to_cutoff: distance to a sampling cut-off there, None without one.
        higher_precision_equal: whether the two runs agree when repeated in the next higher precision.
    """

    kind: str
    turn: int | None = None
    token: int | None = None
    margin: float | None = None
    top2: float | None = None
    to_cutoff: float | None = None
    higher_precision_equal: bool | None = None
    note: str = ""


Runner = Callable[[Model, list[int], SamplingParams], tuple[int, ...]]
"""Decodes one prompt with the examined method; returns the generated ids."""


class Certifier:
    """Classifies differences between a method's output and plain decoding's.

    A difference is a *tie* when rounding explains it twice over: the two tokens' scores lie within the dtype's
    rounding bound of each other or of a sampling cut-off, and the same two runs agree in the next higher precision.
    Everything else is a *bug*.

    Args:
        model: the model under test. Its prefix cache stays off from here on (`Engine.shares_prefixes`), so that neither
            times nor bits depend on methods measured before.
        reload: makes the same model in another dtype; by default loads it again by name, once, when first needed.
    """

    def __init__(self, model: Model, reload: Callable[[str], Model] | None = None) -> None:
        self._model = model
        model.engine.shares_prefixes = False
        self._dtype = str(model.target.dtype).removeprefix("torch.")
        is_coarse = model.target.kv_cache_dtype in ("bfloat16", "int8")  # rounds no finer than bfloat16
        self._bound = ROUNDING_BOUND["bfloat16" if is_coarse else self._dtype]
        self._reload = reload  # not a bound method: that reference cycle would keep the model alive
        self._precise: Model | None = None

    def classify(
        self,
        prompt: list[int],
        params: SamplingParams,
        plain: Sequence[int],
        other: Sequence[int],
        run: Runner,
        turn: int = 0,
    ) -> Classification:
        """Compare a method's ids with plain decoding's. `params`: sampling parameters, with a seed if they sample."""
        if tuple(plain) == tuple(other):
            return Classification("equal")
        pairs = enumerate(zip(plain, other))
        token = next((index for index, (left, right) in pairs if left != right), min(len(plain), len(other)))
        if token == min(len(plain), len(other)):
            return Classification("bug", turn, token, note="one output is a prefix of the other: they stop differently")
        ids = [*prompt, *plain[:token]]
        margin = self._model.margin(ids, params, (plain[token], other[token]), len(prompt))
        precise_equal = self._agree_in_higher_precision(prompt, params, run)
        is_tie = margin.smallest <= self._bound and precise_equal
        rounding = "rounding, which the probe had not found" if self._model.exactness.is_bitwise else "rounding"
        note = rounding if is_tie else f"margin {margin.smallest:.3g} against a bound of {self._bound}"
        if not precise_equal:
            note += "; the two runs differ in higher precision too"
        distances = _finite(margin.smallest), _finite(margin.top2), _finite(margin.to_cutoff)
        return Classification("tie" if is_tie else "bug", turn, token, *distances, precise_equal, note)

    def _agree_in_higher_precision(self, prompt: list[int], params: SamplingParams, run: Runner) -> bool:
        if self._dtype not in HIGHER_PRECISION:
            return False
        if self._precise is None:
            self._precise = (self._reload or self._load)(HIGHER_PRECISION[self._dtype])
        plain = self._precise.generate(prompt, params, method="plain").token_ids
        return bool(tuple(run(self._precise, prompt, params)) == plain)

    def _load(self, dtype: str) -> Model:
        model, target = self._model, self._model.target
        quantize = "none" if dtype == "float64" else target.quantize  # fewer bits have no kernels in float64
        kept = {"quantize": quantize, "max_model_len": target.max_length, "exact": target.wants_exact}
        device, drafter = str(target.device), model.drafter
        # Without bars and a line of its own: the bar of the benchmark is drawn meanwhile.
        options: dict[str, Any] = {**kept, "max_num_seqs": 1, "enable_prefix_caching": False, "progress": False}
        return load(model.name, "plain", drafter=drafter, dtype=dtype, device=device, **options)


def _finite(distance: float | None) -> float | None:
    """A distance; None for an infinite one, which JSON does not know."""
    return distance if distance is not None and isfinite(distance) else None


def method_runner(method: str, budget: int | None) -> Runner:
    """A runner for one of the engine's methods."""

    def run(model: Model, prompt: list[int], params: SamplingParams) -> tuple[int, ...]:
        ids: tuple[int, ...] = model.generate(prompt, params, method=method, budget=budget).token_ids
        return ids

    return run


def turn_ids(model: Model, item: WorkItem, turn: int = 0, answers: Sequence[str] = ()) -> list[int]:
    """Ids of a turn's prompt, given the answers to earlier turns.

    Raises:
        InvalidRequest: they leave no space for an answer; the error names the prompt.
    """
    ids, most = model.encode(item.prompt(turn, list(answers))), model.target.max_length
    if len(ids) >= most:
        raise InvalidRequest(
            f"prompt {item.id!r}, turn {turn + 1}: has {len(ids)} tokens, and prompt and answer have {most} together: "
            "leave it out, or turns of it (max_turns), or load with a larger max_model_len, or kv_cache_memory_bytes "
            "where memory sets the limit"
        )
    return ids


def check_fit(model: Model, items: Sequence[WorkItem]) -> None:
    """Refuse prompts whose first turn does not fit, before any prompt is decoded."""
    for item in items:
        turn_ids(model, item)


def certify(
    model: Model,
    methods: Sequence[str],
    items: Sequence[WorkItem],
    params: SamplingParams,
    *,
    budget: int | None = None,
    batch_sizes: Sequence[int] = (1,),
    on_item: Callable[[], None] = lambda: None,
) -> list[dict[str, Any]]:
    """Compare methods with plain decoding on every turn of every prompt.

    Args:
        items: prompts; the answers of plain decoding are the history of later turns.
        params: sampling parameters, with a seed if they sample.
        budget: drafted nodes per round for methods that do not name their own.
        batch_sizes: how many prompts share the engine in a method's run; plain decoding always runs alone.

    Returns:
        One case per prompt, method and batch size: names, generated tokens and the finding of its first difference.

    Raises:
        InvalidRequest: a prompt that does not fit the context; if it is a first turn, before any is decoded.
    """
    check_fit(model, items)
    certifier = Certifier(model)
    cases = []
    for group in _split(items, max(batch_sizes)):
        turns = _plain_turns(model, group, params)
        for method in methods:
            own = budget if parse_method(method).takes_budget else None
            run = method_runner(method, own)
            for batch_size in batch_sizes:
                findings = dict.fromkeys(range(len(group)), Classification("equal"))
                for turn, present in enumerate(turns):
                    for part in _split(present, batch_size):
                        prompts = [prompt for _, prompt, _ in part]
                        answers = model.generate(prompts, params, method=method, budget=own)
                        for (index, prompt, want), got in zip(part, answers, strict=True):
                            if findings[index].kind == "equal":
                                ids = want.token_ids, got.token_ids
                                findings[index] = certifier.classify(prompt, params, *ids, run, turn)
                for index, item in enumerate(group):
                    case = {"id": item.id, "dataset": item.dataset, "method": method, "batch_size": batch_size}
                    tokens = sum(len(want.token_ids) for present in turns for i, _, want in present if i == index)
                    case |= {"temperature": params.temperature, "new_tokens": tokens}
                    cases.append(case | asdict(findings[index]))
        for _ in group:
            on_item()
    return cases


PlainTurn = list[tuple[int, list[int], Generation]]
"""For each prompt of a group that has the turn: its index in the group, its ids, and plain decoding's answer."""


def _plain_turns(model: Model, group: Sequence[WorkItem], params: SamplingParams) -> list[PlainTurn]:
    answers: list[list[str]] = [[] for _ in group]
    turns: list[PlainTurn] = []
    for turn in range(max(len(item.turns) for item in group)):
        present: PlainTurn = []
        for index, item in enumerate(group):
            if turn < len(item.turns):
                prompt = turn_ids(model, item, turn, answers[index])
                plain = model.generate(prompt, params, method="plain")
                answers[index].append(plain.text)
                present.append((index, prompt, plain))
        turns.append(present)
    return turns


def _split(items: Sequence[Any], size: int) -> list[Sequence[Any]]:
    return [items[start : start + size] for start in range(0, len(items), size)]


def count_kinds(cases: Sequence[dict[str, Any]]) -> dict[str, int]:
    """How many cases are equal, ties and bugs."""
    names = {"equal": "equal", "ties": "tie", "bugs": "bug"}
    return {name: sum(case["kind"] == kind for case in cases) for name, kind in names.items()}
