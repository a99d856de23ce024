"""Whether a drafter fits the model it drafts for: its own facts against the model's, and what was accepted."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outpace.api import Model
from outpace.doctor.finding import Finding, finding
from outpace.doctor.race import Totals
from outpace.drafters.method import LANGUAGE_MODEL
from outpace.methods.catalog import parse_method

PROVENANCE = "provenance.json"
"""What `outpace train` writes beside a drafter."""
_NEAR_NOTHING = 0.05  # accepted drafts of its own per round


@dataclass(frozen=True)
class Drafter:
    """A drafter and the model it drafts for.

    Attributes:
        fingerprint: which drafter it is.
        taps: hidden states of the target that it reads.
        positions: tokens that it was made for; None where that is not said.
        model, model_length: the target's name, and tokens of a request.
        trained_for, trained_template: the target and the fingerprint of its chat template that it was trained with;
            None where that is not said.
        template: of the target's own chat template; None without one.
        table_bytes: of Domino's table of gates; 0 without one.
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


def drafter_of(model: Model, method: str) -> Drafter | None:
    """What a method drafts with; None for one that needs nothing, or drafts with the target's own layers."""
    kind = parse_method(method).drafter
    if kind is None:
        return None
    folder, drafters, config = model.drafters.folder(kind), model.drafters, None
    if kind == LANGUAGE_MODEL:
        positions = drafters.language_model().config.max_position_embeddings
    else:
        config = drafters.net(kind).config
        positions = getattr(config, "max_positions", None)
    run = _trained(folder)
    return Drafter(
        fingerprint=drafters.fingerprint(kind),
        taps=model.proposer(method).needs.taps,
        positions=positions,
        model=model.name,
        model_length=model.target.max_length,
        trained_for=run.get("target"),
        trained_template=run.get("chat_template"),
        template=model.codec.template_fingerprint() if model.codec.tokenizer.chat_template else None,
        table_bytes=_table_bytes(config, model) if getattr(parse_method(method).options, "gate_table", False) else 0,
    )


def _table_bytes(config: Any, model: Model) -> int:
    """What `rollout.gate_table` takes: three gates per id and unit of the causal state."""
    return int(model.target.vocab_size * 3 * config.gru_hidden_dim * model.target.dtype.itemsize)


def drafter(found: Drafter, drafted: Totals) -> Finding:
    """Whether the drafter is used as it was made to be.

    Args:
        found: the drafter.
        drafted: of the runs with it.
    """
    own = (drafted.accepted - drafted.accepted_retrieved) / max(drafted.steps, 1)
    for_what = f", trained for {found.trained_for}" if found.trained_for else ""
    taps = f", reads hidden states {', '.join(map(str, found.taps))}" if found.taps else ""
    table = f", {found.table_bytes / 1e9:.2f} GB of gates in a table" if found.table_bytes else ""
    measured = f"{found.fingerprint}{for_what}{taps}{table}; {own:.2f} of its own drafts accepted per round"
    reasons = _reasons(found)
    if own < _NEAR_NOTHING and drafted.steps:
        other = found.trained_for not in (None, found.model)
        trained = f" (it was trained for {found.trained_for})" if other else ""
        reasons.append(
            f"name a drafter that was trained for this model{trained}, or make one with `outpace train`: drafts of "
            "this one are next to never right"
        )
    figures: dict[str, Any] = {"fingerprint": found.fingerprint, "taps": found.taps, "accepted_per_round": own}
    figures |= {"table_bytes": found.table_bytes} if found.table_bytes else {}
    return finding("drafter", measured, "; ".join(reasons), **figures)


def _reasons(found: Drafter) -> list[str]:
    """What does not fit, each as a remedy."""
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
            f"load with --max-model-len {found.positions}, or expect poor drafts behind them: the drafter was made for "
            f"{found.positions} tokens, and requests may have {found.model_length}"
        )
    return reasons


def _trained(folder: Path | None) -> dict[str, Any]:
    """What a drafter's provenance says of its training; nothing where there is none that can be read."""
    try:
        run = json.loads((folder / PROVENANCE).read_text(encoding="utf-8"))["run"] if folder else {}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}
    return run if isinstance(run, dict) else {}
