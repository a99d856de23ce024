"""`outpace serve`: an OpenAI-compatible server."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outpace.cli.options import (
    Budget,
    Device,
    Drafter,
    Dtype,
    Exact,
    Loading,
    MaxModelLen,
    Method,
    Quantize,
    SpeculativeConfig,
    notes,
    refuse_options,
)
from outpace.cli.serve_vllm import serve_with_vllm
from outpace.lib.checks import check_range
from outpace.lib.errors import InvalidRequest

if TYPE_CHECKING:
    from outpace.api import Model

OURS, VLLM = "outpace", "vllm"
ONLY_IN_VLLM = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "data_parallel_size",
    "nnodes",
    "node_rank",
    "master_addr",
    "master_port",
    "vllm_arguments",
)
PANEL = "With --engine vllm"
TensorParallel = Annotated[int, typer.Option(min=1, rich_help_panel=PANEL, help="GPUs that share each layer.")]
PipelineParallel = Annotated[
    int, typer.Option(min=1, rich_help_panel=PANEL, help="GPUs that share the stack of layers.")
]
DataParallel = Annotated[
    int, typer.Option(min=1, rich_help_panel=PANEL, help="Copies of the model, each with requests of its own.")
]
Nodes = Annotated[
    int, typer.Option(min=1, rich_help_panel=PANEL, help="Machines. Each runs this command, with its rank.")
]
NodeRank = Annotated[int | None, typer.Option(min=0, rich_help_panel=PANEL, help="Of this machine; rank 0 answers.")]
MasterAddress = Annotated[str | None, typer.Option(rich_help_panel=PANEL, help="Where rank 0 is.")]
MasterPort = Annotated[int | None, typer.Option(min=1, max=65535, rich_help_panel=PANEL, help="Where ranks meet.")]


def serve(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="Folder, GGUF file, pulled name or hub id.")],
    vllm_arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[-- VLLM...]", help="vLLM's own options, with --engine vllm.")
    ] = None,
    engine: Annotated[
        str, typer.Option(help="outpace, or vllm: vLLM with our drafters, for several GPUs and machines.")
    ] = OURS,
    method: Method = None,
    drafter: Drafter = None,
    budget: Budget = None,
    speculative_config: SpeculativeConfig = None,
    dtype: Dtype = "auto",
    quantize: Quantize = "none",
    device: Device = "auto",
    max_model_len: MaxModelLen = None,
    exact: Exact = False,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Requests decoded at a time.")] = 8,
    served_model_name: Annotated[
        list[str] | None, typer.Option(help="What requests call the model; may be given several times.")
    ] = None,
    chat_template: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="A Jinja file instead of the model's own.")
    ] = None,
    host: Annotated[str, typer.Option(help="Where to listen; 0.0.0.0 for everywhere.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 8000,
    api_key: Annotated[
        list[str] | None,
        typer.Option(envvar="OUTPACE_API_KEY", help="A key that requests must bear; several times for several."),
    ] = None,
    enable_prefix_caching: Annotated[bool, typer.Option(help="Compute a common beginning of prompts once.")] = True,
    max_queue: Annotated[int, typer.Option(min=0, help="Answers that may wait; more get 429.")] = 64,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds that a request may take, waiting included.")] = 600,
    send_timeout: Annotated[float, typer.Option(min=0.1, help="Seconds that a client may not read or write.")] = 60,
    max_body: Annotated[int, typer.Option(min=1, help="Bytes of a request.")] = 4 << 20,
    max_methods: Annotated[int, typer.Option(min=0, help="Different methods that requests may name.")] = 16,
    drain_timeout: Annotated[float, typer.Option(min=0, help="Seconds to finish in after SIGTERM.")] = 30,
    log_prompts: Annotated[bool, typer.Option("--log-prompts", help="Log what is asked.")] = False,
    tensor_parallel_size: TensorParallel = 1,
    pipeline_parallel_size: PipelineParallel = 1,
    data_parallel_size: DataParallel = 1,
    nnodes: Nodes = 1,
    node_rank: NodeRank = None,
    master_addr: MasterAddress = None,
    master_port: MasterPort = None,
) -> None:
    """Serve a model over HTTP as OpenAI does: chat, completions, streams, metrics."""
    keys = tuple(api_key or ())
    if any(not key.strip() for key in keys):
        raise InvalidRequest("api_key='': an empty key would let everybody in; leave the option out instead")
    from outpace.serve.settings import LOOPBACK

    if host not in LOOPBACK and not keys:
        notes.print(f"anybody who can reach {host}:{port} can use this server: give --api-key", style="yellow")
    names = tuple(served_model_name or (Path(model).resolve().name if Path(model).exists() else model,))
    if engine == VLLM:
        serve_with_vllm(context, names, keys)
    if engine != OURS:
        raise InvalidRequest(f"engine={engine!r}: choose {OURS} or {VLLM}")
    refuse_options(context, ONLY_IN_VLLM, f"{OURS} serves by itself, --engine {VLLM} would take it")
    from outpace.serve.run import serve as run
    from outpace.serve.settings import ServeSettings

    loading = Loading(
        model,
        drafter,
        budget,
        dtype,
        quantize,
        device,
        max_model_len=max_model_len,
        speculative_config=speculative_config,
        exact=exact,
    )
    template = None if chat_template is None else _text_of(chat_template)
    for name, seconds in (("timeout", timeout), ("send_timeout", send_timeout), ("drain_timeout", drain_timeout)):
        check_range(name, seconds, 0.0, float("inf"), "a finite number of seconds")
    settings = ServeSettings(
        names=names,
        host=host,
        port=port,
        api_keys=keys,
        max_queue=max_queue,
        timeout=timeout,
        send_timeout=send_timeout,
        max_body=max_body,
        max_methods=max_methods,
        drain_timeout=drain_timeout,
        log_prompts=log_prompts,
    )

    def load() -> "Model":
        loaded = loading.load(method, max_num_seqs)
        loaded.engine.shares_prefixes = enable_prefix_caching
        if template is not None:
            loaded.codec.tokenizer.chat_template = template
        return loaded

    run(load, settings)


def _text_of(template: Path) -> str:
    try:
        return template.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"chat_template={str(template)!r}: cannot be read as UTF-8 text: {error}") from error
