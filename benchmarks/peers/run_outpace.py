"""This library's own contenders, timed from outside as the others are."""

from importlib.metadata import version
from typing import Any

import outpace


class Contender:
    """A loaded model.

    Args:
        settings: as `serve` describes; "model" names one, "precision" is bfloat16, float32, int8, or GGUF for the
            defaults of a file.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        precision = settings["precision"]
        options = {"GGUF": {}, "int8": {"quantize": "int8"}}.get(precision, {"dtype": precision})
        self._model = outpace.load(
            settings["model"],
            **options,
            device="cpu",
            max_num_seqs=1,
            profile=False,  # the default method, not one tuned on this machine
            enable_prefix_caching=False,  # several methods decode the same prompts
        )
        self.facts = {
            "versions": {"outpace": version("outpace"), "torch": version("torch")},
            "threads": settings["threads"],
            "note": f"default: {self._model.method_name}; exactness: {self._model.exactness.kind}",
        }

    def generate(self, method: str, prompt: list[int], max_new_tokens: int, clock: Any) -> None:
        """Decode with plain decoding or the model's default method."""
        chosen = None if method == "default" else method
        with self._model.stream(prompt, max_new_tokens=max_new_tokens, method=chosen) as stream:
            for event in stream:
                clock.put(event.tokens)
