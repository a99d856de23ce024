"""Findings about a method: a benchmark against plain decoding on a few prompts, and its drafter."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from outpace.api import Model
from outpace.bench.records import PHASES
from outpace.bench.runner import PLAIN, BenchPlan, BenchRun, Record
from outpace.core.params import SamplingParams
from outpace.data.workload import WorkItem, read_workload
from outpace.doctor.finding import Finding, finding
from outpace.drafters.method import LANGUAGE_MODEL
from outpace.methods.catalog import parse_method
from outpace.methods.stores import computed_by

PROMPTS, TOKENS = "builtin:3", 48
PROVENANCE = "provenance.json"
"""What `outpace train` writes into a drafter's folder."""
_NEXT_TO_NOTHING = 0.05  # accepted drafts per round
_MUCH_DRAFTING = 0.25  # of a round
_MUCH_OVERHEAD = 0.4  # of a plain round
_SMALL_MS = 2.0  # a round so short is mostly fixed costs
_SHOWN = 8  # positions
_SLOWER = 0.97  # of plain decoding's speed: below the noise of a few prompts


@dataclass(frozen=True)
class Totals:
    """Counts and milliseconds of a method's records.

    Attributes:
        decoded: tokens after each answer's first.
        steps, drafted, accepted, accepted_retrieved: as in `RequestMetrics`.
        decode_ms: from first tokens to last ones.
        by_depth: steps whose draft at depth d + 1 was accepted.
        phases_ms: by phase of a round.
    """

    decoded: float
    steps: int
    drafted: int
    accepted: int
    accepted_retrieved: int
    decode_ms: float
    by_depth: tuple[int, ...] = ()
    phases_ms: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, records: Sequence[Record]) -> "Totals":
        """The sums over records."""

        def total(name: str) -> Any:
            return sum(record[name] for record in records)

        depths = [record["accepted_per_depth"] for record in records]
        deepest = max(map(len, depths), default=0)
        return cls(
            decoded=sum(record["group"]["decoded"] for record in records),
            **{name: total(name) for name in ("steps", "drafted", "accepted", "accepted_retrieved", "decode_ms")},
            by_depth=tuple(sum(one[d] for one in depths if d < len(one)) for d in range(deepest)),
            phases_ms={name.removesuffix("_ms"): total(name) for name in PHASES},
        )

    @property
    def tokens_per_step(self) -> float:
        return self.decoded / self.steps if self.steps else 1.0

    @property
    def ms_per_token(self) -> float:
        return self.decode_ms / self.decoded if self.decoded else 0.0

    @property
    def round_ms(self) -> float:
        return self.decode_ms / self.steps if self.steps else 0.0

    @property
    def shares(self) -> dict[str, float]:
        """Share of each phase in the rounds, and of the time between rounds."""
        whole = max(self.decode_ms, 1e-9)
        shares = {name: ms / whole for name, ms in self.phases_ms.items()}
        return shares | {"between": max(0.0, 1 - sum(shares.values()))}

    @property
    def shares_in_words(self) -> str:
        return ", ".join(f"{name} {share:.0%}" for name, share in self.shares.items() if share >= 0.005)


@dataclass(frozen=True)
class Comparison:
    """A method compared with plain decoding.

    Attributes:
        method: the method's name.
        prompts: how many.
        different: prompts for which its tokens differ from plain decoding's.
        plain, drafted: the totals of both.
    """

    method: str
    prompts: int
    different: int
    plain: Totals
    drafted: Totals


def examine_method(model: Model, prompts: str = PROMPTS, tokens: int = TOKENS) -> Iterator[Finding]:
    """Findings about the model's method on a few prompts.

    Args:
        model: with the method.
        prompts: as `outpace bench` names a workload.
        tokens: of an answer at most.
    """
    method = model.method_name
    run = compare(model, method, read_workload(prompts), tokens)
    found = drafter_of(model, method)
    yield finding("method", f"{method}, {model.method_from}", method=method, method_from=model.method_from)
    yield plain_round(run.plain)
    if method != PLAIN:
        has_drafter = found is not None
        yield answers(run, model.exactness.is_bitwise)
        yield acceptance(run, has_drafter)
        yield drafting(run, has_drafter)
        yield gain(run, has_drafter)
    if found is not None:
        yield drafter(found, run.drafted)


