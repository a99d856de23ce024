"""Fit the union's initial weights, on prompts that are not used for results.

    python scripts/fit_acceptance.py PROMPTS.jsonl:100 OUT.json qwen2.5-coder-1.5b=lattice smollm2-135m=domino

Each model decodes the prompts, with its drafter and without, at temperature 0 and 1, at 1 also under rejection, with 15
nodes. The candidates below each accepted node are recorded with the token generated there. The weights maximise the
likelihood of a conditional logit, with a Gaussian prior.
"""

import argparse
import json
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch

import outpace
from outpace.core.params import SamplingParams
from outpace.data.workload import WorkItem, read_workload
from outpace.trees.union.acceptance import BIAS, SIZE, AcceptanceModel, Features, named_weights, priors
from outpace.trees.union.proposer import UnionProposer
from outpace.trees.union.reference import ReferenceGrower

Seen = tuple[Sequence[Features], int | None]
BUDGET = 15
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.0},
    "rejected": {"temperature": 1.0, "verification": "rejection"},
}
STIFFNESS = 1.0  # of the Gaussian prior: weights of features that never occur stay 0


class Recorded(AcceptanceModel):
    """An acceptance model that also records its observations."""

    def __init__(self, like: AcceptanceModel) -> None:
        self.__dict__ |= like.copy().__dict__
        self.seen: list[Seen] = []

    def learn(self, verified: Sequence[Seen]) -> None:
        self.seen += verified
        super().learn(verified)

    def copy(self) -> "Recorded":
        return self  # requests under rejection learn in a copy, and must be recorded too


def fitted(seen: Sequence[Seen]) -> tuple[list[float], float]:
    """The fitted weights [SIZE], and their mean log-loss per node."""
    width = max(len(named) for named, _ in seen)
    features = torch.full((len(seen), width, 6), SIZE)  # SIZE: no such token
    for row, (named, _) in enumerate(seen):
        features[row, : len(named), 0] = BIAS
        features[row, : len(named), 1:] = torch.tensor(named)
    said = torch.tensor([width if place is None else place for _, place in seen])  # [N]
    weights = torch.zeros(SIZE, requires_grad=True)
    nothing = torch.zeros(1)
    optimizer = torch.optim.LBFGS([weights], max_iter=200, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        scores = torch.cat([weights, nothing])[features].sum(-1)  # [N, W]
        scores = scores.masked_fill(features[..., 0] == SIZE, -torch.inf)
        odds = torch.cat([scores, scores.new_zeros(len(scores), 1)], dim=1)
        return torch.nn.functional.cross_entropy(odds, said, reduction="sum")

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        total = loss() + 0.5 * STIFFNESS * weights.square().sum()
        total.backward()  # type: ignore[no-untyped-call]
        return total

    optimizer.step(closure)  # type: ignore[no-untyped-call]
    return [round(weight, 3) for weight in weights.tolist()], float(loss().detach()) / len(seen)


def seen_of(name: str, kind: str, items: Sequence[WorkItem], most: int) -> tuple[dict[str, list[Seen]], str | None]:
    """Observations from a model's rounds, by kind of request, and the fingerprint of its drafter."""
    model, seen = outpace.load(name, max_num_seqs=1), {request: list[Seen]() for request in KINDS}
    for method in (f"outpace:draft={kind}", "outpace:draft=none"):
        union = model.proposer(method)
        assert isinstance(union, UnionProposer), f"{method} is no union"
        models = {request: Recorded(AcceptanceModel(priors()[request])) for request in KINDS}
        union.greedy, union.sampled, union.rejected = models.values()
        union.grower = ReferenceGrower()
        for number, item in enumerate(items):
            for options in KINDS.values():
                params = SamplingParams(most, seed=number, **options)
                model.generate(item.prompt(0, []), params, method=method, budget=BUDGET)
        for request, one in models.items():
            seen[request] += one.seen
    return seen, model.drafters.fingerprint(kind)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts")
    parser.add_argument("out", type=Path)
    parser.add_argument("models", nargs="+", help="MODEL=KIND, the kind of its drafter")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    args = parser.parse_args()
    items = read_workload(args.prompts)
    seen: dict[str, list[Seen]] = {kind: [] for kind in KINDS}
    drafters = {}
    for name, _, kind in (one.rpartition("=") for one in args.models):
        found, drafters[f"{Path(name).name} {kind}"] = seen_of(name, kind, items, args.max_new_tokens)
        for request, rounds in found.items():
            seen[request] += rounds
    weights, about = {}, {}
    for kind, what in seen.items():
        values, loss = fitted(what)
        weights[kind] = named_weights(values)
        about[kind] = {"nodes": len(what), "log_loss": round(loss, 4)}
    provenance = {
        "drafters": drafters,
        "prompts": [item.id for item in items],
        "max_new_tokens": args.max_new_tokens,
        "made_by": "scripts/fit_acceptance.py",
        "date": date.today().isoformat(),
        "fit": about,
    }
    args.out.write_text(json.dumps({"weights": weights, "provenance": provenance}, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(about))


if __name__ == "__main__":
    main()
