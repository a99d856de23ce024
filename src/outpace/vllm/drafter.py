"""Reads a Domino drafter's config and vocabulary, and checks that they fit vLLM's settings."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError
from torch import Tensor

from outpace.drafters.dflash.files import DOMINO
from outpace.drafters.domino.files import PROJECTOR, read_domino_config
from outpace.drafters.domino.net import DominoConfig
from outpace.drafters.ranked_vocabulary import FILE_NAME, load_vocabulary
from outpace.lib.errors import InvalidRequest, ModelError


@dataclass(frozen=True)
class Drafter:
    """A drafter as its folder describes it. `ids`: [K] ascending, the only ids that it drafts; None for all."""

    name: str
    values: dict[str, Any]
    config: DominoConfig
    ids: Tensor | None


def is_domino(hf_config: Any) -> bool:
    """Whether vLLM's config of a draft model is that of a Domino drafter."""
    inner = getattr(hf_config, "dflash_config", None) or {}
    projector = inner.get("projector_type") or getattr(hf_config, "projector_type", None)
    named = getattr(hf_config, "architectures", None) or []
    return projector == PROJECTOR or any(name.endswith(DOMINO) for name in named)


def read_drafter(name: str, revision: str | None = None) -> Drafter:
    """A drafter without its weights."""
    path = _file(name, revision, "config.json")
    if path is None:
        raise ModelError(f"{name}: no config.json there; give the folder or hub id of a drafter")
    values = json.loads(path.read_text(encoding="utf-8"))
    config = read_domino_config(values, name)
    vocabulary = _file(name, revision, FILE_NAME)
    ids = None if vocabulary is None else load_vocabulary(vocabulary, config.vocab_size)
    return Drafter(name, values, config, ids)


def check_use(drafter: Drafter, target: Any, speculation: Any) -> None:
    """Refuse a drafter that was not made for a target, or cannot draft as asked."""
    config = drafter.config
    config.check_target(target.get_hidden_size(), target.get_total_num_hidden_layers(), target.get_vocab_size())
    most, asked = config.drafts_per_block(), speculation.num_speculative_tokens
    if asked > most:
        raise InvalidRequest(f"num_speculative_tokens={asked}: {drafter.name} drafts at most {most}; ask for no more")
    if speculation.num_speculative_tokens_per_batch_size is not None:
        raise InvalidRequest(
            "num_speculative_tokens_per_batch_size: Domino drafts as many for every batch; leave it out"
        )


def _file(name: str, revision: str | None, file: str) -> Path | None:
    """A file of a folder or of a repository on the hub; None where there is none."""
    if Path(name).is_dir():
        path = Path(name) / file
        return path if path.is_file() else None
    try:
        return Path(hf_hub_download(name, file, revision=revision))
    except EntryNotFoundError:  # also of a repository that is only looked for on this machine
        return None
