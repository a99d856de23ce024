"""`outpace chat`: a conversation in the terminal, with a model here or with a server."""

import signal
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outpace.cli.chat_endpoint import chat_endpoint
from outpace.cli.conversation import converse
from outpace.cli.options import (
    ApiKey,
    Budget,
    Device,
    Drafter,
    Dtype,
    Exact,
    Loading,
    MaxModelLen,
    MaxNewTokens,
    Method,
    MinP,
    OptionalModelName,
    Quantize,
    Seed,
    SpeculativeConfig,
    Temperature,
    TopK,
    TopP,
    aside,
    model_for,
    refuse_options,
)
from outpace.core.params import SamplingParams
from outpace.lib.stages import short_name

if TYPE_CHECKING:
    from outpace import Chat, Model, TokenStream

LOADED_WITH = ("drafter", "speculative_config", "dtype", "quantize", "device", "max_model_len", "exact")


def chat(
    context: typer.Context,
    model: OptionalModelName = None,
    url: Annotated[
        str | None,
        typer.Option(
            help="Talk with an OpenAI-compatible server instead: the base of its API, as http://host:8000/v1. The "
            "model is then the server's name for it, by default its only one."
        ),
    ] = None,
    api_key: ApiKey = None,
    method: Method = None,
    drafter: Drafter = None,
    system: Annotated[str | None, typer.Option(help="A system message that opens the conversation.")] = None,
    budget: Budget = None,
    speculative_config: SpeculativeConfig = None,
    max_new_tokens: MaxNewTokens = 1024,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    seed: Seed = None,
    stop: Annotated[list[str] | None, typer.Option(help="Stop string; may be given several times.")] = None,
    dtype: Dtype = "auto",
    quantize: Quantize = "none",
    device: Device = "auto",
    max_model_len: MaxModelLen = None,
    exact: Exact = False,
) -> None:
    """Talk with a model. Each line is a message, from a terminal or a pipe; what was said is not computed again."""
    params = SamplingParams(
        max_new_tokens, temperature, top_k, top_p, min_p, seed, stop=tuple(stop or ())
    )  # checked before a model is loaded
    if url is not None:
        refuse_options(context, LOADED_WITH, f"a server answers, url={url!r}")
        chat_endpoint(url, api_key, model, params, system, method=method, budget=budget)
        return
    loaded = Loading(
        model_for(model, "--url"),
        drafter,
        budget,
        dtype,
        quantize,
        device,
        max_model_len=max_model_len,
        speculative_config=speculative_config,
        exact=exact,
    ).load(method, 1)
    with loaded.chat(system, params) as conversation:
        greeting = (
            f"{short_name(loaded.name)}, method {loaded.method_name}, context of {loaded.target.max_length} tokens"
        )
        converse(lambda text: _answer(conversation, text), conversation.reset, greeting, lambda: _info(loaded))


def _info(model: "Model") -> list[str]:
    """What /info prints."""
    import torch

    from outpace.kernels.build import loaded_kernels, why_none

    target = model.target
    dtype = str(target.rounded_to).removeprefix("torch.")
    precision = dtype if target.quantize == "none" else f"{target.quantize}, from {dtype}"
    lines = [
        f"model: {model.name}, {precision}, on {target.device}",
        f"context: {target.max_length} tokens, prompt and answers together",
        f"method: {model.method_name} ({model.method_from})",
    ]
    if model.drafter is not None:
        lines.append(f"drafter: {model.drafter}")
    if target.device.type == "cpu":
        kernels = "compiled" if loaded_kernels() is not None else f"none, {why_none()}"
        lines.append(f"threads: {torch.get_num_threads()}; kernels: {kernels}")
    return [*lines, str(model.exactness), f"for measurements of this machine: outpace doctor {model.name}"]


def _answer(conversation: "Chat", text: str) -> None:
    with conversation.send(text) as stream:
        before = _stop_on_interrupt(stream)
        try:
            for event in stream:
                print(event.text, end="", flush=True)
        finally:
            signal.signal(signal.SIGINT, before)
            print(flush=True)
    assert stream.result is not None
    metrics = stream.result.metrics
    rate = 1e3 / metrics.tpot_ms if metrics.tpot_ms else 0.0
    aside(
        f"{metrics.new_tokens} tokens, {rate:.1f} tokens/s, {metrics.tokens_per_step:.2f} tokens per step, "
        f"{metrics.reused_tokens} of {metrics.prompt_tokens} prompt tokens reused, "
        f"ended by {stream.result.finish_reason}"
    )


def _stop_on_interrupt(stream: "TokenStream") -> Any:
    """Make Ctrl-C end the answer between two steps, where everything is in order; returns the handler before."""

    def stop(number: int, frame: object) -> None:
        stream.stop()

    return signal.signal(signal.SIGINT, stop)
