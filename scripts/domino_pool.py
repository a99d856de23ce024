"""What a Domino round costs on this machine with and without a candidate pool, as JSON lines.

    python scripts/domino_pool.py --model TARGET --pool 0 --pool 2048

The drafter has the published sizes of head and layers, fitted to the target's hidden size, and random weights: time
does not depend on them. How much acceptance a pool costs needs a trained drafter: `outpace bench --drafter`.
"""

import json
import statistics
import time
from typing import Annotated, Any

import torch
import typer

import outpace
from outpace.core.params import SamplingParams
from outpace.core.protocols import Chunk, DraftRequest, PromptChunk, Proposer, Stream
from outpace.drafters.build_context import BuildContext
from outpace.drafters.dflash.net import default_target_layer_ids
from outpace.drafters.domino.net import DominoConfig, DominoNet
from outpace.drafters.packing import pack_net
from outpace.methods.catalog import build_proposer, parse_method


def main(
    model: Annotated[str, typer.Option()],
    pool: Annotated[list[int], typer.Option(help="sizes of the pool; 0 is no pool")],
    shape: Annotated[str, typer.Option()] = "chain",
    layers: Annotated[int, typer.Option()] = 5,
    temperature: Annotated[float, typer.Option()] = 0.0,
    rounds: Annotated[int, typer.Option()] = 30,
    context: Annotated[int, typer.Option(help="tokens before the block")] = 200,
    dtype: Annotated[str, typer.Option()] = "auto",
) -> None:
    """Time the proposals of one request, the pools taking turns."""
    loaded = outpace.load(model, dtype=dtype, max_num_seqs=1)
    net = random_net(loaded, layers)
    around = BuildContext(
        loaded.target.vocab_size,
        loaded.target.embedding.weight.device,
        loaded.drafters.language_model,
        loaded.target,
        lambda: net,
    )
    ids = torch.randint(loaded.target.vocab_size, (context,), generator=torch.Generator().manual_seed(0)).tolist()
    params = SamplingParams(temperature=temperature)
    timed = {
        size: ready(build_proposer(parse_method(f"domino:shape={shape},pool={size}"), around), loaded, ids)
        for size in pool
    }
    seconds: dict[int, list[float]] = {size: [] for size in pool}
    for _ in range(rounds):
        for size, (proposer, state) in timed.items():
            request = DraftRequest(Stream(params, 0, 0, ids, context, ()), proposer.budget, 64)
            started = time.perf_counter()
            (tree,) = proposer.propose([state], [request])
            seconds[size].append(time.perf_counter() - started)
    for size, times in seconds.items():
        record = {"pool": size, "shape": shape, "nodes": len(tree) - 1, "median_ms": 1e3 * statistics.median(times)}
        print(json.dumps(record | {"fastest_ms": 1e3 * min(times)}))


def random_net(loaded: outpace.Model, layers: int) -> DominoNet:
    """A drafter for this target with the published rank 256, state 1024 and block 16."""
    config: Any = loaded.target.config
    width, count = config.hidden_size, config.num_hidden_layers
    net = DominoNet(
        DominoConfig(
            hidden_size=width, target_hidden_size=width, intermediate_size=config.intermediate_size,
            heads=config.num_attention_heads, kv_heads=config.num_key_value_heads,
            head_dim=width // config.num_attention_heads, rms_eps=1e-6, rope_theta=1e6, max_positions=4096,
            layers=layers, vocab_size=loaded.target.vocab_size, block_size=16, mask_token_id=0, target_layers=count,
            target_layer_ids=default_target_layer_ids(count, 5), emb_dim=256, gru_hidden_dim=1024,
            shift_label=True, pure_draft_prefix_len=1,
        )
    )  # fmt: skip
    generator = torch.Generator().manual_seed(1)
    for weight in net.parameters():
        weight.data.normal_(std=0.02, generator=generator)
    net.to(loaded.target.embedding.weight.dtype).eval().requires_grad_(False)
    pack_net(net)
    return net


def ready(proposer: Proposer, loaded: outpace.Model, ids: list[int]) -> tuple[Proposer, Any]:
    """The proposer and a state of it that knows all of the context but the last, pending token."""
    loaded.target.rewind_slot(0, 0)
    state = proposer.open(0)
    chunk = torch.tensor(ids[:-1])
    (output,) = loaded.target.run_pass([Chunk(0, chunk, False, False, proposer.needs.taps)], (), ())[0]
    proposer.prefill([state], [PromptChunk(chunk, None, output.features)])
    return proposer, state


if __name__ == "__main__":
    typer.run(main)
