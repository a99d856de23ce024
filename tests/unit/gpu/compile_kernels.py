"""Compiles every kernel for a GPU that need not be there. A program of its own: Triton's interpreter must be off."""

import json
import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from outpace.drafters.domino.gpu import kernels
from outpace.gpu import tree_kernels

TABLES = dict.fromkeys(("rows", "tiles", "items", "tail", "sight"), "*i32")
NUMBERS = dict.fromkeys(("query_row", "query_head", "slot_stride", "head_stride", "words", "window"), "i32")
SUMS = dict.fromkeys(("partial", "peaks", "totals"), "*fp32")
VOCABULARY = 151936


def cases(kind: str) -> list[tuple[Any, dict[str, str], dict[str, Any]]]:
    """Kernels with the types and constants of Qwen3-8B and of an odd model."""
    storage = dict.fromkeys(("query", "keys", "values", "output"), kind)
    attention = storage | SUMS | TABLES | NUMBERS | {"scale": "fp32", "softcap": "fp32"}
    usual = {"HEADS": 32, "GROUP": 4, "GROUP_PADDED": 4, "ROWS": 16, "DIM": 128, "DIM_PADDED": 128, "BLOCK": 64}
    odd = {"HEADS": 28, "GROUP": 7, "GROUP_PADDED": 8, "ROWS": 16, "DIM": 80, "DIM_PADDED": 128, "BLOCK": 64}
    plain, full = ({"WINDOW": has, "CAP": has, "SPLIT": has} for has in (False, True))
    row = {"GROUP_PADDED": 16, "ROWS": 1}
    step = {"BLOCK_ROWS": 16, "BLOCK_INPUTS": 64}
    best = {"base": "*fp32", "low": kind, "weight": kind, "ids": "*i64", "keys": "*i32", "temperatures": "*fp32"}
    best |= {"best": "*fp32", "columns": "*i64", "peaks": "*fp32", "totals": "*fp32", "count": "i32"}
    sizes = {"VOCABULARY": VOCABULARY, "RANK": 256, "WIDTH": 4, "CORRECTED": True, "BLOCK_INPUTS": 64}
    gates = {"gates": kind, "before": "*fp32", "weight": kind, "after": "*fp32", "count": "i32"}
    low = {"of_hidden": kind, "states": "*fp32", "weight": kind, "low": kind, "count": "i32"}
    found = [
        (tree_kernels.attend_tiles, attention, usual | plain),
        (tree_kernels.attend_tiles, attention, odd | full),
        (tree_kernels.attend_paths, attention, usual | row | full),
        (tree_kernels.join, SUMS | {"output": kind, "tiles": "*i32"}, {**usual}),
        (kernels.gru_step, gates, {"SIZE": 1024, "BLOCK": 32, **step}),
        (kernels.low_rank, low, {"RANK": 256, "SIZE": 1024, "BLOCK": 16, **step}),
    ]
    for rows in (16, 64):
        block = 4096 // rows
        tiles = {"TILES": -(-VOCABULARY // block), "BLOCK_ROWS": rows, "BLOCK": block, "MAPPED": rows == 64}
        found.append((kernels.best_of_tiles, best, sizes | tiles))
    return found


def main() -> None:
    """Print which kernels were compiled, and the shared memory that each takes."""
    target = GPUTarget("cuda", int(sys.argv[1]), 32)
    done: dict[str, int] = {}
    for kernel, types, constants in cases(sys.argv[2]):
        names = list(kernel.arg_names)
        wanted = {name: value for name, value in constants.items() if name in names}
        signature = {name: "constexpr" if name in wanted else types[name] for name in names}
        aligned = {
            (place,): [["tt.divisibility", 16]] for place, name in enumerate(names) if signature[name].startswith("*")
        }
        source = ASTSource(
            kernel, signature, constexprs={(names.index(name),): value for name, value in wanted.items()}, attrs=aligned
        )
        is_attention = kernel in (tree_kernels.attend_tiles, tree_kernels.attend_paths)
        options = {"num_stages": 2} if is_attention else {}  # as they are launched
        built = triton.compile(source, target=target, options=options)
        done[f"{kernel.__name__} {len(done)}"] = built.metadata.shared
    print(json.dumps(done))


if __name__ == "__main__":
    main()
