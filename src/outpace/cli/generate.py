"""`outpace generate`: answer one prompt."""

import json
import sys
from typing import Annotated, Any

import typer

from outpace.cli.options import (
    AsJson,
    Budget,
    Device,
    Drafter,
    Dtype,
    MaxModelLen,
    MaxNewTokens,
    Method,
    MinP,
    ModelName,
    Seed,
    Temperature,
    TopK,
    TopP,
    load_model,
    notes,
)
from outpace.core.params import SamplingParams


def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt; '-' reads standard input.")],
    model: ModelName,
    method: Method = "recycle",
    drafter: Drafter = None,
    budget: Budget = None,
    max_new_tokens: MaxNewTokens = 128,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    seed: Seed = None,
    n: Annotated[int, typer.Option("--n", help="Samples.")] = 1,
    stop: Annotated[list[str] | None, typer.Option(help="Stop string; may be given several times.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text instead of answering a chat message.")] = False,
    dtype: Dtype = "auto",
    device: Device = "auto",
    max_model_len: MaxModelLen = None,
    as_json: AsJson = False,
) -> None:
    """Answer one prompt, streaming the text."""
    params = SamplingParams(
        max_new_tokens, temperature, top_k, top_p, min_p, seed, n, stop=tuple(stop or ())
    )  # checked before a model is loaded
    text = sys.stdin.read() if prompt == "-" else prompt
    loaded = load_model(model, method, drafter, budget, dtype, device, max_model_len, max(n, 1))
    is_chat = not raw and bool(loaded.codec.tokenizer.chat_template)
    asked: Any = [{"role": "user", "content": text}] if is_chat else text
    if as_json or n > 1:
        generation = loaded.generate(asked, params)
        samples = [
            {
                "text": sample.text,
                "token_ids": sample.token_ids,
                "finish_reason": sample.finish_reason,
                "stop_reason": sample.stop_reason,
                "seed": sample.seed,
                "metrics": sample.metrics.as_dict(),
            }
            for sample in generation.samples
        ]
        if as_json:
            print(json.dumps({"model": model, "method": method, "samples": samples}))
        else:
            for index, sample in enumerate(samples):
                print(f"--- sample {index}\n{sample['text']}")
        return
    with loaded.stream(asked, params) as stream:
        for event in stream:
            print(event.text, end="", flush=True)
    print()
    assert stream.result is not None
    metrics = stream.result.metrics
    rate = 1e3 / metrics.tpot_ms if metrics.tpot_ms else 0.0
    notes.print(
        f"[dim]{metrics.new_tokens} tokens, {rate:.1f} tokens/s, {metrics.tokens_per_step:.2f} tokens per step, "
        f"first token after {metrics.ttft_ms:.0f} ms, ended by {stream.result.finish_reason}[/dim]"
    )
