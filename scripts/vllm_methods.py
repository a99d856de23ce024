"""Whether vLLM says with each of our methods what it says without drafts, and what the drafts are worth: a table.

    python scripts/vllm_methods.py -w prompts.jsonl:40 --methods lookup,domino,graft,eagle3:shape=dynatree,outpace

To be run in an environment that has vLLM and this package. Each method has a process and an engine of its own, all the
same prompts, greedy, in float32, where rounding decides nothing. Drafters are those that ship.
"""

import json
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

import typer
from transformers import AutoTokenizer

from outpace.bench.runner import split_methods
from outpace.data.workload import read_workloads
from outpace.models.export import export
from outpace.vllm.settings import KEY
from outpace.vllm.speculation import speculation

PLAIN = "plain"
EXPORTS = Path("build/peers/weights")  # where `make peers` and `make test-vllm` keep them as well


@dataclass(frozen=True)
class Asked:
    """What every method is asked.

    Attributes:
        model: as for `outpace.load`.
        folder: of it, as vLLM loads it.
        prompts: ids.
        tokens: of each answer.
        batch: requests in flight.
        least_gain: of our proposers.
    """

    model: str
    folder: str
    prompts: Sequence[list[int]]
    tokens: int
    batch: int
    least_gain: float


@dataclass(frozen=True)
class Said:
    """Answers, and what was drafted for them."""

    answers: list[list[int]]
    drafted: int
    accepted: int

    @property
    def tokens_per_step(self) -> float:
        """Of all tokens behind the first of each answer, which comes with the prompt."""
        decoded = sum(len(answer) - 1 for answer in self.answers)
        return decoded / (decoded - self.accepted)


def main(
    workload: Annotated[list[str], typer.Option("--workload", "-w", help="FILE:LIMIT, several times")],
    methods: Annotated[str, typer.Option(help="comma-separated; plain comes first")],
    model: Annotated[str, typer.Option(help="as for outpace serve")] = "smollm2-135m",
    head_off: Annotated[bool, typer.Option(help="Domino once more, with its head switched off")] = False,
    tokens: Annotated[int, typer.Option(help="of each answer")] = 96,
    batch: Annotated[int, typer.Option(help="requests in flight")] = 8,
    longest: Annotated[int, typer.Option(help="tokens of a prompt; the rest is cut off")] = 700,
    least_gain: Annotated[float, typer.Option(help="of our proposers; fixed, so that no clock decides")] = 0.3,
    out: Annotated[Path | None, typer.Option(help="JSON of all answers and counts")] = None,
) -> None:
    """A row for each method."""
    folder = str(export(model, EXPORTS / model))
    asked = Asked(model, folder, _prompts(folder, workload, longest), tokens, batch, least_gain)
    rows = [(method, True) for method in dict.fromkeys((PLAIN, *split_methods(methods)))]
    rows += [("domino", False)] if head_off else []
    wanted: list[list[int]] = []
    found: dict[str, Any] = {}
    print("| method | drafted | accepted | tokens per step | answers equal |\n|---|---|---|---|---|")
    for method, head in rows:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as alone:
            said = alone.submit(answered, asked, method, head).result()
        wanted = wanted or said.answers
        equal = sum(one == other for one, other in zip(said.answers, wanted, strict=True))
        name = f"`{method}`" + ("" if head else ", head off")
        counts = f"{said.drafted:,} | {said.accepted:,} | {said.tokens_per_step:.2f}"
        print(f"| {name} | {counts} | {equal} of {len(wanted)} |", flush=True)
        found[name] = vars(said)
    if out is not None:
        out.write_text(json.dumps(found))


def answered(asked: Asked, method: str, head: bool) -> Said:
    """What vLLM says with a method, in a process that ends afterwards: vLLM leaves things behind."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    from vllm import LLM, SamplingParams

    longest = max(map(len, asked.prompts)) + asked.tokens + 64
    settings: dict[str, Any] = {"dtype": "float32", "enforce_eager": True, "enable_prefix_caching": False}
    settings |= {"disable_log_stats": False, "max_num_seqs": asked.batch, "max_model_len": longest}
    told = speculation(asked.model, method, None, None, EXPORTS)
    if told.config is not None:
        settings["speculative_config"] = told.config
    if told.additional is not None:
        own = told.additional[KEY] | {"least_gain": asked.least_gain}
        settings["additional_config"] = {KEY: own}
    llm = LLM(asked.folder, **settings)
    if not head:
        drafting: Any = llm.llm_engine.model_executor.driver_worker.worker.model_runner.drafter.model
        drafting.head.config = drafting.head.config.model_copy(update={"pure_draft_prefix_len": drafting.drafts})
    params = SamplingParams(temperature=0.0, max_tokens=asked.tokens, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": ids} for ids in asked.prompts]
    answers = [list(one.outputs[0].token_ids) for one in llm.generate(prompts, params, use_tqdm=False)]
    counts = {one.name.removeprefix("vllm:spec_decode_num_"): getattr(one, "value", None) for one in llm.get_metrics()}
    drafted, accepted = (int(counts.get(name) or 0) for name in ("draft_tokens", "accepted_tokens"))
    return Said(answers, drafted, accepted)


def _prompts(folder: str, workload: list[str], longest: int) -> list[list[int]]:
    """The first turns as ids: chats with their template, continuations as they are."""
    tokenizer, prompts = AutoTokenizer.from_pretrained(folder), []
    for item in read_workloads(workload, 1):
        chat = [{"role": "user", "content": item.turns[0]}]
        ids = (
            tokenizer.encode(item.turns[0])
            if item.raw
            else tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        )
        prompts.append(list(ids[:longest]))
    return prompts


if __name__ == "__main__":
    typer.run(main)
