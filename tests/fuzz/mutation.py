"""Damage with fixed seeds: of JSON, of tensors by name, of bytes. Every case has a name that says what was done."""

import copy
import os
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

MORE = "OUTPACE_FUZZ_FACTOR"
"""How many times the cases of each test are run; campaigns set it to 10 or 100."""
WEIRD: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 7, 0.0, 0.5, 2.5, -0.5, 1e-320, 1e38, 1e300, 10**6, 2**31, 2**40, 10**9, 10**30,
    float("inf"), float("-inf"), float("nan"), "", "x", "1", "\0", "\ud800", "../../etc/passwd", "é" * 40, [], {}, [[]],
    [None], [1], [-1, 2**70], ["full_attention"], ["sliding_attention"] * 3, {"a": {"b": 1}}, {"0": 0},
    {"rope_type": "linear"}, {"rope_type": "yarn", "factor": 0.0}, {"rope_type": "llama3", "factor": "x"},
    {"rope_type": "dynamic", "factor": 2.0}, {"type": "yarn"}, {"rope_theta": -1.0}, {"rope_type": ["default"]},
)  # fmt: skip


def factor() -> int:
    return int(os.environ.get(MORE, "1"))


def deep(levels: int = 100_000) -> str:
    """JSON nested deeper than any reader goes."""
    return '{"a":' * levels + "1" + "}" * levels


def places(value: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in JSON; of lists the first few."""
    keys = value if isinstance(value, dict) else range(min(len(value), 3)) if isinstance(value, list) else ()
    for key in keys:
        yield (*above, key)
        yield from places(value[key], (*above, key))


def at(value: Any, place: Sequence[Any]) -> Any:
    for key in place:
        value = value[key]
    return value


def json_mutants(value: Any, cases: int, seed: int, more: Sequence[str] = ()) -> Iterator[tuple[str, Any]]:
    """Copies with one to three edits: something odd, a neighbour of what was there, nothing, or a field of others.

    Args:
        value: an object.
        cases: how many.
        seed: of the first.
        more: names of fields to add.
    """
    for case in range(cases):
        draw = random.Random(f"{seed}-{case}")
        changed, said = copy.deepcopy(value), []
        for _ in range(draw.choice((1, 1, 1, 2, 3))):
            known = list(places(changed))
            if not known or (more and draw.random() < 0.2):
                key, new = draw.choice([*more, "extra"]), draw.choice(WEIRD)
                changed[key] = new
                said.append(f"{key}:={new!r:.40}")
                continue
            place = draw.choice(known)
            holder = at(changed, place[:-1])
            if draw.random() < 0.2:
                del holder[place[-1]]
                said.append(f"-{place}")
            else:
                holder[place[-1]] = new = _other(holder[place[-1]], draw)
                said.append(f"{place}={new!r:.40}")
        yield "; ".join(said), changed


def _other(value: Any, draw: random.Random) -> Any:
    near: list[Any] = [copy.deepcopy(draw.choice(WEIRD))]
    if isinstance(value, bool):
        near.append(not value)
    elif isinstance(value, int | float):
        near += [value + 1, value - 1, value * 2, value // 2, -value, float(value), str(value), [value]]
    elif isinstance(value, str):
        near += [value[:-1], value + "x", value.upper(), [value]]
    elif isinstance(value, list):
        near += [value[:-1], value * 2, list(reversed(value)), {"0": value}]
    elif isinstance(value, dict):
        near += [list(value.items()), {"inside": value}]
    return draw.choice(near)


TENSOR_EDITS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda one: one.T.contiguous() if one.dim() == 2 else torch.cat((one, one)),
    "a row short": lambda one: one[:-1].clone(),
    "a row more": lambda one: torch.cat((one, one[:1])) if one.dim() else one[None],
    "flat": lambda one: one.flatten()[:, None] if one.dim() == 1 else one.flatten(),
    "deeper": lambda one: one[None].clone(),
    "one number": lambda one: one.flatten()[:1].sum(),
    "empty": lambda one: one[:0].clone() if one.dim() else one[None][:0].clone(),
    "int8": lambda one: torch.ones(one.shape, dtype=torch.int8),
    "int64": lambda one: torch.ones(one.shape, dtype=torch.int64),
    "bool": lambda one: torch.ones(one.shape, dtype=torch.bool),
    "float8": lambda one: torch.ones(one.shape).to(torch.float8_e4m3fn),
    "complex": lambda one: torch.ones(one.shape, dtype=torch.complex64),
    "NaN": lambda one: torch.full(one.shape, torch.nan),
}


def tensor_mutants(tensors: dict[str, Tensor], cases: int, seed: int) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Copies in which tensors are missing, added, renamed, exchanged or of other shapes and kinds.

    What nobody could notice is not among them: other numbers of the same kind and shape.
    """
    names = sorted(tensors)
    for case in range(cases):
        draw = random.Random(f"{seed}-{case}")
        changed, said = dict(tensors), []
        for _ in range(draw.choice((1, 1, 2))):
            name, edit = draw.choice(names), draw.choice(("drop", "add", "rename", "exchange", "edit", "edit", "edit"))
            if name not in changed:
                continue
            if edit == "drop":
                del changed[name]
            elif edit == "add":
                changed[draw.choice((f"{name}.x", f"x.{name}", "extra", name.replace("0", "9") + "s"))] = torch.ones(3)
            elif edit == "rename":
                changed[draw.choice((name.upper(), name[:-1], f"model.{name}", name.replace("0", "7") + "_"))] = (
                    changed.pop(name)
                )
            elif edit == "exchange":
                other = draw.choice([one for one in changed if changed[one].shape != changed[name].shape] or [name])
                changed[name], changed[other] = changed[other], changed[name]
            else:
                edit = draw.choice(sorted(TENSOR_EDITS))
                new = TENSOR_EDITS[edit](changed[name])
                if new.shape == changed[name].shape and new.dtype == changed[name].dtype and edit != "NaN":
                    continue  # square, or empty before
                changed[name] = new
            said.append(f"{edit} {name}")
        if said:
            yield "; ".join(said), changed


def byte_mutants(content: bytes, end: int, cases: int, seed: int) -> Iterator[tuple[str, bytes]]:
    """Copies whose first `end` bytes are flipped, overwritten or cut, or that are cut off or go on.

    Args:
        content: of a file.
        end: of its header.
        cases: how many.
        seed: of the first.
    """
    for case in range(cases):
        draw = random.Random(f"{seed}-{case}")
        changed, said = bytearray(content), []
        for _ in range(draw.choice((1, 1, 2, 8))):
            edit = draw.choice(("flip", "flip", "set", "large", "cut out", "cut off", "longer"))
            place = draw.randrange(end)
            if edit == "flip":
                changed[place % len(changed)] ^= 1 << draw.randrange(8)
            elif edit == "set":
                changed[place % len(changed)] = draw.randrange(256)
            elif edit == "large":
                changed[place : place + 8] = draw.choice((2**63, 2**40, 2**64 - 1, 10**6)).to_bytes(8, "little")
            elif edit == "cut out":
                del changed[place : place + draw.randrange(1, 9)]
            elif edit == "cut off":
                del changed[max(1, draw.randrange(len(changed))) :]
            else:
                changed += bytes(draw.randrange(1, 4096))
            said.append(f"{edit} {place}")
            end = max(1, min(end, len(changed)))
        if bytes(changed) != content:
            yield "; ".join(said), bytes(changed)
