"""`outpace convert`: a drafter checkpoint in another layout."""

import json
import math
from typing import Annotated

import typer

from outpace.cli.options import AsJson, console, quieten_transformers, working


def convert(
    source: Annotated[
        str, typer.Argument(metavar="IN", help="Folder or hub id of a drafter in any known layout, or a shipped one.")
    ],
    out: Annotated[str, typer.Argument(metavar="OUT", help="Folder to write; must not exist.")],
    layout: Annotated[
        str | None,
        typer.Option(
            "--to",
            metavar="LAYOUT",
            help="eagle3: midlayer, speculators, headless (for shipped drafters). dflash: z-lab. domino: domino, "
            "sglang. lattice: lattice. dspark: specforge. dflash2: z-lab. medusa: authors, vllm. dart: dart. By "
            "default the kind's first. All known layouts are read.",
        ),
    ] = None,
    target: Annotated[
        str | None, typer.Option(metavar="MODEL", help="The target's name, which the layout speculators keeps.")
    ] = None,
    target_weights: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="Folder, pulled name or hub id of the target, in safetensors, whose LM head is copied where a drafter "
            "has none and the layout needs one.",
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            metavar="DTYPE", help="Cast to float32, bfloat16 (for Domino in SGLang) or float16; by default unchanged."
        ),
    ] = None,
    weights: Annotated[
        str,
        typer.Option(
            metavar="FORMAT",
            help="plain; or int8: half the size of bfloat16, which compiled kernels multiply as it is. Only Outpace "
            "reads int8.",
        ),
    ] = "plain",
    as_json: AsJson = False,
) -> None:
    """Write a drafter in another layout, read it back and compare: exit status 1, and no OUT, if it differs."""
    with working(f"converting {source}"):
        quieten_transformers()
        from outpace.drafters.convert import convert as convert_files
        from outpace.models.loading.shipped import find_drafter

        done = convert_files(
            find_drafter(source),
            out,
            layout,
            target=target,
            target_weights=target_weights,
            dtype=dtype,
            weights=weights,
        )
    stored = done.dtype if done.weights == "plain" else done.weights
    difference = done.difference if math.isfinite(done.difference) else None  # JSON knows no infinity
    if as_json:
        report = {"in": source, "out": out, "kind": done.kind, "layout": done.layout, "dtype": done.dtype}
        verdict = {"difference": difference, "changed": done.changed, "equal": done.is_equal}
        print(json.dumps({**report, "weights": done.weights, **verdict}))
    else:
        console.print(
            f"{'EQUAL' if done.is_equal else 'DIFFERENT'}: {done.kind} as {done.layout} in {stored}, "
            f"largest relative difference of weights {done.difference:g}"
            f"{''.join(f'; {change}' for change in done.changed)}{'' if done.is_equal else f'; {out} is removed'}",
            highlight=False,
            soft_wrap=True,
            markup=False,
        )
    raise typer.Exit(0 if done.is_equal else 1)
