"""The ranks of a vLLM server, and the machines that they run on."""

from dataclasses import dataclass

from outpace.core.settings import check_fields, documented, setting
from outpace.lib.errors import InvalidRequest


@documented
@dataclass(frozen=True)
class Nodes:
    """Where the ranks of a server are."""

    tensor_parallel_size: int = setting(1, "GPUs that share each layer.", unit="GPUS", low=1)
    pipeline_parallel_size: int = setting(1, "GPUs that share the stack of layers.", unit="GPUS", low=1)
    data_parallel_size: int = setting(1, "Copies of the model, each with requests of its own.", unit="COPIES", low=1)
    nnodes: int = setting(1, "Machines. Each runs this command, with its rank.", unit="MACHINES", low=1)
    node_rank: int | None = setting(None, "Rank of this machine; rank 0 answers.", unit="RANK", low=0)
    master_addr: str | None = setting(None, "Address of rank 0.", unit="ADDRESS")
    master_port: int | None = setting(None, "Port of rank 0 at which the ranks meet.", unit="PORT", low=1)

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def arguments(self) -> list[str]:
        """The settings as vLLM's arguments, without its defaults. Only the node of rank 0 answers requests."""
        if self.nnodes == 1:
            for name in ("node_rank", "master_addr", "master_port"):
                if (value := getattr(self, name)) is not None:
                    raise InvalidRequest(f"{name}={value!r}: there is one node; give --nnodes, or leave it out")
        elif self.node_rank is None or self.master_addr is None:
            raise InvalidRequest(f"nnodes={self.nnodes}: give --node-rank, and as --master-addr the address of rank 0")
        elif self.node_rank >= self.nnodes:
            ranks = f"of {self.nnodes} nodes; ranks are 0 to {self.nnodes - 1}"
            raise InvalidRequest(f"node_rank={self.node_rank}: {ranks}")
        given = {name: value for name, value in vars(self).items() if value not in (None, getattr(type(self), name))}
        made = [part for name, value in given.items() for part in (f"--{name.replace('_', '-')}", str(value))]
        return [*made, "--headless"] if self.node_rank else made
