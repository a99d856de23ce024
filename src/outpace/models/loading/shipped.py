"""Trained drafters that ship with the project, named TARGET/KIND, and the models that they are for.

The folder of a target holds `target.json`: its shape, a hash of its vocabulary and patterns of its names. Any file of
that model, in any precision, finds the drafters by these. A wrong match costs speed only.
"""

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, ValidationError

from outpace.lib.checkpoint import read_object
from outpace.lib.checks import path_of
from outpace.lib.errors import ModelError
from outpace.lib.int8 import SCALE
from outpace.lib.tensor_file import opened
from outpace.models.loading.config import CONFIG_NAME, read_config
from outpace.models.loading.registry import models_folder, resolve
from outpace.models.tokenizer import TextCodec, read_tokenizer

if TYPE_CHECKING:
    from transformers import PretrainedConfig

TARGET, TRANSITIONS = "target.json", "transitions/transitions.safetensors"
"""Files in a target's folder: its facts and its transition counts."""
_WEIGHTS = ("F64", "F32", "BF16", "F16", "I8")
_HASHED = 16  # every 16th token of a vocabulary is hashed: all 150,000 would take 0.2 s at each load


class TargetFacts(BaseModel):
    """The contents of `target.json`.

    Attributes:
        layers, hidden, heads, vocabulary: sizes of the model's config.
        tokens: ids from 0 on that have a token of their own; what follows them is padding.
        tokens_sha256: as `vocabulary_hash` makes it of these.
        names: patterns, as of `fnmatch`, of names as `_plain` writes them.
        default_method: the fastest where the target's passes run in compiled kernels, by measurement; None, or where
            its drafter is missing, for the default of the first kind that ships.
        transitions: the target whose transition counts serve this one too, since they have one vocabulary; None for its
            own.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    layers: int
    hidden: int
    heads: int
    vocabulary: int
    tokens: int
    tokens_sha256: str
    names: tuple[str, ...]
    default_method: str | None = None
    transitions: str | None = None

    def fits(self, config: "PretrainedConfig") -> bool:
        """Whether a model has this shape."""
        text = config.get_text_config()
        sizes = text.num_hidden_layers, text.hidden_size, text.num_attention_heads, text.vocab_size
        return sizes == (self.layers, self.hidden, self.heads, self.vocabulary)

    def is_named(self, name: str) -> bool:
        """Whether a model is known by a name of these patterns."""
        return any(fnmatchcase(_plain(one), pattern) for one in _names(name) for pattern in self.names)


@dataclass(frozen=True)
class Shipment:
    """What ships for a target.

    Attributes:
        target: its name; empty where nothing ships.
        drafters: folders by kind.
        transitions: file of transition counts.
        default_method: as in `TargetFacts`.
    """

    target: str = ""
    drafters: Mapping[str, Path] = field(default_factory=dict)
    transitions: Path | None = None
    default_method: str | None = None


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


def fetched_folder() -> Path:
    """The folder of drafters that `outpace models pull` fetched, because the package does not hold them."""
    return models_folder().parent / "drafters"


def target_folders() -> dict[str, Path]:
    """The folders of targets that files ship for. Fetched drafters serve where the package has none for a target."""
    here = {file.parent.name: file.parent for file in sorted(shipped_folder().glob(f"*/{TARGET}"))}
    fetched = {name: fetched_folder() / name for name, folder in here.items() if not drafters_in(folder)}
    return here | {name: folder for name, folder in fetched.items() if (folder / TARGET).is_file()}


def drafters_in(folder: Path) -> dict[str, Path]:
    """The drafters in a target's folder by kind."""
    return {path.parent.name: path.parent for path in sorted(folder.glob("*/config.json"))}


def shipped() -> dict[str, Path]:
    """Names and folders of all shipped drafters."""
    return {
        f"{target}/{kind}": path
        for target, folder in target_folders().items()
        for kind, path in drafters_in(folder).items()
    }


def shipped_for(name: str, config: "PretrainedConfig | None" = None, codec: TextCodec | None = None) -> Shipment:
    """What ships for a target.

    Args:
        name: what the target is loaded by.
        config, codec: of the target; None to read them where its name matches.

    Raises:
        ModelError: a `target.json` that cannot be read.
    """
    for target, folder in target_folders().items():
        facts = read_facts(shipped_folder() / target / TARGET)  # those of fetched drafters may be of another version
        if (config is not None and not facts.fits(config)) or not facts.is_named(name):
            continue
        config = read_config(resolve(name), for_weights=False) if config is None else config
        codec = read_tokenizer(resolve(name)) if codec is None else codec
        if facts.fits(config) and vocabulary_hash(codec, facts.tokens) == facts.tokens_sha256:
            own = [root / (facts.transitions or target) / TRANSITIONS for root in (folder.parent, shipped_folder())]
            found = next((file for file in own if file.is_file()), None)  # fetched folders hold drafters alone
            return Shipment(target, drafters_in(folder), found, facts.default_method)
    return Shipment()


def read_facts(file: Path) -> TargetFacts:
    """Read a `target.json`."""
    try:
        return TargetFacts.model_validate(read_object(file))
    except ValidationError as error:
        first = error.errors()[0]
        where = f"{file}: {'.'.join(map(str, first['loc']))}={first['input']!r}"
        raise ModelError(f"{where}: {first['msg']}; install the package again") from error


def vocabulary_hash(codec: TextCodec, count: int) -> str:
    """A hash of a vocabulary's first `count` tokens in the order of their ids, of which every 16th is read."""
    backend = codec.backend
    tokens = [backend.id_to_token(number) or "" for number in range(0, count, _HASHED)]
    return hashlib.sha256("\n".join(tokens).encode()).hexdigest()


def _plain(name: str) -> str:
    """A name in lower case, its words joined by hyphens: files, hubs and metadata write one name in several ways."""
    return re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-")


def _names(name: str) -> Iterator[str]:
    """What a model is called: by its file, folder or hub id, then by its metadata."""
    yield path_of(name).absolute().name.removesuffix(".gguf")
    location = resolve(name)
    values: dict[str, Any] = {}
    if location.gguf is not None:
        values = location.gguf.values
    elif (path := Path(location.path, CONFIG_NAME)).is_file():
        values = read_object(path)
    for key in ("general.name", "_name_or_path", "_model_name_or_path"):
        if isinstance(found := values.get(key), str):
            yield Path(found).name
    parts = [values.get(f"general.{key}") for key in ("basename", "size_label", "finetune")]
    if any(parts):
        yield "-".join(str(part) for part in parts if part)


def find_drafter(name: str) -> str:
    """The folder of a shipped drafter; any other name unchanged. A local folder of that name takes precedence.

    Raises:
        ModelError: a target's name with a kind that does not ship for it.
    """
    if path_of(name).is_dir():
        return name
    if name in shipped():
        return str(shipped()[name])
    target, slash, kind = name.partition("/")
    if slash and kind and target in target_folders():
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
        with opened(file, "install the package again") as content:
            names = [name for name in content.keys() if not name.endswith(SCALE)]  # noqa: SIM118
            tensors = [content.get_slice(name) for name in names]
            parameters += sum(prod(one.get_shape()) for one in tensors if one.get_dtype() in _WEIGHTS)
    return Size(parameters, sum(file.stat().st_size for file in folder.iterdir() if file.is_file()) / 1e6)
