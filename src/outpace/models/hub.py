"""Whether the hub has a model, asked once; and what an error says, in one line."""

from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
from transformers.utils import CONFIG_NAME

from outpace.lib.errors import ModelError
from outpace.models.registry import BUILT_IN, pulled

HUB_TIMEOUT_S = 5.0


def ask_hub(name: str) -> None:
    """Ask once for a model that is no file here. Transformers would ask a hub that is out of reach for 40 seconds.

    Raises:
        ModelError: nobody has it, or the hub is out of reach.
    """
    try:
        if not isinstance(try_to_load_from_cache(name, CONFIG_NAME), str):
            get_hf_file_metadata(hf_hub_url(name, CONFIG_NAME), timeout=HUB_TIMEOUT_S)
    except Exception as error:
        known = ", ".join(sorted({*pulled(), *BUILT_IN}))
        raise ModelError(
            f"{name}: no model found: no folder or GGUF file of this name, no pulled or built-in model ({known}), none "
            f"in the hub's cache, and {constants.ENDPOINT} was asked: {first_line(error)}"
        ) from error


def first_line(error: BaseException) -> str:
    """An error's kind and the first line of what it says, if anything."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
