"""llama.cpp through llama-cpp-python: plain, and with its prompt lookup."""

import ctypes
from importlib.metadata import version
from typing import Any

import llama_cpp
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

DRAFTED = {"lookup": 10, "lookup-2": 2}
"""`num_pred_tokens`: its default, and what its documentation advises where there is no GPU."""


class Contender:
    """A context of the same weights for each method: one that drafts computes logits in every row.

    Args:
        settings: as `serve` describes; "weights" is a GGUF file.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        self._contexts = {method: self._open(method, settings) for method in settings["methods"]}
        system = ctypes.string_at(llama_cpp.llama_print_system_info()).decode()
        self.facts = {
            "versions": {"llama-cpp-python": version("llama-cpp-python")},
            "threads": settings["threads"],
            "note": system,
        }

    @staticmethod
    def _open(method: str, settings: dict[str, Any]) -> Any:
        draft = LlamaPromptLookupDecoding(num_pred_tokens=DRAFTED[method]) if method in DRAFTED else None
        return llama_cpp.Llama(
            settings["weights"],
            n_ctx=settings["max_length"],
            n_threads=settings["threads"],
            n_threads_batch=settings["threads"],
            draft_model=draft,
            verbose=False,
        )

    def generate(self, method: str, prompt: list[int], max_new_tokens: int, clock: Any) -> None:
        """Decode greedily."""
        context = self._contexts[method]
        context.reset()  # nothing of the prompt before
        for token in context.generate(prompt, temp=0.0):
            if clock.put([int(token)]):
                return


def load(settings: dict[str, Any]) -> Contender:
    """See `serve`."""
    return Contender(settings)
