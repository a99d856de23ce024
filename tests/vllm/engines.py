"""Real vLLM engines inside this process, and what they said."""

import gc
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

VARIABLES = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GB
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in this process, where tests can look into it
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
"""Of the environment, where it does not say otherwise; set before anything imports vLLM."""
SETTINGS: dict[str, Any] = {
    "dtype": "float32",  # where no rounding decides between two tokens, with whatever company
    "enforce_eager": True,
    "max_model_len": 512,
    "max_num_seqs": 8,
    "enable_prefix_caching": False,
    "disable_log_stats": False,
    "seed": 0,
}
"""Of every engine, unless a test says otherwise."""


def speculative(method: str, drafter: Path | str, drafts: int, **more: Any) -> dict[str, Any]:
    """vLLM's `speculative_config`."""
    return {"method": method, "model": str(drafter), "num_speculative_tokens": drafts, **more}


os.environ |= {name: os.environ.get(name, value) for name, value in VARIABLES.items()}


@dataclass
class Proposed:
    """What a drafter proposed in one step. `context`: all ids that the target has committed of each request."""

    context: list[list[int]]
    drafts: list[list[int]]


@dataclass
class Engine:
    """One engine, as vLLM's `LLM` makes it."""

    llm: Any
    proposed: list[Proposed] = field(default_factory=list)

    @property
    def runner(self) -> Any:
        """vLLM's model runner; there is one in this process."""
        return self.llm.llm_engine.model_executor.driver_worker.worker.model_runner

    @property
    def drafter(self) -> Any:
        """The model that drafts."""
        return self.runner.drafter.model

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int, **sampling: Any) -> list[list[int]]:
        """The ids of an answer to each prompt, exactly so many; greedy unless `sampling` says otherwise."""
        from vllm import SamplingParams

        options = {"temperature": 0.0, "ignore_eos": True, "detokenize": False, **sampling}
        params = SamplingParams(max_tokens=max_tokens, **options)
        requests = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        outputs = self.llm.generate(requests, params, use_tqdm=False)
        return [list(one.token_ids) for output in outputs for one in output.outputs]

    def counts(self) -> tuple[int, int]:
        """Drafted and accepted tokens so far."""
        found = {one.name: getattr(one, "value", None) for one in self.llm.get_metrics()}
        drafted, accepted = (found.get(f"vllm:spec_decode_num_{kind}_tokens", 0) for kind in ("draft", "accepted"))
        return int(drafted or 0), int(accepted or 0)

    def record(self) -> list[Proposed]:
        """A list that grows by what is drafted from now on. A step is filed when the next one drafts: only then has the
        runner noted the tokens that the drafts stand behind."""
        runner, recorded = self.runner, self.proposed
        propose, last = runner.drafter.propose, dict[str, list[int]]()

        def recording(*args: Any, **kwargs: Any) -> Any:
            batch = runner.input_batch
            rows = {name: batch.req_id_to_index[name] for name in last if name in batch.req_id_to_index}
            lengths = {name: int(batch.num_tokens_no_spec[row]) for name, row in rows.items()}
            known = {name: batch.token_ids_cpu[row, : lengths[name]].tolist() for name, row in rows.items()}
            recorded.append(Proposed(list(known.values()), [last[name] for name in known]))
            drafts = propose(*args, **kwargs)
            last.clear()
            last.update(zip(batch.req_ids, drafts.tolist(), strict=True))
            return drafts

        runner.drafter.propose = recording
        return recorded


@contextmanager
def engine(model: Path | str, speculation: Mapping[str, Any] | None = None, **settings: Any) -> Iterator[Engine]:
    """An engine, gone afterwards with all its memory.

    vLLM's own `ngram` loads numba, after which vLLM 0.32 starts no other engine in this process: run it in another.

    Args:
        speculation: of `speculative`; None for plain decoding.
    """
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    skip = {} if (Path(model) / "tokenizer.json").is_file() else {"skip_tokenizer_init": True}
    options: dict[str, Any] = {**SETTINGS, **skip, **settings}
    made = None
    try:
        made = Engine(LLM(str(model), speculative_config=dict(speculation) if speculation else None, **options))
        yield made
    finally:
        if made is not None:
            made.llm.llm_engine.engine_core.shutdown()
            made.llm = None
        cleanup_dist_env_and_memory()
        gc.collect()