def compare(model: Model, method: str, items: Sequence[WorkItem], tokens: int) -> Comparison:
    """Decode prompts with a method and with plain decoding, interleaved. From then on the model's engine shares no
    common beginnings of prompts, so that the second to decode a prompt gains nothing.

    Args:
        model: the model.
        method: "plain" for plain decoding's figures alone.
        items: prompts, of which the first turns are asked, as text where the model has no chat template.
        tokens: of an answer at most.
    """
    model.engine.shares_prefixes = False
    asked = tuple(_fitting(model, item, tokens) for item in items)
    params = SamplingParams(max_new_tokens=tokens)
    run = BenchRun(model, BenchPlan(tuple(dict.fromkeys((PLAIN, method))), asked, params, check=False))
    records = run.records()
    own = {name: [record for record in records if record["method"] == name] for name in (PLAIN, method)}
    different = sum(not record["equal"] for record in own[method])
    return Comparison(method, len(asked), different, Totals.of(own[PLAIN]), Totals.of(own[method]))


def _fitting(model: Model, item: WorkItem, tokens: int) -> WorkItem:
    """The first turn of an item, of its text only as much of the end as the model has room for."""
    is_raw = item.raw or not model.codec.tokenizer.chat_template
    item = replace(item, turns=item.turns[:1], raw=is_raw)
    room = max(1, model.target.max_length - tokens)
    while (excess := len(model.encode(item.prompt(0, []))) - room) > 0 and len(item.turns[0]) > 1:
        item = replace(item, turns=(item.turns[0][min(excess, len(item.turns[0]) - 1) :],))
    return item


def plain_round(plain: Totals) -> Finding:
    """The share of a plain round that is not the model's pass."""
    measured = f"a plain round takes {plain.round_ms:.1f} ms: {plain.shares_in_words}"
    remedy = ""
    if 1 - plain.shares["forward"] > _MUCH_OVERHEAD and plain.round_ms > _SMALL_MS:
        remedy = "decode several prompts together (generate takes a list): they share what is not the model's pass"
    return finding("plain round", measured, remedy, round_ms=plain.round_ms, shares=plain.shares)


def answers(run: Comparison, is_bitwise: bool) -> Finding:
    """Whether the tokens equal plain decoding's."""
    measured = f"{run.prompts - run.different} of {run.prompts} equal plain decoding's"
    remedy = ""
    if run.different:
        meant = "report it, with its output" if is_bitwise else "ties are to be expected where rounding decides"
        remedy = f"run `outpace verify --method {run.method}` on these prompts, which tells ties from bugs; {meant}"
    return finding("answers", measured, remedy, prompts=run.prompts, different=run.different)


def acceptance(run: Comparison, has_drafter: bool) -> Finding:
    """Tokens per step, and how often the draft at each position was accepted."""
    drafted = run.drafted
    rates = [count / drafted.steps for count in drafted.by_depth] if drafted.steps else []
    shown = " ".join(f"{rate:.2f}" for rate in rates[:_SHOWN]) or "none"
    measured = f"{drafted.tokens_per_step:.2f} tokens per step; accepted by position: {shown}"
    remedy = ""
    if drafted.accepted < _NEXT_TO_NOTHING * drafted.steps:
        nothing = "was drafted" if not drafted.drafted else "of what was drafted was accepted"
        other = "use --method plain, or a drafter trained for this model (--drafter)"
        remedy = ("see 'drafter'" if has_drafter else other) + f": next to nothing {nothing}"
    return finding("acceptance", measured, remedy, tokens_per_step=drafted.tokens_per_step, by_position=rates)


def drafting(run: Comparison, has_drafter: bool) -> Finding:
    """The share of a round that goes into drafting."""
    drafted = run.drafted
    measured = f"a round of {run.method} takes {drafted.round_ms:.1f} ms: {drafted.shares_in_words}"
    remedy = ""
    if drafted.shares["draft"] > _MUCH_DRAFTING:
        fewer = f"fewer levels or nodes (--budget, `outpace methods {run.method.partition(':')[0]}`)"
        other = "--method outpace:draft=none, which drafts without a model" if has_drafter else "--method plain"
        remedy = f"try {fewer}, or {other}: drafting takes more than {_MUCH_DRAFTING:.0%} of a round"
    return finding("drafting", measured, remedy, round_ms=drafted.round_ms, shares=drafted.shares)


def gain(run: Comparison, has_drafter: bool) -> Finding:
    """The method's speed relative to plain decoding, and the tokens per step at which both are equally fast."""
    plain, drafted = run.plain, run.drafted
    needed = drafted.round_ms / plain.ms_per_token if plain.ms_per_token else 0.0
    speedup = plain.ms_per_token / drafted.ms_per_token if drafted.ms_per_token else 1.0
    measured = (
        f"{speedup:.2f}x plain decoding's {plain.ms_per_token:.1f} ms per token; a round takes {needed:.2f} plain "
        f"rounds and yields {drafted.tokens_per_step:.2f} tokens: it breaks even at {needed:.2f}"
    )
    remedy = ""
    if speedup < _SLOWER:
        cheaper = "--method outpace:draft=none" if has_drafter else "--method plain"
        remedy = f"use {cheaper}, or smaller trees, as --budget 7: a round costs more than its tokens gain"
    return finding("gain", measured, remedy, speedup=speedup, break_even=needed)


