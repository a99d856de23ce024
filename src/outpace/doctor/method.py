"""Whether a method pays on this machine: what it said, what was accepted, and where its rounds' time went."""

from outpace.doctor.finding import Finding, finding
from outpace.doctor.race import PHASES, PLAIN, Race, Totals

_NEAR_NOTHING = 0.05  # accepted drafts per round
_MUCH_DRAFTING = 0.25  # of a round
_MUCH_BESIDE = 0.4  # of a plain round
_SMALL_MS = 2.0  # a round so short is mostly fixed costs
_SHOWN = 8  # positions
_LOST = 0.97  # of plain decoding's speed: below what a few prompts' noise explains


def answers(race: Race, is_bitwise: bool) -> Finding:
    """Whether the tokens were plain decoding's."""
    measured = f"{race.prompts - race.different} of {race.prompts} equal plain decoding's"
    remedy = ""
    if race.different:
        meant = "report it, with what that prints" if is_bitwise else "ties are to be expected where rounding decides"
        remedy = f"run `outpace verify --method {race.method}` on these prompts, which tells ties from bugs; {meant}"
    return finding("answers", measured, remedy, prompts=race.prompts, different=race.different)


def acceptance(race: Race, has_drafter: bool) -> Finding:
    """How many tokens a round says, and how often the draft at each position was right."""
    drafted = race.drafted
    rates = [count / drafted.steps for count in drafted.by_depth] if drafted.steps else []
    said = " ".join(f"{rate:.2f}" for rate in rates[:_SHOWN]) or "none"
    measured = f"{drafted.tokens_per_step:.2f} tokens per step; accepted by position: {said}"
    remedy = ""
    if drafted.accepted < _NEAR_NOTHING * drafted.steps:
        nothing = "was drafted" if not drafted.drafted else "of what was drafted was accepted"
        better = (
            "see 'drafter'" if has_drafter else "use --method plain, or a drafter trained for this model (--drafter)"
        )
        remedy = f"{better}: next to nothing {nothing}"
    figures = {"tokens_per_step": drafted.tokens_per_step, "by_position": rates}
    return finding("acceptance", measured, remedy, **figures)


def drafting(race: Race, has_drafter: bool) -> Finding:
    """The share of a round that goes into drafting."""
    shares = _shares(race.drafted)
    measured = f"a round of {race.method} takes {race.drafted.round_ms:.1f} ms: {_said(shares)}"
    remedy = ""
    if shares["draft"] > _MUCH_DRAFTING:
        fewer = f"fewer levels or nodes (--budget, `outpace methods {race.method.partition(':')[0]}`)"
        other = "--method outpace:draft=none, which drafts without a model" if has_drafter else "--method plain"
        cheaper = f"{fewer}, or {other}"
        remedy = f"try {cheaper}: drafting takes more than {_MUCH_DRAFTING:.0%} of a round"
    return finding("drafting", measured, remedy, round_ms=race.drafted.round_ms, shares=shares)


def plain_round(plain: Totals) -> Finding:
    """The share of a plain round that is not the model's pass."""
    shares = _shares(plain)
    measured = f"a plain round takes {plain.round_ms:.1f} ms: {_said(shares)}"
    remedy = ""
    if 1 - shares["forward"] > _MUCH_BESIDE and plain.round_ms > _SMALL_MS:
        remedy = "decode several prompts together (generate takes a list), which share what is not the model's pass"
    return finding("plain round", measured, remedy, round_ms=plain.round_ms, shares=shares)


def gain(race: Race, has_drafter: bool) -> Finding:
    """The method's speed over plain decoding's, and the tokens per step at which it would be one."""
    plain, drafted = race.plain, race.drafted
    needed = drafted.round_ms / plain.ms_per_token if plain.ms_per_token else 0.0
    speedup = plain.ms_per_token / drafted.ms_per_token if drafted.ms_per_token else 1.0
    measured = (
        f"{speedup:.2f}x plain decoding's {plain.ms_per_token:.1f} ms per token; a round costs {needed:.2f} of plain "
        f"decoding's and says {drafted.tokens_per_step:.2f} tokens: it breaks even at {needed:.2f}"
    )
    remedy = ""
    if speedup < _LOST:
        cheaper = "--method outpace:draft=none" if has_drafter else "--method plain"
        remedy = f"use {cheaper}, or smaller trees, as --budget 7: a round costs more than its tokens are worth"
    return finding("gain", measured, remedy, speedup=speedup, break_even=needed)


def method_findings(race: Race, is_bitwise: bool, has_drafter: bool) -> list[Finding]:
    """All of a race; of plain decoding its round alone."""
    found = [plain_round(race.plain)]
    if race.method != PLAIN:
        found += [
            answers(race, is_bitwise),
            acceptance(race, has_drafter),
            drafting(race, has_drafter),
            gain(race, has_drafter),
        ]
    return found


def _shares(one: Totals) -> dict[str, float]:
    """Of the phases in a round, and what lies between rounds."""
    whole = max(one.decode_ms, 1e-9)
    shares = {name: one.phases_ms.get(name, 0.0) / whole for name in PHASES}
    return shares | {"between": max(0.0, 1 - sum(shares.values()))}


def _said(shares: dict[str, float]) -> str:
    return ", ".join(f"{name} {share:.0%}" for name, share in shares.items() if share >= 0.005)
