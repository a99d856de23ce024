"""Trained drafters that ship with the project, named TARGET/KIND, where TARGET is a built-in model."""

from dataclasses import dataclass
from math import prod
from pathlib import Path

from safetensors import safe_open

from outpace.lib.checks import path_of
from outpace.lib.errors import ModelError
from outpace.models.loading import registry

TRANSITIONS = "transitions/transitions.safetensors"
"""Transition counts, in a target's folder."""


@dataclass(frozen=True)
class Size:
    """Trained parameters of a drafter (without tables of ids), and megabytes (10**6 bytes) of its files."""

    parameters: int
    megabytes: float


def shipped_folder() -> Path:
    """The folder of all shipped drafters: inside an installed package, else at the top of the source tree."""
    package = Path(__file__).parents[2]
    installed = package / "shipped"
    return installed if installed.is_dir() else package.parents[1] / "drafters"


def shipped() -> dict[str, Path]:
    """Names and folders of all shipped drafters."""
    found = sorted(path.parent for path in shipped_folder().glob("*/*/config.json"))
    return {f"{folder.parent.name}/{folder.name}": folder for folder in found}


def shipped_for(target: str) -> dict[str, Path]:
    """Kinds and folders of the drafters that were trained for a built-in target; none for a folder, a file or a hub id,
    whose weights may be others."""
    if not _is_built_in(target):
        return {}
    return {name.partition("/")[2]: folder for name, folder in shipped().items() if name.partition("/")[0] == target}


def shipped_transitions(target: str) -> Path | None:
    """The file of transition counts that ships for a built-in target; None if there is none."""
    file = shipped_folder() / target / TRANSITIONS
    return file if _is_built_in(target) and file.is_file() else None


def _is_built_in(target: str) -> bool:
    """Whether a name means a built-in model; a local folder of that name takes precedence."""
    return not path_of(target).is_dir() and target in registry.BUILT_IN


def find_drafter(name: str) -> str:
    """The folder of a shipped drafter; any other name unchanged. A local folder of that name takes precedence.

    Raises:
        ModelError: a built-in target's name with a kind that does not ship for it.
    """
    if path_of(name).is_dir():
        return name
    if name in shipped():
        return str(shipped()[name])
    target, slash, _ = name.partition("/")
    if slash and target in registry.BUILT_IN:
        raise ModelError(f"drafter={name!r}: does not ship; {shipped_names()}")
    return name


def shipped_names() -> str:
    """The shipped drafters, for the end of an error message."""
    return f"shipped are {', '.join(shipped())}" if shipped() else "no drafter ships with this installation"


def size_of(folder: Path) -> Size:
    """Size of a drafter, from the headers of its weights.

    Raises:
        ModelError: a file that cannot be read.
    """
    parameters = 0
    for file in sorted(folder.glob("model*.safetensors")):
        try:
            with safe_open(file, framework="pt") as opened:
                tensors = [opened.get_slice(name) for name in opened.keys()]  # noqa: SIM118
                parameters += sum(prod(one.get_shape()) for one in tensors if "F" in one.get_dtype())
        except Exception as error:
            raise ModelError(f"{file}: cannot be read: {error}; install the package again") from error
    return Size(parameters, sum(file.stat().st_size for file in folder.iterdir() if file.is_file()) / 1e6)
