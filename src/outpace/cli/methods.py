"""`outpace methods`: the methods, what they need, and their options."""

import json
from typing import Annotated, Any

import typer

from outpace.lib.errors import InvalidRequest


def methods(
    name: Annotated[
        str | None, typer.Argument(help="The method whose options are listed; without one, all methods are listed.")
    ] = None,
    shape: Annotated[str | None, typer.Option(help="The shape whose settings are listed, by default its own.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """List the methods, or the options of one with their types, defaults and meaning."""
    from rich.console import Console

    from outpace.bench.sheet import UNLIMITED, Column, Sheet
    from outpace.drafters.model_options import ModelOptions
    from outpace.drafters.options import described, written
    from outpace.methods.catalog import method_named, option_kinds, presets_of
    from outpace.methods.catalog import methods as known

    if name is None and shape is not None:
        raise InvalidRequest(f"shape={shape!r}: name its method too, as in `outpace methods domino --shape beam`")
    console = Console(highlight=False, markup=False)
    if name is None:
        rows: list[dict[str, Any]] = [
            {"name": key, "needs": method.needs, "summary": method.summary, "presets": list(presets_of(key))}
            for key, method in known().items()
        ]
        if as_json:
            print(json.dumps({"methods": rows}))
            return
        columns = (Column("method", is_name=True), Column("needs", prose=24), Column("what it drafts", prose=UNLIMITED))
        Sheet(columns, [(row["name"], row["needs"], row["summary"]) for row in rows]).show()
        with_presets = ", ".join(row["name"] for row in rows if row["presets"])
        console.print(f"Presets: NAME:as=paper takes the constants of its paper, for NAME in {with_presets}.")
        console.print("Options of one: outpace methods NAME. Use: --method NAME:option=value,option=value")
        return
    method = method_named(name)
    if shape is not None:
        taken = method.options.shape_names() if issubclass(method.options, ModelOptions) else ()
        if shape not in taken:
            known_shapes = f"choose one of {', '.join(taken)}" if taken else f"{name} has no shapes to choose from"
            raise InvalidRequest(f"shape={shape}: {known_shapes}")
    options = [
        dict(zip(("name", "type", "default", "meaning"), row, strict=True))
        for kind in option_kinds(method.options, shape)
        for row in described(kind)
    ]
    if as_json:
        about = {"name": name, "needs": method.needs, "summary": method.summary}
        print(json.dumps({**about, "options": options, "presets": presets_of(name)}))
        return
    console.print(f"{name}: {method.summary}\nneeds {method.needs}\n")
    # Values and default share a column, which leaves most of a narrow terminal to the sentences.
    columns = (Column("option", is_name=True), Column("values (default)", prose=22), Column("meaning", prose=UNLIMITED))
    cells = [(one["name"], f"{one['type']} ({written(one['default'])})", one["meaning"]) for one in options]
    Sheet(columns, cells, has_lines=True).show()
    for preset, stands_for in presets_of(name).items():
        values = ",".join(f"{option}={written(value)}" for option, value in stands_for.items())
        console.print(f"preset: {name}:as={preset} is {name}:{values}; other options take precedence")
    if issubclass(method.options, ModelOptions):
        names = method.options.shape_names()
        console.print(f"shapes: {', '.join(names)}; settings of one: outpace methods {name} --shape SHAPE")
