"""`outpace serve --engine vllm`: vLLM's server, with our drafters."""

from typing import NoReturn

import typer

from outpace.cli.options import notes, quieten_transformers, refuse_options
from outpace.lib.errors import InvalidRequest

ONLY_OURS = (
    "quantize",
    "device",
    "exact",
    "max_queue",
    "timeout",
    "send_timeout",
    "max_body",
    "max_methods",
    "drain_timeout",
    "log_prompts",
)


def serve_with_vllm(context: typer.Context, names: tuple[str, ...], keys: tuple[str, ...]) -> NoReturn:
    """Print the `vllm serve` command that does what was asked, and let it take the place of this process.

    Args:
        context: of the command, whose options are read.
        names: by which requests may call the model.
        keys: that requests may bear.

    Raises:
        InvalidRequest: options that vLLM does not have.
        VllmMissing: it is not installed, or in another version.
        ModelError: no such model or drafter.
    """
    from outpace.vllm.launch import Nodes, VllmServer, command, start

    given = context.params
    refuse_options(context, ONLY_OURS, "vLLM serves; `vllm serve --help=all` lists its own options, to stand behind --")
    nodes = Nodes(
        given["tensor_parallel_size"],
        given["pipeline_parallel_size"],
        given["data_parallel_size"],
        given["nnodes"],
        given["node_rank"],
        address=given["master_addr"],
        port=given["master_port"],
    )
    if len(keys) > 1:
        raise InvalidRequest(f"api_key: {len(keys)} keys, and vLLM reads one; give several as -- --api-key KEY KEY")
    server = VllmServer(
        given["model"],
        nodes,
        names,
        given["host"],
        given["port"],
        keys[0] if keys else None,
        method=given["method"],
        drafter=given["drafter"],
        budget=given["budget"],
        speculative_config=given["speculative_config"],
        more=_named(context),
        arguments=tuple(given["vllm_arguments"] or ()),
    )
    quieten_transformers()
    line = command(server)
    notes.print(str(line), style="bold", highlight=False, markup=False, soft_wrap=True)
    start(line)


def _named(context: typer.Context) -> dict[str, str | None]:
    """Options that both servers have, where they were given."""
    values: dict[str, str | None] = {}
    for name in ("dtype", "max_model_len", "max_num_seqs", "chat_template"):
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            values[name.replace("_", "-")] = str(context.params[name])
    if not context.params["enable_prefix_caching"]:
        values["no-enable-prefix-caching"] = None
    return values
