"""What tiny models do under the instruction sets that the environment allows: a process of `test_instruction_sets`.

Prints a line of JSON per model: what was probed, and how many answers from drafts were those of plain decoding.
"""

import json
from typing import Any

import torch

from outpace.core.params import SamplingParams
from outpace.engine.engine import Engine
from outpace.models.exactness import probe
from outpace.testing import AdversaryDrafter, decode
from outpace.trees.proposer import EmptyDraft
from tests.unit.models.company import assert_said_as_probed
from tests.unit.models.tiny import VOCAB, random_ids, tiny_config, tiny_target

FAMILIES = ("llama", "gemma2", "gpt2", "qwen3_moe")
PROMPTS = [random_ids(length, seed=length) for length in (3, 40, 17)]
PARAMS = [SamplingParams(max_new_tokens=24, temperature=temperature, seed=2) for temperature in (0.0, 0.9)]


def report(family: str, dtype: torch.dtype) -> dict[str, Any]:
    """Decode greedily and by sampling, alone without drafts and together with drafts that are right now and then."""
    target = tiny_target(tiny_config(family, hidden_size=96, head_dim=16), dtype)
    exactness, equal = probe(target), 0
    for params in PARAMS:
        plain = [decode(Engine(target), [prompt], [params], [EmptyDraft()])[0] for prompt in PROMPTS]
        drafter = AdversaryDrafter(VOCAB, [session.ids for session in plain], budget=9)
        drafted = decode(Engine(target), PROMPTS, [params] * len(PROMPTS), [drafter] * len(PROMPTS))
        assert sum(session.metrics.accepted for session in drafted) > 10, "nothing was committed from a tree"
        for one, other in zip(plain, drafted, strict=True):
            equal += assert_said_as_probed(target, exactness, one, other, params)
    names = {name: str(kind).removeprefix("torch.") for name, kind in (("asked", dtype), ("computed", target.dtype))}
    return {"family": family, **names, "kind": exactness.kind, "reason": exactness.reason, "equal": equal}


if __name__ == "__main__":
    for family in FAMILIES:
        for dtype in (torch.float32, torch.bfloat16):
            print(json.dumps(report(family, dtype)), flush=True)
