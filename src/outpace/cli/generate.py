"""`outpace generate`: answer one prompt."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer

from outpace.cli.options import (
    AsJson,
    Budget,
    Device,
    Drafter,
    Dtype,
    Exact,
    FrequencyPenalty,
    IgnoreEos,
    JsonSchema,
    LarkFile,
    Loading,
    MaxModelLen,
    MaxNewTokens,
    Method,
    MinP,
    ModelName,
    PresencePenalty,
    Quantize,
    Regex,
    RepetitionPenalty,
    Seed,
    SpeculativeConfig,
    Temperature,
    TopK,
    TopP,
    aside,
    grammar_of,
)
from outpace.core.events import Sample
from outpace.core.params import SamplingParams
from outpace.lib.errors import InvalidRequest


def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt; '-' reads standard input.")],
    model: ModelName,
    method: Method = None,
    drafter: Drafter = None,
    budget: Budget = None,
    speculative_config: SpeculativeConfig = None,
    max_new_tokens: MaxNewTokens = 128,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    seed: Seed = None,
    n: Annotated[int, typer.Option("--n", help="Samples of the answer.")] = 1,
    stop: Annotated[list[str] | None, typer.Option(help="Stop string; may be given several times.")] = None,
    repetition_penalty: RepetitionPenalty = 1.0,
    presence_penalty: PresencePenalty = 0.0,
    frequency_penalty: FrequencyPenalty = 0.0,
    logit_bias: Annotated[
        list[str] | None, typer.Option(metavar="ID=VALUE", help="Bias of a token id, -100 to 100; several times.")
    ] = None,
    bad_word: Annotated[list[str] | None, typer.Option(help="Word not to be said; may be given several times.")] = None,
    min_new_tokens: Annotated[int, typer.Option(help="Tokens before an EOS may be chosen.")] = 0,
    ignore_eos: IgnoreEos = False,
    logprobs: Annotated[
        int | None, typer.Option(help="With --json, log-probabilities: of each token and of this many best ones.")
    ] = None,
    json_schema: JsonSchema = None,
    regex: Regex = None,
    grammar: LarkFile = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text instead of answering a chat message.")] = False,
    dtype: Dtype = "auto",
    quantize: Quantize = "none",
    device: Device = "auto",
    max_model_len: MaxModelLen = None,
    exact: Exact = False,
    as_json: AsJson = False,
) -> None:
    """Answer one prompt, streaming the text."""
    params = SamplingParams(
        max_new_tokens,
        temperature,
        top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        n=n,
        stop=tuple(stop or ()),
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        logit_bias=_bias_pairs(logit_bias or ()),
        bad_words=tuple(bad_word or ()),
        min_new_tokens=min_new_tokens,
        ignore_eos=ignore_eos,
        logprobs=logprobs,
        grammar=grammar_of(json_schema, regex, grammar),
    )  # checked before a model is loaded
    if logprobs is not None and not as_json:
        raise InvalidRequest(f"logprobs={logprobs}: they are printed with --json only")
    text = sys.stdin.read() if prompt == "-" else prompt
    loaded = Loading(
        model,
        drafter,
        budget,
        dtype,
        quantize,
        device,
        max_model_len=max_model_len,
        speculative_config=speculative_config,
        exact=exact,
    ).load(method, max(n, 1))
    is_chat = not raw and bool(loaded.codec.tokenizer.chat_template)
    asked: Any = [{"role": "user", "content": text}] if is_chat else text
    if as_json or n > 1:
        generation = loaded.generate(asked, params)
        samples = [_as_dict(sample) for sample in generation.samples]
        if as_json:
            method_facts = {"method": loaded.method_name, "method_from": loaded.method_from}
            print(json.dumps({"model": model, **method_facts, "samples": samples}))
        else:
            for index, sample in enumerate(samples):
                print(f"--- sample {index}\n{sample['text']}")
        return
    with loaded.stream(asked, params) as stream:
        for event in stream:
            print(event.text, end="", flush=True)
    print()
    assert stream.result is not None
    metrics = stream.result.metrics
    rate = 1e3 / metrics.tpot_ms if metrics.tpot_ms else 0.0
    aside(
        f"{metrics.new_tokens} tokens, {rate:.1f} tokens/s, {metrics.tokens_per_step:.2f} tokens per step, "
        f"first token after {metrics.ttft_ms:.0f} ms, ended by {stream.result.finish_reason}"
    )


def _as_dict(sample: Sample) -> dict[str, Any]:
    answer: dict[str, Any] = {
        "text": sample.text,
        "token_ids": sample.token_ids,
        "finish_reason": sample.finish_reason,
        "stop_reason": sample.stop_reason,
        "seed": sample.seed,
        "metrics": sample.metrics.as_dict(),
    }
    if sample.logprobs is not None:
        answer["logprobs"] = [asdict(logprob) for logprob in sample.logprobs]
    return answer


def _bias_pairs(texts: Sequence[str]) -> tuple[tuple[int, float], ...]:
    pairs = []
    for text in texts:
        token, _, bias = text.partition("=")
        try:
            pairs.append((int(token), float(bias)))
        except ValueError as error:
            raise InvalidRequest(f"logit_bias={text!r}: must be ID=VALUE, as in 50=-100") from error
    return tuple(pairs)
