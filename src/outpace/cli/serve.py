"""`outpace serve`: an OpenAI-compatible server, ours or vLLM's with our drafters."""

import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from outpace.cli.from_settings import from_settings, options
from outpace.cli.options import LOADING, SERVING, is_given, load, notes, quieten_transformers, refuse_options
from outpace.core.settings import LoadSettings, settings_of
from outpace.lib.errors import InvalidRequest
from outpace.lib.stages import short_name
from outpace.serve.settings import LOOPBACK, ServeSettings
from outpace.vllm.nodes import Nodes

if TYPE_CHECKING:
    from outpace.api import Model

OURS, VLLM = "outpace", "vllm"
MESSAGE = "Is this shown?"
LIMITS = ("max_queue", "timeout", "send_timeout", "max_body", "drain_timeout", "log_prompts")


@from_settings(
    loading=options(LoadSettings, *LOADING, *SERVING),
    settings=options(ServeSettings, "names", "host", "port", "api_keys", *LIMITS),
    nodes=replace(options(Nodes, *settings_of(Nodes)), panel="With --engine vllm"),
)
def serve(
    context: typer.Context,
    loading: LoadSettings,
    settings: ServeSettings,
    nodes: Nodes,
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
) -> None:
    """Serve a model over HTTP as OpenAI does: chat, completions, streams, metrics."""
    if not settings.api_keys and "OUTPACE_API_KEY" in os.environ:
        raise InvalidRequest("OUTPACE_API_KEY is blank: an empty key would admit everybody; unset it instead")
    if settings.host not in LOOPBACK and not settings.api_keys:
        where = f"{settings.host}:{settings.port}"
        notes.print(f"anybody who can reach {where} can use this server: give --api-key", style="yellow")
    if not settings.names:
        settings = replace(settings, names=(short_name(loading.model),))
    if engine == VLLM:
        _serve_with_vllm(context, loading, settings, nodes)
    if engine != OURS:
        raise InvalidRequest(f"engine={engine!r}: choose {OURS} or {VLLM}")
    refuse_options(context, (*settings_of(Nodes), "vllm_arguments"), f"{OURS} serves; --engine {VLLM} takes it")
    from outpace.serve.run import serve as run

    template = None if chat_template is None else _text_of(chat_template)

    def loaded() -> "Model":
        model = load(loading, loading.max_num_seqs)
        if chat_template is not None:
            model.codec.tokenizer.chat_template = template
            _check_template(model, chat_template)
        _prepare(model)
        return model

    run(loaded, settings)


def _prepare(model: "Model") -> None:
    """Do before the server is ready what first requests would wait for, and with them all that are being answered:
    requests that share rounds or name another method may follow times of passes, and a large vocabulary takes a grammar
    a second in which Python runs no other thread."""
    model.engine.time_passes()
    with suppress(InvalidRequest, ImportError):  # requests with grammars fail, with the reason
        model.engine.prepare_grammars()
    with suppress(InvalidRequest):  # a model without a chat template
        model.encode([{"role": "user", "content": "?"}])


def _text_of(template: Path) -> str:
    try:
        text = template.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"chat_template={str(template)!r}: cannot be read as UTF-8 text: {error}") from error
    if not text.strip():
        raise InvalidRequest(f"chat_template={str(template)!r}: is empty; give a Jinja template, or leave it out")
    return text


def _check_template(model: "Model", template: Path) -> None:
    """Refuse a template that fails on a message or leaves it out, as a file of another kind does: the server would
    refuse every chat, or answer without having read it."""
    asked = {"role": "user", "content": MESSAGE}
    try:
        try:
            shown = model.codec.render_chat([asked])
        except InvalidRequest:  # some templates demand a system message
            shown = model.codec.render_chat([{"role": "system", "content": "Be brief."}, asked])
    except InvalidRequest as error:
        raise InvalidRequest(f"chat_template={str(template)!r}: {error}") from error
    if MESSAGE not in shown:
        raise InvalidRequest(f"chat_template={str(template)!r}: leaves messages out; give a Jinja template of messages")


def _serve_with_vllm(context: typer.Context, loading: LoadSettings, settings: ServeSettings, nodes: Nodes) -> NoReturn:
    """Print the equivalent `vllm serve` command, and replace this process by it."""
    from outpace.vllm.launch import VllmServer, command, start

    keys = settings.api_keys
    refuse_options(
        context,
        ("quantize", "kv_cache_dtype", "device", "prompt_slowdown", "exact", *LIMITS),
        "vLLM serves; `vllm serve --help=all` lists its own options, to be given after --",
    )
    if len(keys) > 1:
        raise InvalidRequest(f"api_key: {len(keys)} keys, and vLLM reads one; give several as -- --api-key KEY KEY")
    server = VllmServer(
        loading,
        nodes,
        settings.names,
        settings.host,
        settings.port,
        api_key=keys[0] if keys else None,
        more=_named(context),
        arguments=tuple(context.params["vllm_arguments"] or ()),
    )
    quieten_transformers()
    line = command(server)
    notes.print(str(line), style="bold", highlight=False, soft_wrap=True)
    start(line)


def _named(context: typer.Context) -> dict[str, str | None]:
    """Given options that both servers have, by vLLM's names."""
    shared = ("dtype", "max_model_len", "max_num_seqs", "kv_cache_memory_bytes", "chat_template")
    values: dict[str, str | None] = {
        name.replace("_", "-"): str(context.params[name]) for name in shared if is_given(context, name)
    }
    if not context.params["enable_prefix_caching"]:
        values["no-enable-prefix-caching"] = None
    return values
