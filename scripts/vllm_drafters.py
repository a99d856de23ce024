"""Whether vLLM says with a drafter what it says without, and what the drafter is worth there, as a JSON line.

    python scripts/vllm_drafters.py --model FOLDER --workload FILE:10 --out plain.json
    python scripts/vllm_drafters.py --model FOLDER --workload FILE:10 --drafter FOLDER --plain plain.json

To be run in an environment that has vLLM and this package. Greedy, in float32, where rounding decides nothing.
"""

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer
from transformers import AutoTokenizer

from outpace.bench.workload import read_workloads


def main(
    model: Annotated[str, typer.Option(help="folder of the target, as vLLM loads it")],
    workload: Annotated[list[str], typer.Option(help="FILE:LIMIT, several times")],
    method: Annotated[str, typer.Option(help="vLLM's: dflash or eagle3")] = "dflash",
    drafter: Annotated[str | None, typer.Option(help="folder; none for plain decoding")] = None,
    drafts: Annotated[int, typer.Option(help="tokens drafted at a time")] = 7,
    head: Annotated[bool, typer.Option(help="whether Domino's head is on")] = True,
    tokens: Annotated[int, typer.Option(help="of each answer")] = 96,
    longest: Annotated[int, typer.Option(help="tokens of a prompt; the rest is cut off")] = 700,
    out: Annotated[Path | None, typer.Option(help="for the answers")] = None,
    plain: Annotated[Path | None, typer.Option(help="answers to compare with")] = None,
) -> None:
    """One engine, all prompts."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    from vllm import LLM, SamplingParams

    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = []
    for item in read_workloads(workload, 1):
        chat = [{"role": "user", "content": item.turns[0]}]
        ids = (
            tokenizer.encode(item.turns[0])
            if item.raw
            else tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        )
        prompts.append({"prompt_token_ids": ids[:longest]})
    settings: dict[str, Any] = {
        "dtype": "float32",
        "enforce_eager": True,
        "disable_log_stats": False,
        "max_num_seqs": 8,
    }
    settings |= {"max_model_len": longest + tokens + 64, "enable_prefix_caching": False}
    if drafter is not None:
        settings["speculative_config"] = {"method": method, "model": drafter, "num_speculative_tokens": drafts}
    llm = LLM(model, **settings)
    if not head:
        drafting: Any = llm.llm_engine.model_executor.driver_worker.worker.model_runner.drafter.model
        drafting.head.config = drafting.head.config.model_copy(update={"pure_draft_prefix_len": drafts})
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    answers = [list(one.outputs[0].token_ids) for one in llm.generate(prompts, params, use_tqdm=False)]
    if out is not None:
        out.write_text(json.dumps(answers))
    counts = {one.name.removeprefix("vllm:spec_decode_num_"): getattr(one, "value", None) for one in llm.get_metrics()}
    drafted, accepted, rounds = (int(counts.get(name) or 0) for name in ("draft_tokens", "accepted_tokens", "drafts"))
    said: dict[str, Any] = {"prompts": len(prompts), "drafted": drafted, "accepted": accepted}
    said["tokens_per_step"] = round(1 + accepted / rounds, 3) if rounds else 1.0
    if plain is not None:
        said["equal"] = sum(one == other for one, other in zip(answers, json.loads(plain.read_text()), strict=True))
    print(json.dumps(said), flush=True)


if __name__ == "__main__":
    typer.run(main)
