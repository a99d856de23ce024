"""Findings about a method: a benchmark against plain decoding on a few prompts, and its drafter."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from outpace.api import Model
from outpace.bench.records import PHASES, summed
from outpace.bench.report import summarise
from outpace.bench.runner import PLAIN, BenchPlan, BenchRun
from outpace.core.params import SamplingParams
from outpace.data.workload import WorkItem, read_workload
from outpace.doctor.finding import Finding, finding
from outpace.drafters.load import provenance_of
from outpace.drafters.method import LANGUAGE_MODEL
from outpace.methods.stores import computed_by
from outpace.models.families import positions_of

PROMPTS, TOKENS = "builtin:3", 48
_NEXT_TO_NOTHING = 0.05  # accepted drafts per round
_MUCH_DRAFTING = 0.25  # of a round
_MUCH_OVERHEAD = 0.4  # of a plain round
_SMALL_MS = 2.0  # a round so short is mostly fixed costs
_SHOWN = 8  # positions
_SLOWER = 0.97  # of plain decoding's speed: below the noise of a few prompts


@dataclass(frozen=True)
class Comparison:
    """A method compared with plain decoding.

    Attributes:
        different: prompts for which its tokens differ from plain decoding's.
        plain, drafted: figures of both from `bench.report.summarise`, and in addition `by_position`, the share of steps
            in which the draft at each depth was accepted, and `own_accepted`, accepted drafts per step that were not
            retrieved.
    """

    method: str
    prompts: int
    different: int
    plain: Mapping[str, Any]
    drafted: Mapping[str, Any]


def shares_of(row: Mapping[str, Any]) -> dict[str, float]:
    """Share of each phase in the rounds, and of the time between rounds."""
    shares = {name.removesuffix("_ms"): row[name] / max(row["round_ms"], 1e-9) for name in PHASES}
    return shares | {"between": max(0.0, 1 - sum(shares.values()))}


def _in_words(shares: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {share:.0%}" for name, share in shares.items() if share >= 0.005)


def _ms_per_token(row: Mapping[str, Any]) -> float:
    return float(row["round_ms"] / row["tokens_per_step"])


def examine_method(model: Model, prompts: str = PROMPTS, tokens: int = TOKENS) -> Iterator[Finding]:
    """Findings about the model's method on a few prompts."""
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
    """Decode prompts with a method and with plain decoding, interleaved. The model's prefix cache stays off afterwards,
    so that the second method to decode a prompt has no advantage. `items`: prompts, of which first turns are decoded,
    as raw text if the model has no chat template."""
    model.engine.shares_prefixes = False
    asked = tuple(_fitting(model, item, tokens) for item in items)
    params = SamplingParams(max_new_tokens=tokens)
    run = BenchRun(model, BenchPlan(tuple(dict.fromkeys((PLAIN, method))), asked, params, check=False))
    records = run.records()
    rows = summarise(records, copied=())
    for name, row in rows.items():
        own, steps = [record for record in records if record["method"] == name], max(row["rounds"], 1)
        retrieved = sum(record["accepted_retrieved"] for record in own)
        row |= {"by_position": [total / steps for total in summed(record["accepted_per_depth"] for record in own)]}
        row |= {"own_accepted": row["accepted_per_step"] - retrieved / steps}
    different = sum(not record["equal"] for record in records if record["method"] == method)
    return Comparison(method, len(asked), different, rows[PLAIN], rows[method])


def _fitting(model: Model, item: WorkItem, tokens: int) -> WorkItem:
    """The first turn of an item, its text cut from the left to fit the context."""
    is_raw = item.raw or not model.codec.tokenizer.chat_template
    item = replace(item, turns=item.turns[:1], raw=is_raw)
    room = max(1, model.target.max_length - tokens)
    while (excess := len(model.encode(item.prompt(0, []))) - room) > 0 and len(item.turns[0]) > 1:
        item = replace(item, turns=(item.turns[0][min(excess, len(item.turns[0]) - 1) :],))
    return item


def plain_round(plain: Mapping[str, Any]) -> Finding:
    """The share of a plain round that is not the model's pass."""
    shares, round_ms = shares_of(plain), plain["round_ms"]
    remedy = ""
    if 1 - shares["forward"] > _MUCH_OVERHEAD and round_ms > _SMALL_MS:
        remedy = "decode several prompts together (generate takes a list): they share what is not the model's pass"
    measured = f"a plain round takes {round_ms:.1f} ms: {_in_words(shares)}"
    return finding("plain round", measured, remedy, round_ms=round_ms, shares=shares)


