"""`outpace models`: what can be loaded by name."""

import json
from dataclasses import asdict
from typing import Annotated, Any

import typer

from outpace.cli.command import Command, Group
from outpace.cli.from_settings import completion
from outpace.cli.options import AsJson, console, quieten_transformers
from outpace.lib.stages import loading

models_app = typer.Typer(cls=Group, no_args_is_help=True, help="Models that can be loaded by name.")


@models_app.command("pull", cls=Command)
def models_pull(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            autocompletion=completion("model"),
            help="A built-in model, such as smollm2-135m, or REPO:QUANT of a GGUF file on the hub.",
        ),
    ],
) -> None:
    """Fetch a model and its drafters, check them and keep them. A download that was stopped is continued, except
    smollm2-135m's."""
    quieten_transformers()
    from outpace.models.loading.pull import pull, pull_drafters

    with loading(name, True, done="pulled"):
        place = pull(name)
        pull_drafters(name)
    print(place)


@models_app.command("list", cls=Command)
def models_list(as_json: AsJson = False) -> None:
    """Show the built-in models, where pulled ones lie, and the trained drafters that ship."""
    from outpace.models.loading.registry import BUILT_IN, pulled
    from outpace.models.loading.shipped import shipped, size_of

    ready = pulled()
    rows: list[dict[str, Any]] = [
        {"name": name, "origin": model.origin, "folder": str(ready[name]) if name in ready else None}
        for name, model in BUILT_IN.items()
    ]
    for row in rows:
        own = {name: folder for name, folder in shipped().items() if name.partition("/")[0] == row["name"]}
        row["drafters"] = [{"name": name, "folder": str(path), **asdict(size_of(path))} for name, path in own.items()]
    if as_json:
        print(json.dumps(rows))
        return
    for row in rows:
        console.print(f"{row['name']}  {row['origin']}  {row['folder'] or 'not pulled'}", soft_wrap=True)
        for drafter in row["drafters"]:
            millions, megabytes = drafter["parameters"] / 1e6, drafter["megabytes"]
            console.print(
                f"  {drafter['name']}  {millions:.1f}M parameters, {megabytes:.1f} MB", highlight=False, soft_wrap=True
            )
