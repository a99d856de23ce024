"""`outpace generate`: answer one prompt."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from outpace.cli.from_settings import from_settings, options
from outpace.cli.options import PENALTIES, SAMPLING, AsJson, aside, load, loading_options, speed_of
from outpace.core.events import Sample
from outpace.core.params import Grammar, SamplingParams
from outpace.core.settings import LoadSettings
from outpace.lib.errors import InvalidRequest


@from_settings(
    loading=loading_options(),
    params=options(
        SamplingParams, *SAMPLING, "seed", "n", "stop", *PENALTIES, "bad_words", "min_new_tokens", "logprobs"
    ),
)
def generate(
    loading: LoadSettings,
    prompt: Annotated[str, typer.Argument(help="The prompt; '-' reads standard input.")],
    params: SamplingParams,
    logit_bias: Annotated[
        list[str] | None,
        typer.Option(metavar="ID=VALUE", help="Bias of a token id, -100 to 100. May be given several times."),
    ] = None,
    json_schema: Annotated[
        str | None, typer.Option(metavar="FILE", help="Answer with JSON that this schema validates.")
    ] = None,
    regex: Annotated[
        str | None,
        typer.Option(metavar="PATTERN", help="Answer with text that this regular expression matches as a whole."),
    ] = None,
    grammar: Annotated[
        str | None, typer.Option(metavar="FILE", help="Answer with text of this grammar, in Lark's notation.")
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text instead of answering a chat message.")] = False,
    as_json: AsJson = False,
) -> None:
    """Answer one prompt, streaming the text."""
    params = replace(params, logit_bias=_bias_pairs(logit_bias or ()), grammar=grammar_of(json_schema, regex, grammar))
    if params.logprobs is not None and not as_json:
        raise InvalidRequest(f"logprobs={params.logprobs}: they are printed with --json only")
    text = sys.stdin.read() if prompt == "-" else prompt
    loaded = load(loading, params.n)
    is_chat = not raw and bool(loaded.codec.tokenizer.chat_template)
    asked: Any = [{"role": "user", "content": text}] if is_chat else text
    if as_json or params.n > 1:
        samples = [_as_dict(sample) for sample in loaded.generate(asked, params).samples]
        if as_json:
            facts = {"model": loading.model, "method": loaded.method_name, "method_from": loaded.method_from}
            print(json.dumps(facts | {"samples": samples}))
        else:
            for index, sample in enumerate(samples):
                print(f"--- sample {index}\n{sample['text']}")
        return
    with loaded.stream(asked, params) as stream:
        for event in stream:
            print(event.text, end="", flush=True)
    print()
    assert stream.result is not None
    aside(speed_of(stream.result, f"first token after {stream.result.metrics.ttft_ms:.0f} ms"))


def grammar_of(json_schema: str | None, regex: str | None, lark: str | None) -> Grammar | None:
    """The grammar of the one option that was given; None without one."""
    given = {"json-schema": json_schema, "regex": regex, "grammar": lark}
    named = [f"--{name}" for name, value in given.items() if value is not None]
    if len(named) > 1:
        raise InvalidRequest(f"{' and '.join(named)}: give one of them")
    if regex is not None:
        return Grammar.regex(regex)
    file = lark if json_schema is None else json_schema
    if file is None:
        return None
    try:
        text = Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{named[0]} {file}: cannot be read as text: {error}") from error
    return Grammar.lark(text) if json_schema is None else Grammar.json_schema(text)


def _as_dict(sample: Sample) -> dict[str, Any]:
    names = ("text", "token_ids", "finish_reason", "stop_reason", "seed")
    answer = {name: getattr(sample, name) for name in names} | {"metrics": sample.metrics.as_dict()}
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
