"""`outpace train`: from prompts to a drafter, step by step."""

import json
from time import perf_counter
from typing import Annotated

import typer

from outpace.cli.command import Command
from outpace.cli.options import (
    ApiKey,
    Device,
    Dtype,
    MaxModelLen,
    MinP,
    Prompts,
    Target,
    Temperature,
    TopK,
    TopP,
    load,
    notes,
    progress_bar,
    quieten_transformers,
)
from outpace.cli.train_methods import TrainGroup, capture
from outpace.cli.train_transitions import transitions
from outpace.core.params import SamplingParams
from outpace.core.settings import LoadSettings
from outpace.lib.errors import InvalidRequest

train_app = typer.Typer(cls=TrainGroup, no_args_is_help=True, help=__doc__)


train_app.command(cls=Command)(capture)
train_app.command(cls=Command)(transitions)


@train_app.callback()
def train() -> None:
    """From prompts to a drafter for your model, step by step."""


@train_app.command(cls=Command)
def regenerate(
    target: Target,
    prompts: Prompts,
    out: Annotated[str, typer.Option(help="Folder for the answers; an unfinished run goes on there.")],
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens to generate per turn.")] = 192,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    seed: Annotated[int, typer.Option(help="Key of the sampling noise.")] = 0,
    method: Annotated[str, typer.Option(help="How to draft; a full batch seldom gains from it.")] = "plain",
    drafter: Annotated[str | None, typer.Option(help="For the methods that need one.")] = None,
    batch_size: Annotated[int, typer.Option(help="Conversations at a time.", min=1)] = 16,
    max_model_len: MaxModelLen = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    endpoint: Annotated[str | None, typer.Option(help="Ask this OpenAI-compatible server, as http://host/v1.")] = None,
    endpoint_model: Annotated[
        str | None, typer.Option(help="The target's name there; by default the server's only model.")
    ] = None,
    api_key: ApiKey = None,
) -> None:
    """Let the target answer prompts: token ids by prompt id, resumable."""
    from outpace.data.workload import read_workloads

    if endpoint is not None and (method != "plain" or drafter is not None):
        raise InvalidRequest(f"method={method!r}, drafter={drafter!r}: an endpoint drafts as it likes; leave them out")
    if endpoint is None and endpoint_model is not None:
        raise InvalidRequest(f"endpoint_model={endpoint_model!r}: there is no endpoint to ask for it; leave it out")
    items = read_workloads(prompts)
    params = SamplingParams(max_new_tokens, temperature, top_k, top_p, min_p, seed=seed)
    quieten_transformers()
    from outpace.data.answers import AnswerStore
    from outpace.models.loading.load import load_vocabulary_facts
    from outpace.train.regenerate import Answerer, EngineAnswerer, about_answers, check_templates, regenerate

    codec, vocab_size, eos = load_vocabulary_facts(target)
    check_templates(items, codec, target)
    store = AnswerStore(out, about_answers(target, codec, vocab_size, params, endpoint, dtype))
    answerer: Answerer
    if endpoint is None:
        settings = LoadSettings(
            model=target, method=method, drafter=drafter, dtype=dtype, device=device, max_model_len=max_model_len
        )
        model = load(settings, batch_size)
        answerer = EngineAnswerer(model, params, method)
    else:
        from outpace.endpoint.client import Endpoint
        from outpace.endpoint.server import find_server
        from outpace.train.endpoint import EndpointAnswerer

        with Endpoint(endpoint, api_key, patient=True) as asked:
            name = find_server(asked, endpoint_model).model
        answerer = EndpointAnswerer(endpoint, name, codec, eos, params, concurrency=batch_size, api_key=api_key)
    before, made, tokens, started = len(store.done), 0, 0, perf_counter()
    with progress_bar("answers", len({item.id for item in items} - store.done)) as advance:
        for conversation in regenerate(items, store, answerer):
            made += 1
            tokens += sum(map(len, conversation.answers))
            advance()
    seconds = perf_counter() - started
    for name, reason in answerer.cut.items():
        notes.print(f"cut {name}: {reason}", highlight=False, markup=False)
    record = {"out": out, "answered": made, "before": before, "cut": len(answerer.cut), "encoded": answerer.encoded}
    print(json.dumps(record | {"tokens": tokens, "seconds": seconds, "tokens_per_second": tokens / seconds}))
