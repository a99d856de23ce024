"""A drafter kind in one file: Domino with its GRU replaced by a small MLP over the last two embeddings.

It counts as installed once this file is in a package whose pyproject.toml has

    [project.entry-points."outpace.drafters"]
    mlp-head = "my_package.mlp_head:MLP_HEAD"

and then `outpace train mlp-head --target MODEL --prompts FILE --out OUT` trains it, and
`outpace chat MODEL --drafter OUT/drafter` drafts with it.
"""

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn

from outpace.drafters.domino.methods import DominoOptions, domino_proposer
from outpace.drafters.domino.net import DominoConfig, DominoHead, DominoNet
from outpace.drafters.kind import DrafterKind, Training
from outpace.lib.checkpoint import Checkpoint, filled, write_checkpoint
from outpace.lib.errors import ModelError
from outpace.methods import Method

NAME, ARCHITECTURE = "mlp-head", "MlpHeadDrafter"


class MlpConfig(DominoConfig):
    """Domino's sizes; `gru_hidden_dim` is the size of the head's state, two embeddings."""

    mlp_dim: int = Field(ge=1)


class MlpHead(DominoHead):
    """The correction of a token from the embeddings of the two tokens before it, which are the head's state."""

    def __init__(self, config: MlpConfig) -> None:
        super().__init__(config)
        del self.prefix_gru
        self.mlp = nn.Linear(config.gru_hidden_dim, config.mlp_dim)
        self.embed_proj[0] = nn.Linear(config.hidden_size + config.mlp_dim, config.emb_dim, bias=False)

    def step(self, state: Tensor, embeddings: Tensor) -> Tensor:
        """State [R, 2H] after one more token in each row, embeddings [R, H]."""
        return torch.cat((state[:, embeddings.shape[1] :], embeddings), dim=-1)

    def states(self, embeddings: Tensor) -> Tensor:
        """States [A, D, 2H] after each of the tokens [A, D, H]."""
        before = nn.functional.pad(embeddings[:, :-1], (0, 0, 1, 0))
        return torch.cat((before, embeddings), dim=-1)

    def low_rank(self, hidden: Tensor, state: Tensor) -> Tensor:
        """[..., r]: its product with `vocabulary_weight` is added to base logits."""
        return super().low_rank(hidden, nn.functional.silu(self.mlp(state)))


class MlpNet(DominoNet):
    """DFlash's backbone with this head."""

    config: MlpConfig

    def __init__(self, config: MlpConfig) -> None:
        super().__init__(config)
        self.head = MlpHead(config)


def matches(config: Mapping[str, Any]) -> bool:
    return ARCHITECTURE in (config.get("architectures") or ())


def read(checkpoint: Checkpoint) -> MlpNet:
    try:
        config = MlpConfig.model_validate_json(json.dumps(checkpoint.config["net"]))
    except (KeyError, ValueError) as error:
        raise ModelError(f"{checkpoint.name}: config.json: {error}") from error
    return filled(lambda: MlpNet(config), checkpoint.tensors, checkpoint.name)


def write(net: MlpNet, folder: Path, target: str | None) -> None:
    config = {"architectures": [ARCHITECTURE], "net": net.config.model_dump(mode="json")}
    write_checkpoint(folder, config, dict(net.state_dict()))


def training() -> Training:
    """Domino's objective on this network; in a function, so that drafting imports no training code."""
    from outpace.drafters.dflash.objective import block_fields
    from outpace.drafters.domino.objective import DominoNetSettings, DominoObjective, DominoObjectiveSettings
    from outpace.drafters.fields import build as build_config
    from outpace.drafters.training.losses import LossVocabulary
    from outpace.drafters.training.objective import initialise

    class MlpNetSettings(DominoNetSettings):
        mlp_dim: int = Field(default=512, ge=1)

    def build(
        net: MlpNetSettings, objective: DominoObjectiveSettings, target: Any, facts: Any, seed: int
    ) -> DominoObjective:
        sizes = block_fields(net, target, facts) | {"gru_hidden_dim": 2 * target.hidden_size}
        made = initialise(MlpNet(build_config(MlpConfig, sizes, "net")), seed)
        nn.init.zeros_(made.head.vocabulary_weight)  # training begins with the backbone's logits
        for layer in (made.head.mlp, made.head.embed_proj[0]):
            nn.init.xavier_uniform_(layer.weight)
        made = made.to(target.device)
        return DominoObjective(made, target, objective, LossVocabulary.chosen(objective, facts, target.device))

    return Training(MlpNetSettings, DominoObjectiveSettings, build, {"training": {"epochs": 3.0}})


MLP_HEAD = DrafterKind(
    name=NAME,
    title="Domino with an MLP over the last two embeddings instead of the GRU.",
    net=MlpNet,
    matches=matches,
    read=read,
    layouts={"mlp-head": write},
    methods={
        NAME: Method(
            partial(domino_proposer, net_class=MlpNet, method=NAME),
            "Domino's block, corrected by an MLP over the last two tokens",
            DominoOptions,
            NAME,
        )
    },
    training=training,
    serves=("domino", "dflash"),
    new="head.",
)
