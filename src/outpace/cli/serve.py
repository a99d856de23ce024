"""`outpace serve`: an OpenAI-compatible server, ours or vLLM's with our drafters."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from outpace.cli.from_settings import from_settings, options
from outpace.cli.options import LOADING, is_given, load, notes, quieten_transformers, refuse_options
from outpace.core.settings import LoadSettings
from outpace.lib.errors import InvalidRequest
from outpace.serve.settings import LOOPBACK, ServeSettings

if TYPE_CHECKING:
    from outpace.api import Model

OURS, VLLM = "outpace", "vllm"
LIMITS = ("max_queue", "timeout", "send_timeout", "max_body", "max_methods", "drain_timeout", "log_prompts")
NODES = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "data_parallel_size",
    "nnodes",
    "node_rank",
    "master_addr",
    "master_port",
)
"""In the order of `outpace.vllm.launch.Nodes`."""


def _of_vllm(unit: str, text: str, low: int | None = None) -> Any:
    return typer.Option(min=low, metavar=unit, rich_help_panel="With --engine vllm", help=text)


@from_settings(
    loading=options(LoadSettings, *LOADING, "max_num_seqs", "enable_prefix_caching"),
    settings=options(ServeSettings, "names", "host", "port", "api_keys", *LIMITS),
)
def serve(
    context: typer.Context,
    loading: LoadSettings,
    settings: ServeSettings,
    vllm_arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[-- VLLM...]", help="vLLM's own options, with --engine vllm.")
    ] = None,
    engine: Annotated[
        str,
        typer.Option(
            metavar=f"{OURS}|{VLLM}", help="outpace, or vllm: vLLM with our drafters, for several GPUs and machines."
        ),
    ] = OURS,
    chat_template: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="A Jinja file instead of the model's own.")
    ] = None,
    tensor_parallel_size: Annotated[int, _of_vllm("GPUS", "GPUs that share each layer.", 1)] = 1,
    pipeline_parallel_size: Annotated[int, _of_vllm("GPUS", "GPUs that share the stack of layers.", 1)] = 1,
    data_parallel_size: Annotated[
        int, _of_vllm("COPIES", "Copies of the model, each with requests of its own.", 1)
    ] = 1,
    nnodes: Annotated[int, _of_vllm("MACHINES", "Machines. Each runs this command, with its rank.", 1)] = 1,
    node_rank: Annotated[int | None, _of_vllm("RANK", "Of this machine; rank 0 answers.", 0)] = None,
    master_addr: Annotated[str | None, _of_vllm("ADDRESS", "Where rank 0 is.")] = None,
    master_port: Annotated[int | None, _of_vllm("PORT", "Where ranks meet.", 1)] = None,
) -> None:
    """Serve a model over HTTP as OpenAI does: chat, completions, streams, metrics."""
    if settings.host not in LOOPBACK and not settings.api_keys:
        where = f"{settings.host}:{settings.port}"
        notes.print(f"anybody who can reach {where} can use this server: give --api-key", style="yellow")
    if not settings.names:
        path = Path(loading.model)
        settings = replace(settings, names=(path.resolve().name if path.exists() else loading.model,))
    if engine == VLLM:
        _serve_with_vllm(context, loading, settings)
    if engine != OURS:
        raise InvalidRequest(f"engine={engine!r}: choose {OURS} or {VLLM}")
    refuse_options(context, (*NODES, "vllm_arguments"), f"{OURS} serves; --engine {VLLM} takes it")
    from outpace.serve.run import serve as run

    template = None if chat_template is None else _text_of(chat_template)

    def loaded() -> "Model":
        model = load(loading, loading.max_num_seqs)
        if template is not None:
            model.codec.tokenizer.chat_template = template
        return model

    run(loaded, settings)


def _text_of(template: Path) -> str:
    try:
        return template.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"chat_template={str(template)!r}: cannot be read as UTF-8 text: {error}") from error


def _serve_with_vllm(context: typer.Context, loading: LoadSettings, settings: ServeSettings) -> NoReturn:
    """Print the equivalent `vllm serve` command, and replace this process by it."""
    from outpace.vllm.launch import Nodes, VllmServer, command, start

    given, keys = context.params, settings.api_keys
    refuse_options(
        context,
        ("quantize", "device", "exact", *LIMITS),
        "vLLM serves; `vllm serve --help=all` lists its own options, to be given after --",
    )
    nodes = Nodes(*[given[name] for name in NODES])
    if len(keys) > 1:
        raise InvalidRequest(f"api_key: {len(keys)} keys, and vLLM reads one; give several as -- --api-key KEY KEY")
    server = VllmServer(
        loading.model,
        nodes,
        settings.names,
        settings.host,
        settings.port,
        keys[0] if keys else None,
        method=loading.method,
        drafter=loading.drafter,
        budget=loading.budget,
        speculative_config=loading.speculative_config,
        more=_named(context),
        arguments=tuple(given["vllm_arguments"] or ()),
    )
    quieten_transformers()
    line = command(server)
    notes.print(str(line), style="bold", highlight=False, soft_wrap=True)
    start(line)


def _named(context: typer.Context) -> dict[str, str | None]:
    """Options that both servers have, where they were given."""
    shared = ("dtype", "max_model_len", "max_num_seqs", "chat_template")
    values: dict[str, str | None] = {
        name.replace("_", "-"): str(context.params[name]) for name in shared if is_given(context, name)
    }
    if not context.params["enable_prefix_caching"]:
        values["no-enable-prefix-caching"] = None
    return values
