"""Draft models without an embedding and a head: at both ends they use their target's, which no file holds again."""

import copy
import json
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModel, PretrainedConfig, PreTrainedModel
from transformers.utils.hub import cached_file

from outpace.lib.checkpoint import WEIGHTS, opened, write_checkpoint
from outpace.lib.errors import ModelError
from outpace.lib.weights import check_fit
from outpace.models.attention import ATTENTION_NAME
from outpace.models.config_bounds import check_sizes
from outpace.models.hub import first_line
from outpace.models.packed import PackedModel
from outpace.models.text import TextCodec

# Fields of config.json beside the family's own: whose the embedding and the head are, and which tokens the ids mean.
EMBEDDING, VOCABULARY = "outpace_embedding", "outpace_vocabulary"
TARGETS = "target"


def is_bare(config: PretrainedConfig, name: str) -> bool:
    """Whether a config describes such a draft model.

    Args:
        config: of a language model's text part.
        name: of the checkpoint, for errors.

    Raises:
        ModelError: the embedding is said to be something else than the target's.
    """
    said = getattr(config, EMBEDDING, None)
    if said not in (None, TARGETS):
        raise ModelError(
            f"{name}: config.json: {EMBEDDING}={said!r} is not known; write {TARGETS!r}, or leave it out where the "
            "checkpoint has an embedding"
        )
    return said is not None


def refuse_bare(config: PretrainedConfig, name: str) -> None:
    """Refuse such a draft model where a whole model is needed.

    Raises:
        ModelError: it is one.
    """
    if is_bare(config.get_text_config(), name):
        raise ModelError(
            f"{name}: is a drafter without an embedding ({EMBEDDING}={TARGETS!r}) and says nothing by itself; load "
            f"the target it was trained for, with drafter={name!r}"
        )


def build_bare(config: PretrainedConfig, dtype: torch.dtype, attention: str, seed: int) -> PreTrainedModel:
    """A decoder whose place for an embedding is empty, its weights drawn by its family's own rules.

    Args:
        config: of the draft model, with the size of the target's vocabulary.
        dtype: of the weights.
        attention: name of the implementation.
        seed: of the weights.
    """
    sizes = copy.deepcopy(config)
    sizes.vocab_size, sizes.pad_token_id = 1, None  # an embedding is made to be thrown away
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # of the CPU alone, where the model is made
        decoder: PreTrainedModel = AutoModel.from_config(sizes, dtype=dtype, attn_implementation=attention)
    decoder.set_input_embeddings(None)  # type: ignore[arg-type]
    decoder.config.vocab_size = config.vocab_size
    return decoder


def write_bare(decoder: PreTrainedModel, folder: Path, codec: TextCodec, dtype: torch.dtype) -> None:
    """Write a decoder as `read_bare` reads it; its tokenizer is the target's, of which a fingerprint is kept.

    Args:
        decoder: of `build_bare`.
        folder: without a checkpoint.
        codec: the target's tokenizer.
        dtype: of the file.

    Raises:
        ModelError: the folder holds a checkpoint, or a weight is NaN.
        OSError: it cannot be written.
    """
    config = copy.deepcopy(decoder.config)
    config.architectures, config.dtype = None, dtype  # no class of transformers reads this file
    fields = json.loads(config.to_json_string()) | {EMBEDDING: TARGETS, VOCABULARY: codec.vocabulary_fingerprint()}
    write_checkpoint(folder, fields, {name: weight.to(dtype) for name, weight in decoder.state_dict().items()})


def read_bare(path: str, config: PretrainedConfig, target: PackedModel, codec: TextCodec, name: str) -> PreTrainedModel:
    """A written decoder on its target's embedding, which is shared, in the target's dtype and on its device.

    Args:
        path: folder or hub id.
        config: of the draft model.
        target: whose embedding it gets.
        codec: the target's tokenizer.
        name: what the drafter was asked for by, for errors.

    Raises:
        ModelError: made for another target; a file that is missing or damaged, or tensors that do not fit the config.
    """
    _check_target(config, target, codec, name)
    try:
        file = cached_file(path, WEIGHTS)
    except OSError as error:
        raise ModelError(f"{name}: holds no {WEIGHTS}; train or copy it again ({error})") from error
    assert file is not None, "it raises where it finds nothing"
    with opened(Path(file)) as weights:
        tensors: dict[str, Tensor] = {key: weights.get_tensor(key) for key in weights.keys()}  # noqa: SIM118
    check_sizes(config, max((size for one in tensors.values() for size in one.shape), default=0), name)
    try:
        with torch.device("meta"):  # before memory is asked for: a damaged config may want any amount
            check_fit(build_bare(config, target.dtype, ATTENTION_NAME, 0), tensors, name)
        decoder = build_bare(config, target.dtype, ATTENTION_NAME, 0)
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(f"{name}: cannot be built as its config says: {first_line(error)}") from error
    decoder.load_state_dict(tensors)
    decoder.to(target.device).eval()  # type: ignore[arg-type]
    decoder.set_input_embeddings(target.embedding)
    return decoder


def _check_target(config: PretrainedConfig, target: PackedModel, codec: TextCodec, name: str) -> None:
    sizes = {"hidden_size": target.config.hidden_size, "vocab_size": target.vocab_size}
    made_for = {size: getattr(config, size) for size in sizes} | {VOCABULARY: getattr(config, VOCABULARY, None)}
    for field, value in (sizes | {VOCABULARY: codec.vocabulary_fingerprint()}).items():
        if made_for[field] != value:
            raise ModelError(
                f"drafter={name!r}: uses its target's embedding and was made for one with "
                f"{field}={made_for[field]!r}; this target has {value!r}; load the target it was trained for"
            )
