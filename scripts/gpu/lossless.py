"""Compares methods with plain decoding in bfloat16: whether tokens are equal, or the margin of the first difference;
also in exact mode."""

from typing import Any

import torch

from outpace.core.params import SamplingParams
from outpace.core.protocols import Proposer
from outpace.drafters.build_context import BuildContext
from outpace.engine.engine import Engine
from outpace.engine.margin import decision_margin
from outpace.engine.session import Session
from outpace.methods.catalog import build_proposer, parse_method
from outpace.models.draft import early_exit
from outpace.models.exactness import probe
from outpace.models.target import PackedTarget
from outpace.testing import AdversaryDrafter, OracleDrafter, decode
from scripts.gpu.sizes import Sizes, random_target

METHODS = ("recycle", "linear", "dynatree:budget=60", "outpace:draft=none")


def check_lossless(sizes: Sizes, device: torch.device, new_tokens: int, small: bool) -> dict[str, Any]:
    """By mode, the exactness that the probe finds, and each method's comparison and milliseconds by phase."""
    model = random_target(sizes, device, torch.float32 if small else torch.bfloat16)
    found: dict[str, Any] = {}
    for mode in ("as usual", "exact"):
        exact = mode == "exact"
        target = PackedTarget(model, 1024 if not small else 96, 2, (), pack=False, tiled=True, exact=exact)
        names = METHODS[:1] if small else METHODS
        found[mode] = {"probe": str(probe(target)), "methods": _race(target, names, new_tokens)}
    return found


def _race(target: PackedTarget, names: tuple[str, ...], new_tokens: int) -> dict[str, Any]:
    engine = Engine(target)
    prompt = torch.randint(target.vocab_size, (20,), generator=torch.Generator().manual_seed(1)).tolist()
    around = BuildContext(target.vocab_size, target.device, lambda: early_exit(target, 1))
    plain = _decode(engine, prompt, build_proposer(parse_method("plain"), around), new_tokens)
    proposers: dict[str, Proposer] = {name: build_proposer(parse_method(name), around) for name in names}
    proposers["oracle"] = OracleDrafter([plain.ids], budget=8)
    proposers["adversary"] = AdversaryDrafter(target.vocab_size, [plain.ids], budget=12)
    found = {}
    for name, proposer in proposers.items():
        session = _decode(engine, prompt, proposer, new_tokens)
        found[name] = session.metrics.as_dict() | _compared(target, prompt, plain, session)
    return found


def _decode(engine: Engine, prompt: list[int], proposer: Proposer, new_tokens: int) -> Session:
    params = SamplingParams(max_new_tokens=new_tokens)
    decode(engine, [prompt], [SamplingParams(max_new_tokens=2)], [proposer])  # kernels are compiled
    proposer.reset()
    return decode(engine, [prompt], [params], [proposer])[0]


def _compared(target: PackedTarget, prompt: list[int], plain: Session, session: Session) -> dict[str, Any]:
    pairs = zip(plain.generated, session.generated)
    place = next((place for place, (left, right) in enumerate(pairs) if left != right), None)
    if place is None:
        return {"equal": len(plain.generated) == len(session.generated)}
    ids = [*prompt, *plain.generated[:place]]
    tokens = plain.generated[place], session.generated[place]
    margin = decision_margin(target, ids, SamplingParams(), tokens, len(prompt), slot=0)
    return {"equal": False, "first_divergence": place, "margin": margin.smallest}