def answers(run: Comparison, is_bitwise: bool) -> Finding:
    """Whether the tokens equal plain decoding's."""
    measured = f"{run.prompts - run.different} of {run.prompts} equal plain decoding's"
    remedy = ""
    if run.different:
        meant = "report it, with its output" if is_bitwise else "ties are to be expected where rounding decides"
        remedy = (
            f"run `outpace verify --method {run.method}` on these prompts, which distinguishes ties from bugs; {meant}"
        )
    return finding("answers", measured, remedy, prompts=run.prompts, different=run.different)


def acceptance(run: Comparison, has_drafter: bool) -> Finding:
    """Tokens per step, and how often the draft at each position was accepted."""
    drafted, remedy = run.drafted, ""
    rates, rate = drafted["by_position"], drafted["tokens_per_step"]
    shown = " ".join(f"{rate:.2f}" for rate in rates[:_SHOWN]) or "none"
    if drafted["accepted_per_step"] < _NEXT_TO_NOTHING and drafted["rounds"]:
        nothing = "of what was drafted was accepted" if drafted["drafted_per_step"] else "was drafted"
        other = "use --method plain, or a drafter trained for this model (--drafter)"
        remedy = ("see 'drafter'" if has_drafter else other) + f": next to nothing {nothing}"
    measured = f"{rate:.2f} tokens per step; accepted by position: {shown}"
    return finding("acceptance", measured, remedy, tokens_per_step=rate, by_position=rates)


def drafting(run: Comparison, has_drafter: bool) -> Finding:
    """The share of a round that goes into drafting."""
    shares, round_ms, remedy = shares_of(run.drafted), run.drafted["round_ms"], ""
    if shares["draft"] > _MUCH_DRAFTING:
        fewer = f"fewer levels or nodes (--budget, `outpace methods {run.method.partition(':')[0]}`)"
        other = "--method outpace:draft=none, which drafts without a model" if has_drafter else "--method plain"
        remedy = f"try {fewer}, or {other}: drafting takes more than {_MUCH_DRAFTING:.0%} of a round"
    measured = f"a round of {run.method} takes {round_ms:.1f} ms: {_in_words(shares)}"
    return finding("drafting", measured, remedy, round_ms=round_ms, shares=shares)


def gain(run: Comparison, has_drafter: bool) -> Finding:
    """The method's speed relative to plain decoding, and the tokens per step at which both are equally fast."""
    plain, own = _ms_per_token(run.plain), _ms_per_token(run.drafted)
    needed = run.drafted["round_ms"] / plain if plain else 0.0
    speedup = plain / own if own else 1.0
    measured = (
        f"{speedup:.2f}x plain decoding's {plain:.1f} ms per token; a round takes {needed:.2f} plain rounds and yields "
        f"{run.drafted['tokens_per_step']:.2f} tokens: it breaks even at {needed:.2f}"
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
        taps: hidden states of the target that it reads.
        positions: length of a request from which it drafts nothing; None if unknown.
        trained_for, trained_template: the target and the fingerprint of its chat template in training; None where
            unknown.
        template: fingerprint of the target's own chat template; None without one.
        table_bytes: bytes of Domino's table of gates; 0 without one.
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
    spec, drafters = model.drafters.with_draft(method), model.drafters
    kind = spec.drafter
    if kind is None:
        return None
    config: Any = (drafters.language_model() if kind == LANGUAGE_MODEL else drafters.net(kind)).config
    positions = positions_of(config) if kind == LANGUAGE_MODEL else getattr(config, "positions", None)
    run, table_bytes = provenance_of(drafters.folder(kind)).get("run", {}), 0
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


def drafter(found: DrafterFacts, drafted: Mapping[str, Any]) -> Finding:
    """Whether the drafter fits the model and its settings."""
    own = drafted["own_accepted"]
    for_what = f", trained for {found.trained_for}" if found.trained_for else ""
    taps = f", reads hidden states {', '.join(map(str, found.taps))}" if found.taps else ""
    table = f", {found.table_bytes / 1e9:.2f} GB of gates in a table" if found.table_bytes else ""
    parts = "".join(f", {part}: {by}" for part, by in found.computed_by.items())
    measured = f"{found.fingerprint}{for_what}{taps}{table}{parts}; {own:.2f} of its own drafts accepted per round"
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
            f"load with --max-model-len {found.positions}, or take a drafter with more positions: beyond "
            f"{found.positions} tokens it drafts nothing, and requests may have {found.model_length}"
        )
    if own < _NEXT_TO_NOTHING and drafted["rounds"]:
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
