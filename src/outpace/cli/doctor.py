"""`outpace doctor`: why is it slow, or not exact."""

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from outpace import __version__
from outpace.cli.options import (
    AsJson,
    Budget,
    Device,
    Drafter,
    Dtype,
    Loading,
    MaxModelLen,
    Method,
    Quantize,
    console,
    working,
)
from outpace.lib.errors import InvalidRequest

if TYPE_CHECKING:
    from outpace.doctor.finding import Finding


def doctor(
    model: Annotated[
        str | None, typer.Argument(help="Folder, GGUF file, pulled name or hub id; none looks at the machine alone.")
    ] = None,
    method: Method = None,
    drafter: Drafter = None,
    budget: Budget = None,
    dtype: Dtype = "auto",
    quantize: Quantize = "none",
    device: Device = "auto",
    max_model_len: MaxModelLen = None,
    as_json: AsJson = False,
) -> None:
    """Find out why it is slow, or not exact: of the machine, a model on it and its method, measurements with remedies.
    Exit status 1 if anything needs a look."""
    of_model = (method, drafter, budget, dtype, quantize, device, max_model_len)
    if model is None and of_model != (None, None, None, "auto", "none", "auto", None):
        raise InvalidRequest("MODEL is missing: without one the machine alone is looked at, and takes no such options")
    from outpace.doctor.machine import examine_machine
    from outpace.doctor.method import examine_method
    from outpace.doctor.model import examine_model

    found = _shown("the machine", examine_machine(), as_json)
    if model is not None:
        loaded = Loading(model, drafter, budget, dtype, quantize, device, max_model_len=max_model_len).load(method, 1)
        found += _shown(f"{model} on it", examine_model(loaded, _unwell(found)), as_json)
        beside = "" if loaded.method_name == "plain" else " beside plain decoding"
        found += _shown(f"{loaded.method_name}{beside}", examine_method(loaded), as_json)
    unwell = _unwell(found)
    if as_json:
        print(json.dumps({"outpace": __version__, "fine": not unwell, "findings": [one.as_dict() for one in found]}))
    elif unwell:
        console.print(f"\nto look at: {', '.join(unwell)} ({len(unwell)} of {len(found)})", soft_wrap=True)
    else:
        console.print(f"\nall {len(found)} are fine")
    raise typer.Exit(1 if unwell else 0)


def _unwell(findings: "Iterable[Finding]") -> list[str]:
    return [one.name for one in findings if not one.is_fine]


def _shown(title: str, findings: "Iterable[Finding]", as_json: bool) -> "list[Finding]":
    """The findings, printed as they come unless they are for a machine."""
    if not as_json:
        console.print(f"\n{title}", style="bold", highlight=False)
    kept = []
    with working(f"examining {title}"):
        for one in findings:
            kept.append(one)
            if not as_json:
                _print(one)
    return kept


def _print(one: "Finding") -> None:
    color = "green" if one.is_fine else "yellow"
    line = Text.assemble("  ", (f"{one.verdict:9}", color), f"  {one.name}: {one.measured}")
    console.print(line, highlight=False, soft_wrap=True)
    if one.remedy:
        console.print(f"             -> {one.remedy}", highlight=False, soft_wrap=True)
