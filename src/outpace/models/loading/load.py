"""Load a target and its tokenizer by name."""

from pathlib import Path
from typing import TYPE_CHECKING

from outpace.cache.memory import SHARE, free_bytes
from outpace.lib.checkpoint import read_object
from outpace.lib.checks import is_int
from outpace.lib.errors import InvalidRequest, ModelError
from outpace.models.attention import ATTENTION_NAME
from outpace.models.families import check_supported, positions_of
from outpace.models.loading.config import read_config, refuse_bare
from outpace.models.loading.gguf_tokenizer import end_ids
from outpace.models.loading.precision import (
    check_exact,
    check_kv_cache_dtype,
    choose_device,
    choose_dtype,
    choose_quantization,
    compute_dtype,
)
from outpace.models.loading.registry import Location, folder_of, resolve
from outpace.models.loading.weights import read_model
from outpace.models.target import PackedTarget
from outpace.models.tokenizer import TextCodec, read_tokenizer

if TYPE_CHECKING:
    from transformers import GenerationConfig, PretrainedConfig

GENERATION = "generation_config.json"


def load_target(
    name: str,
    dtype: str,
    device: str,
    max_model_len: int | None,
    max_num_seqs: int,
    quantize: str = "auto",
    exact: bool = False,
    kv_cache_memory_bytes: int | None = None,
    kv_cache_dtype: str = "auto",
    longest: int | None = None,
) -> tuple[PackedTarget, TextCodec]:
    """Load a model and its tokenizer.

    Args:
        name: folder, GGUF file, pulled name or hub id.
        dtype, device: "auto" or a name.
        max_model_len: tokens per request, prompt and answer; None takes the model's limit, or what memory holds.
        max_num_seqs: requests at a time.
        quantize: as of `precision.choose_quantization`.
        kv_cache_memory_bytes: for keys and values of all requests together; None takes most of what is free.
        exact: passes of fixed shapes on a GPU; on a CPU an error where they are not bit-exact anyway.
        kv_cache_dtype: as of `precision.check_kv_cache_dtype`.
        longest: tokens that no request exceeds, where `max_model_len` is None; None if that is not known.

    Raises:
        ModelError: nothing readable under that name.
        UnsupportedModel: an architecture that cannot be decoded losslessly.
        InvalidRequest: an option out of range, or not available on this machine.
    """
    if max_num_seqs < 1:
        raise InvalidRequest(f"max_num_seqs={max_num_seqs}: must be at least 1")
    where = choose_device(device)
    chosen_dtype = choose_dtype(dtype, where)
    if exact:
        check_exact(where)
    location = resolve(name)
    computed = compute_dtype(chosen_dtype, where)
    quantize = choose_quantization(quantize, computed, where, location.gguf is not None)
    check_kv_cache_dtype(kv_cache_dtype, computed, where)
    config = read_config(location)
    refuse_bare(config, name)
    check_supported(config)
    limit = positions_of(config)
    if max_model_len is not None and not 1 <= max_model_len <= limit:
        raise InvalidRequest(f"max_model_len={max_model_len}: {name} has positions for 1 to {limit} tokens")
    limit = limit if longest is None else min(limit, longest)
    model = read_model(location, config, chosen_dtype, where, ATTENTION_NAME, quantize)
    codec = read_tokenizer(location)
    eos = _eos_token_ids(location, model.generation_config, model.config, codec)
    memory = int(free_bytes(where) * SHARE) if kv_cache_memory_bytes is None else kv_cache_memory_bytes
    target = PackedTarget(
        model,
        max_model_len or limit,
        max_num_seqs,
        eos,
        rounded_to=chosen_dtype,
        quantize=quantize,
        exact=exact,
        memory=memory,
        kv_cache_dtype=kv_cache_dtype,
    )
    if target.max_length < (max_model_len or min(limit, 2)):
        raise InvalidRequest(
            f"max_model_len={max_model_len or limit}: {memory / 1e9:.1f} GB for keys and values hold "
            f"{target.max_length} tokens per request, {target.row_bytes / 1e3:.0f} KB each; take fewer, or "
            + ("free memory" if kv_cache_memory_bytes is None else "raise kv_cache_memory_bytes")
        )
    return target, codec


def load_vocabulary_facts(name: str) -> tuple[TextCodec, int, tuple[int, ...]]:
    """A model's tokenizer, the size of its vocabulary and its EOS ids, without its weights.

    Raises:
        ModelError: nothing readable under that name, or a drafter without an embedding.
    """
    from transformers import GenerationConfig

    location = resolve(name)
    config, codec = read_config(location), read_tokenizer(location)
    refuse_bare(config, name)
    try:
        generation = GenerationConfig.from_pretrained(folder_of(location)) if location.gguf is None else None
    except OSError:
        generation = None  # many models have none
    return codec, config.get_text_config().vocab_size, _eos_token_ids(location, generation, config, codec)


def _eos_token_ids(
    location: Location, generation: "GenerationConfig | None", config: "PretrainedConfig", codec: TextCodec
) -> tuple[int, ...]:
    if location.gguf is None and (file := Path(folder_of(location), GENERATION)).is_file():
        read_object(file)  # transformers passes over one that it cannot read, and so over its EOS ids
    ends = [] if location.gguf is None else end_ids(location.gguf.values)
    found = generation.eos_token_id if generation else None
    for ids in (found, config.get_text_config().eos_token_id, codec.tokenizer.eos_token_id):
        if ids is not None:
            listed = tuple(ids) if isinstance(ids, list | tuple) else (ids,)
            if all(is_int(one) and one >= -1 for one in listed):
                # transformers writes -1 for none
                return tuple(dict.fromkeys(one for one in (*listed, *ends) if one >= 0))
            raise ModelError(f"{codec.name}: eos_token_id={ids!r}: must be ids; correct its {GENERATION}")
    return tuple(ends)
