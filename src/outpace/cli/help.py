"""What `--help` calls the value of an option: its unit or its choices, not a type of Python. Where choices are too many
for that column, the text has them."""

from typing import Any

from typer.core import TyperCommand, TyperGroup

VALUES = {
    "quantize": "none|int8",
    "engine": "outpace|vllm",
    **dict.fromkeys(("dtype", "stored"), "DTYPE"),
    "device": "DEVICE",
    **dict.fromkeys(("model", "target"), "MODEL"),
    **dict.fromkeys(("method", "methods", "shape", "drafter", "served_model_name", "endpoint_model"), "NAME"),
    **dict.fromkeys(("url", "endpoint"), "URL"),
    **dict.fromkeys(("host", "master_addr"), "ADDRESS"),
    **dict.fromkeys(("port", "master_port"), "PORT"),
    "api_key": "KEY",
    **dict.fromkeys(("workload", "prompts", "warm"), "FILE[:LIMIT]"),
    **dict.fromkeys(("chat_template", "config"), "FILE"),
    **dict.fromkeys(("answers", "features"), "FOLDER"),
    "start": "DRAFTER",
    "out": "PATH",
    **dict.fromkeys(("max_new_tokens", "min_new_tokens", "max_model_len", "max_length"), "TOKENS"),
    **dict.fromkeys(("top_k", "logprobs"), "TOKENS"),
    "budget": "NODES",
    "temperature": "TEMPERATURE",
    **dict.fromkeys(("top_p", "min_p"), "PROBABILITY"),
    **dict.fromkeys(("repetition_penalty", "presence_penalty", "frequency_penalty"), "PENALTY"),
    "seed": "SEED",
    "n": "SAMPLES",
    **dict.fromkeys(("stop", "bad_word", "system"), "TEXT"),
    "regex": "PATTERN",
    "max_turns": "TURNS",
    "batch_size": "PROMPTS",
    **dict.fromkeys(("max_num_seqs", "max_queue", "concurrency"), "REQUESTS"),
    **dict.fromkeys(("timeout", "send_timeout", "drain_timeout"), "SECONDS"),
    "max_body": "BYTES",
    "max_methods": "METHODS",
    **dict.fromkeys(("tensor_parallel_size", "pipeline_parallel_size"), "GPUS"),
    "data_parallel_size": "COPIES",
    "nnodes": "MACHINES",
    "node_rank": "RANK",
    "keep": "COUNT",
}
"""By the option's name, unless the option has a metavar of its own."""


def in_words(parameters: list[Any]) -> list[Any]:
    """Parameters of a command, each with the name of its value; flags have none."""
    for one in parameters:
        if one.param_type_name == "argument":
            one.metavar = one.metavar or one.name.upper()
            vars(one)["display_type_rich"] = lambda ctx: None  # typer has no parameter for it
        elif one.is_flag:
            one.metavar = ""
        elif one.metavar is None:
            one.metavar = VALUES.get(one.name)
    return parameters


class Command(TyperCommand):
    """A command whose help has words for values."""

    def get_params(self, ctx: Any) -> list[Any]:
        return in_words(super().get_params(ctx))


class Group(TyperGroup):
    """A group of commands; the same."""

    def get_params(self, ctx: Any) -> list[Any]:
        return in_words(super().get_params(ctx))
