"""Reads a Domino drafter's config and vocabulary, and checks that they fit vLLM's settings."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from outpace.drafters.dflash.files import DOMINO
from outpace.drafters.domino.files import PROJECTOR, read_domino_config
from outpace.drafters.domino.net import DominoConfig
from outpace.drafters.load import locate
from outpace.drafters.ranked_vocabulary import FILE_NAME, load_vocabulary
from outpace.lib.checkpoint import read_object
from outpace.lib.errors import InvalidRequest


@dataclass(frozen=True)
class Drafter:
    """A drafter's description from its folder. `ids`: [K] ascending, the only ids that it drafts; None for all."""

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
    """Read a drafter's description, without its weights."""
    folder = locate(name, ("config.json", FILE_NAME), "drafter", revision)
    values = read_object(folder / "config.json")
    config, vocabulary = read_domino_config(values, name), folder / FILE_NAME
    ids = load_vocabulary(vocabulary, config.vocab_size) if vocabulary.is_file() else None
    return Drafter(name, values, config, ids)


def check_use(drafter: Drafter, target: Any, speculation: Any) -> None:
    """Refuse a drafter that was made for another target or reads states that vLLM does not give, or that cannot draft
    with these speculative settings."""
    config = drafter.config
    config.check_target(target.get_hidden_size(), target.get_total_num_hidden_layers(), target.get_vocab_size())
    if max(config.target_layer_ids) == target.get_total_num_hidden_layers() - 1:
        raise InvalidRequest(
            f"target_layer_ids={list(config.target_layer_ids)}: {drafter.name} reads the last layer after the final "
            "norm, and vLLM's dflash before it; use outpace's proposer, as `outpace serve --engine vllm` does"
        )
    most, asked = config.drafts_per_block(), speculation.num_speculative_tokens
    if asked > most:
        raise InvalidRequest(f"num_speculative_tokens={asked}: {drafter.name} drafts at most {most}; ask for no more")
    if speculation.num_speculative_tokens_per_batch_size is not None:
        raise InvalidRequest(
            "num_speculative_tokens_per_batch_size: Domino drafts the same number for every batch; leave it out"
        )