@dataclass(frozen=True)
class DrafterFacts:
    """A drafter and the model it drafts for.

    Attributes:
        fingerprint: identifies the drafter.
        taps: hidden states of the target that it reads.
        positions: tokens that it was trained for; None where unknown.
        model, model_length: the target's name, and tokens of a request.
        trained_for, trained_template: the target and the fingerprint of its chat template in training; None where
            unknown.
        template: fingerprint of the target's own chat template; None without one.
        table_bytes: of Domino's table of gates; 0 without one.
        computed_by: which parts compiled kernels compute.
    """

    fingerprint: str
    taps: tuple[int, ...]
    positions: int | None
    model: str
    model_length: int
    trained_for: str | None
    trained_template: str | None
    template: str | None
    table_bytes: int = 0
    computed_by: Mapping[str, str] = field(default_factory=dict)


def drafter_of(model: Model, method: str) -> DrafterFacts | None:
    """Facts about a method's drafter; None for a method without one."""
    spec, drafters = parse_method(method), model.drafters
    kind = spec.drafter
    if kind is None:
        return None
    config: Any = (drafters.language_model() if kind == LANGUAGE_MODEL else drafters.net(kind)).config
    positions = getattr(config, "max_position_embeddings" if kind == LANGUAGE_MODEL else "max_positions", None)
    run, table_bytes = _trained(drafters.folder(kind)), 0
    if getattr(spec.options, "gate_table", False):  # three gates for each id and unit of the causal state
        table_bytes = model.target.vocab_size * 3 * config.gru_hidden_dim * model.target.dtype.itemsize
    return DrafterFacts(
        fingerprint=drafters.fingerprint(kind),
        taps=model.proposer(method).needs.taps,
        positions=positions,
        model=model.name,
        model_length=model.target.max_length,
        trained_for=run.get("target"),
        trained_template=run.get("chat_template"),
        template=model.codec.template_fingerprint() if model.codec.tokenizer.chat_template else None,
        table_bytes=table_bytes,
        computed_by=computed_by(model.proposer(method)),
    )


def drafter(found: DrafterFacts, drafted: Totals) -> Finding:
    """Whether the drafter fits the model and its settings.

    Args:
        found: the drafter.
        drafted: totals of the method.
    """
    own = (drafted.accepted - drafted.accepted_retrieved) / max(drafted.steps, 1)
    for_what = f", trained for {found.trained_for}" if found.trained_for else ""
    taps = f", reads hidden states {', '.join(map(str, found.taps))}" if found.taps else ""
    table = f", {found.table_bytes / 1e9:.2f} GB of gates in a table" if found.table_bytes else ""
    path = "".join(f", {part}: {path}" for part, path in found.computed_by.items())
    measured = f"{found.fingerprint}{for_what}{taps}{table}{path}; {own:.2f} of its own drafts accepted per round"
    reasons = []
    if found.template is None:
        reasons.append(
            "give the model's tokenizer a chat template, or use --method outpace:draft=none: without one prompts are "
            "plain text, and drafters are trained on answers"
        )
    elif found.trained_template not in (None, found.template):
        reasons.append("use the chat template that the drafter was trained with: the model has another one")
    if found.positions is not None and found.positions < found.model_length:
        reasons.append(
            f"load with --max-model-len {found.positions}, or expect poor drafts after that: the drafter was trained "
            f"for {found.positions} tokens, and requests may have {found.model_length}"
        )
    if own < _NEXT_TO_NOTHING and drafted.steps:
        other = found.trained_for not in (None, found.model)
        trained = f" (it was trained for {found.trained_for})" if other else ""
        reasons.append(
            f"name a drafter that was trained for this model{trained}, or make one with `outpace train`: next to none "
            "of its drafts are accepted"
        )
    figures: dict[str, Any] = {"fingerprint": found.fingerprint, "taps": found.taps, "accepted_per_round": own}
    figures |= {"computed_by": dict(found.computed_by)}
    figures |= {"table_bytes": found.table_bytes} if found.table_bytes else {}
    return finding("drafter", measured, "; ".join(reasons), **figures)


def _trained(folder: Path | None) -> dict[str, Any]:
    """The training run of a drafter by its provenance; empty where there is none that can be read."""
    try:
        run = json.loads((folder / PROVENANCE).read_text(encoding="utf-8"))["run"] if folder else {}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}
    return run if isinstance(run, dict) else {}
