"""Trained drafters that ship with the project, by name: TARGET/KIND, where TARGET is a built-in model."""

from dataclasses import dataclass
from math import prod
from pathlib import Path

from safetensors import safe_open

from outpace.lib.errors import ModelError
from outpace.lib.paths import path_of
from outpace.models.loading import registry

TRANSITIONS = "transitions/transitions.safetensors"
"""In a target's folder, beside its drafters: a warm-up's file."""


@dataclass(frozen=True)
class Size:
    """What a drafter weighs.

    Attributes:
        parameters: numbers that were trained; tables of ids do not count.
        megabytes: of all files of its folder, in units of 10**6 bytes.
    """

    parameters: int
    megabytes: float


def shipped_folder() -> Path:
    """Where they lie: inside an installed package, else at the top of the source tree."""
    package = Path(__file__).parents[2]
    installed = package / "shipped"
    return installed if installed.is_dir() else package.parents[1] / "drafters"


def shipped() -> dict[str, Path]:
    """Names and folders of all of them."""
    found = sorted(path.parent for path in shipped_folder().glob("*/*/config.json"))
    return {f"{folder.parent.name}/{folder.name}": folder for folder in found}


def shipped_for(target: str) -> dict[str, Path]:
    """Kinds and folders of the drafters that were trained for a target.

    Args:
        target: the name it is loaded by. A pulled name stands for weights that were checked; a folder or file can hold
            any others, and gets none.
    """
    if not _is_built_in(target):
        return {}
    return {name.partition("/")[2]: folder for name, folder in shipped().items() if name.partition("/")[0] == target}


def shipped_transitions(target: str) -> Path | None:
    """The file of transitions that ships for a target, loaded as for `shipped_for`; None if there is none."""
    file = shipped_folder() / target / TRANSITIONS
    return file if _is_built_in(target) and file.is_file() else None


def _is_built_in(target: str) -> bool:
    """Whether a name stands for a built-in model's weights; a local folder of that name goes first."""
    return not path_of(target).is_dir() and target in registry.BUILT_IN


def find_drafter(name: str) -> str:
    """The folder of a shipped drafter; any other name as it is. A local folder of that name goes first.

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
    """What ships, as the end of an error."""
    return f"shipped are {', '.join(shipped())}" if shipped() else "no drafter ships with this installation"


def size_of(folder: Path) -> Size:
    """What a drafter weighs, by the headers of its weights.

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
