"""The smallest drafter that can be trained, for tests of the trainer: one linear layer that guesses the next token.

Run as a program it trains on as many processes as `torch.distributed.run` starts.
"""

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from outpace.drafters.training.batch import Anchors, Batch
from outpace.drafters.training.objective import Objective
from outpace.drafters.training.settings import TrainingSettings
from outpace.train.data import SampleSet, TrainingData
from outpace.train.trainer import Trainer
from tests.unit.drafters.training import tiny

BASIS: dict[str, Any] = {
    "batch_size": 8, "micro_batch_size": 4, "learning_rate": 3e-2, "evaluate_every": 5, "save_every": 4,
    "precision": "float32", "max_steps": 15, "epochs": 100,
}  # fmt: skip


class LinearObjective(Objective):
    """The token after each anchor, from what the target's head reads there; the target's own head would be perfect."""

    def __init__(self) -> None:
        net = nn.Linear(tiny.frozen().hidden_size, tiny.VOCAB, bias=False)
        torch.nn.init.normal_(net.weight, std=0.01, generator=torch.Generator().manual_seed(3))
        super().__init__(net, tiny.frozen(), taps=(3,), depth=1)

    def forward(self, batch: Batch, progress: float) -> Mapping[str, Tensor]:
        own = batch.mask[:, :-1] & batch.mask[:, 1:]
        logits = self.net(batch.features[:, :-1][own])
        loss = nn.functional.cross_entropy(logits, batch.ids[:, 1:][own], reduction="sum")
        return {"loss": loss, "weight": own.sum().float(), "progress": progress * own.sum().float()}

    def hits(self, batch: Batch, anchors: Anchors) -> Tensor:
        guessed: Tensor = self.net(batch.features[anchors.rows, anchors.positions]).argmax(dim=-1)
        ids, own = anchors.followed(batch, 1)
        return guessed[:, None].eq(ids) & own


def save_weights(tensors: Mapping[str, Tensor], folder: Path) -> None:
    save_file({name: one.clone() for name, one in tensors.items()}, folder / "weights.safetensors")


def data() -> TrainingData:
    samples = SampleSet(tiny.samples())
    return TrainingData(samples, samples.held_out(tiny.HELD_OUT))


def trainer(
    folder: Path,
    report: Callable[[Mapping[str, Any]], None] = lambda shown: None,
    objective: Objective | None = None,
    plugin: FullyShardedDataParallelPlugin | None = None,
    **settings: Any,
) -> Trainer:
    AcceleratorState._reset_state(reset_partial_state=True)  # a test is a process of its own
    accelerator = Accelerator(cpu=True, log_with="tensorboard", project_dir=str(folder), fsdp_plugin=plugin)
    if plugin is not None:  # Accelerate takes FSDP for a matter of GPUs; torch does not
        state = accelerator.state
        PartialState._shared_state["distributed_type"] = state.distributed_type = DistributedType.FSDP
        state.fsdp_plugin = plugin
    folder.mkdir(parents=True, exist_ok=True)
    accelerator.init_trackers("tensorboard")
    chosen = TrainingSettings(**(BASIS | settings))
    return Trainer(objective or LinearObjective(), data(), chosen, folder, accelerator, save_weights, report)


if __name__ == "__main__":
    torch.set_num_threads(1)
    out, how = Path(sys.argv[1]), sys.argv[2]
    sharding = None
    if how != "copies":
        sharding = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="NO_WRAP")
        if how == "fsdp in bfloat16":
            os.environ["ACCELERATE_MIXED_PRECISION"] = "bf16"
            sharding.set_mixed_precision("bf16")  # as Accelerate does, but only on GPUs
    trained = trainer(out, plugin=sharding, micro_batch_size=2)
    assert all(isinstance(one, DTensor) == (how != "copies") for one in trained._module.parameters())
    computed = set[torch.dtype]()
    trained._objective.net.register_forward_hook(lambda net, given, made: computed.add(made.dtype))
    try:
        trained.run()
    finally:
        trained._accelerator.end_training()
    assert computed == {torch.bfloat16 if how == "fsdp in bfloat16" else torch.float32}, computed
    os._exit(0)  # threads of a process group that outlive it end the process by SIGABRT, now and then
