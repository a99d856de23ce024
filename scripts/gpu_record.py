"""Race methods on a GPU over a random model of a real size and print one JSON record.

No weights are needed: a random 1B-parameter Llama costs the same per pass as a trained one. Its text is noise, so the
figures that mean something are the milliseconds by phase and the equality, not the acceptance; an oracle drafter shows
the speed at full acceptance.
"""

import json
import sys
from datetime import UTC, datetime

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from outpace.bench.environment import environment
from outpace.core.params import SamplingParams
from outpace.core.protocols import Proposer
from outpace.engine.engine import Engine
from outpace.engine.session import Session
from outpace.methods.build_context import BuildContext
from outpace.methods.catalog import build_proposer, parse_method
from outpace.models.attention import ATTENTION_NAME
from outpace.models.draft import early_exit
from outpace.models.target import TransformersTarget
from outpace.testing import OracleDrafter, decode

NEW_TOKENS = 128


def main() -> None:
    """Print the record."""
    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME, dtype=torch.bfloat16)
    target = TransformersTarget(model.to("cuda").eval(), max_length=1024, max_slots=4, eos_token_ids=())
    engine = Engine(target)
    prompt = torch.randint(0, config.vocab_size, (200,)).tolist()
    context = BuildContext(target.vocab_size, target.device, lambda: early_exit(target))
    plain = _decode(engine, prompt, build_proposer(parse_method("plain"), context))
    proposers = {
        "plain": build_proposer(parse_method("plain"), context),
        "recycle": build_proposer(parse_method("recycle"), context),
        "linear": build_proposer(parse_method("linear"), context),
        "dynatree": build_proposer(parse_method("dynatree:budget=60"), context),
        "outpace": build_proposer(parse_method("outpace:draft=none"), context),
        "oracle": OracleDrafter([plain.ids], budget=8),
    }
    methods = {}
    for name, proposer in proposers.items():
        session = _decode(engine, prompt, proposer)
        pairs = zip(plain.generated, session.generated)
        first = next((place for place, (left, right) in enumerate(pairs) if left != right), None)
        methods[name] = session.metrics.as_dict() | {"equal": first is None, "first_divergence": first}
    record = {"date": datetime.now(UTC).date().isoformat(), "tests": sys.argv[1], "methods": methods}
    print(json.dumps(record | environment(target.device, target.dtype)))


def _decode(engine: Engine, prompt: list[int], proposer: Proposer) -> Session:
    decode(engine, [prompt], [SamplingParams(max_new_tokens=8)], [proposer])  # warm-up
    proposer.reset()
    return decode(engine, [prompt], [SamplingParams(max_new_tokens=NEW_TOKENS)], [proposer])[0]


if __name__ == "__main__":
    main()
