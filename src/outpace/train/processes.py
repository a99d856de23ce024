"""What processes that train together do as one, beyond what Accelerate does by itself."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed.fsdp import FSDPModule

from outpace.train.simulate import Simulation


@contextmanager
def whole(module: nn.Module) -> Iterator[None]:
    """A module whose weights FSDP spread over processes, put together for calls that are not its `forward`."""
    spread = [part for part in module.modules() if isinstance(part, FSDPModule)]
    for part in spread:
        part.unshard()
    try:
        yield
    finally:
        for part in spread:
            part.reshard()


def together(accelerator: Accelerator, played: Simulation, depth: int) -> Simulation:
    """The rounds that all processes played."""
    counts = torch.zeros(2 + 2 * depth, dtype=torch.int64)
    counts[0], counts[1] = played.tokens, played.rounds
    counts[2 : 2 + len(played.reached)] = torch.tensor(played.reached, dtype=torch.int64)
    counts[2 + depth : 2 + depth + len(played.accepted)] = torch.tensor(played.accepted, dtype=torch.int64)
    tokens, rounds, *rest = accelerator.reduce(counts.to(accelerator.device), "sum").tolist()
    return Simulation(tokens, rounds, rest[:depth], rest[depth:])
