"""`outpace doctor`: why is it slow, or not exact."""

import json
from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING

import typer
from rich.text import Text

from outpace import __version__
from outpace.cli.from_settings import from_settings
from outpace.cli.options import AsJson, console, is_given, load, loading_options, working
from outpace.core.settings import LoadSettings
from outpace.lib.errors import InvalidRequest

if TYPE_CHECKING:
    from outpace.doctor.finding import Finding


OPTIONS = loading_options("speculative_config", "exact", model=None)


@from_settings(loading=OPTIONS)
def doctor(
    context: typer.Context,
    loading: LoadSettings,
    as_json: AsJson = False,
) -> None:
    """Measure the machine, a model on it and its method, and say why decoding is slow or not exact, with remedies. Exit
    status 1 if anything needs a look."""
    model = loading.model
    if model is None and any(is_given(context, name) for name in OPTIONS.names):
        raise InvalidRequest("MODEL is missing: these options need one; without it, only the machine is examined")
    from outpace.doctor.machine import examine_machine
    from outpace.doctor.method import examine_method
    from outpace.doctor.model import examine_model

    found = _shown("the machine", examine_machine(), as_json)
    if model is not None:
        loaded = load(loading, 1)
        found += _shown(f"{model} on it", examine_model(loaded, _unwell(found)), as_json)
        against = "" if loaded.method_name == "plain" else " against plain decoding"
        found += _shown(f"{loaded.method_name}{against}", examine_method(loaded), as_json)
    unwell = _unwell(found)
    if as_json:
        print(json.dumps({"outpace": __version__, "fine": not unwell, "findings": list(map(asdict, found))}))
    elif unwell:
        console.print(f"\nto look at: {', '.join(unwell)} ({len(unwell)} of {len(found)})", soft_wrap=True)
    else:
        console.print(f"\nall {len(found)} are fine")
    raise typer.Exit(1 if unwell else 0)


def _unwell(findings: "Iterable[Finding]") -> list[str]:
    return [one.name for one in findings if not one.is_fine]


def _shown(title: str, findings: "Iterable[Finding]", as_json: bool) -> "list[Finding]":
    """Collect findings, and print each at once unless `as_json`."""
    if not as_json:
        console.print(f"\n{title}", style="bold", highlight=False, soft_wrap=True)
    kept: list[Finding] = []
    left = iter(findings)
    while True:
        with working(f"examining {title}"):  # ends first: what is printed would continue the line of the spinner
            one = next(left, None)
        if one is None:
            return kept
        kept.append(one)
        if not as_json:
            _print(one)


def _print(one: "Finding") -> None:
    color = "green" if one.is_fine else "yellow"
    line = Text.assemble("  ", (f"{one.verdict:9}", color), f"  {one.name}: {one.measured}")
    console.print(line, highlight=False, soft_wrap=True)
    if one.remedy:
        console.print(f"             -> {one.remedy}", highlight=False, soft_wrap=True)
