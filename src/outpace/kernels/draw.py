"""Keyed draws by the compiled kernels (cpp/draw.h), which compute little of a vocabulary's noise.

Python reference: `sampling.verification.draw_keyed`.
"""

from collections.abc import Sequence

import torch

from outpace.core.protocols import NodeOutputs
from outpace.kernels import structs
from outpace.kernels.build import call, loaded_kernels, threads

_KINDS = (torch.float32, torch.bfloat16)


def draws_natively(outputs: NodeOutputs) -> bool:
    """Whether the kernels draw from these logits."""
    logits = outputs.logits
    readable = logits.device.type == "cpu" and logits.dtype in _KINDS and logits.stride(1) == 1
    return readable and loaded_kernels() is not None


def draw_natively(
    rows: Sequence[tuple[NodeOutputs, int]], temperatures: Sequence[float], keys: Sequence[tuple[int, int]]
) -> list[int]:
    """argmax(logits / temperature + g) per row in double precision, the first of equals.

    Args:
        rows: outputs and the number of one of their nodes.
        temperatures: above 0.
        keys: of the noise.
    """
    drawn = structs.array(structs.Drawn, len(rows))()
    kept = []
    for one, (outputs, node), temperature, key in zip(drawn, rows, temperatures, keys, strict=True):
        top_ids, top_logits = outputs.top_ids[node].contiguous(), outputs.top_logits[node].contiguous()
        logits = outputs.logits[node]
        kept += [top_ids, top_logits, logits]
        one.logits, one.is_bfloat16 = logits.data_ptr(), logits.dtype == torch.bfloat16
        one.top_ids, one.top_logits = top_ids.data_ptr(), top_logits.data_ptr()
        one.temperature, one.width, one.top_count = temperature, len(logits), len(top_ids)
        one.key[0], one.key[1] = key
    call("draw", drawn, len(rows), threads())
    return [int(one.token) for one in drawn]
