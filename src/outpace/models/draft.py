"""Draft models: a causal LM, the target's first layers, or a decoder on the target's embedding and head (bare)."""

import copy
import json
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from outpace.core.timing import NET
from outpace.kernels.blocks import BlockEmbedding
from outpace.lib.checkpoint import WEIGHTS, check_fit, write_checkpoint
from outpace.lib.checks import as_count
from outpace.lib.errors import InvalidRequest, ModelError, first_line
from outpace.lib.tensor_file import opened
from outpace.models.attention import ATTENTION_NAME, register_attention
from outpace.models.families import check_supported, positions_of
from outpace.models.head import LmHead
from outpace.models.layers.linear import layers_for
from outpace.models.layers.prepare import prepare, prepare_decoder
from outpace.models.loading.config import EMBEDDING, TARGETS, VOCABULARY, check_sizes, is_bare, read_config
from outpace.models.loading.precision import choose_quantization
from outpace.models.loading.registry import folder_of, resolve
from outpace.models.loading.weights import read_model
from outpace.models.packed import PackedModel, PassPart, first_layers, place_of
from outpace.models.tokenizer import TextCodec, read_tokenizer

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

EARLY_EXIT = "early-exit"
EARLY_EXIT_SHARE = 2 / 3


@dataclass(frozen=True, eq=False, kw_only=True)
class DraftRows(PassPart):
    """One request's part of a draft pass, of which the last `wanted` rows are scored."""

    wanted: int


class DraftModel(PackedModel):
    """A causal LM with its own slots, which computes the levels of a tree as scratch rows after each request's ids."""

    def __init__(
        self, decoder: nn.Module, head: LmHead, config: "PretrainedConfig", max_length: int, max_slots: int
    ) -> None:
        device, dtype = place_of(decoder)
        # Drafts need not be bit-exact: sums in float32 are precise enough.
        dtype = torch.promote_types(dtype, torch.float32) if device.type == "cpu" else dtype
        super().__init__(decoder, head, config, max_length, max_slots, key_dtype=dtype, value_dtype=dtype)

    def plain_tensors(self) -> dict[str, Tensor]:
        """Its embedding (unless it is in blocks), norms and head by name: the tensors that are never packed."""
        found = {
            f"{name}.weight": module.weight
            for name, module in self.decoder.named_modules()
            if not isinstance(module, BlockEmbedding)  # reading its weight would dequantise it, and keep that
            and (isinstance(module, nn.Embedding) or getattr(getattr(module, "weight", None), "ndim", 2) == 1)
        }
        return {"head": self.head.weight, **found}

    @NET
    def fill(self, slots: Sequence[int], tokens: Sequence[Tensor], window: int | None = None) -> None:
        """Append and commit ids, one sequence per slot. `window`: how many of the last committed rows are seen, as of
        `SlotKV.windowed`; None for all."""
        parts = []
        for slot, ids in zip(slots, tokens, strict=True):
            causal = torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
            view = self.kv.windowed(slot, window)
            parts.append(PassPart(slot, torch.arange(len(ids)), causal, view=view, tokens=self.known(ids)))
        self.run(parts, captured=False)
        self.kv.commit(slots, [range(len(ids)) for ids in tokens])

    def known(self, tokens: Tensor) -> Tensor:
        """Clamp ids that only the target's padded vocabulary has; a wrong id can only make drafts worse."""
        return tokens.clamp(max=self.config.vocab_size - 1)


@NET
@torch.inference_mode()
def level_scores(model: PackedModel, growths: Sequence[DraftRows], head: LmHead) -> Tensor:
    """Float32 logits of the wanted rows of all requests, [W, V], from one pass. Nothing is committed.

    Args:
        model: whose slots the rows are in.
        growths: the requests' rows.
        head: the model's own, or one that scores some ids only, [W, K].
    """
    hidden = model.run(growths).split([len(growth.tokens) for growth in growths])
    last = [rows[-growth.wanted :] for rows, growth in zip(hidden, growths, strict=True)]  # [wanted, H] each
    return head.own_scores(torch.cat(last))


def load_draft_model(name: str | None, target: PackedModel, codec: TextCodec) -> DraftModel:
    """The draft model for a target.

    Args:
        name: "early-exit" or "early-exit:LAYERS" for the target's own first layers, None for the former; else a
            folder, GGUF file, pulled name or hub id.
        target: the target; the draft model gets its dtype, device, slots and limit of tokens.
        codec: the target's tokenizer.

    Raises:
        ModelError: the drafter cannot be read, has another vocabulary, or was made for another target's embedding.
        UnsupportedModel: its architecture cannot roll back.
        InvalidRequest: an early exit at a layer that does not exist.
    """
    kind, _, layers = (name or EARLY_EXIT).partition(":")
    if kind == EARLY_EXIT:
        if layers and as_count(layers) is None:
            raise InvalidRequest(f"drafter={name!r}: give the number of layers, as in '{EARLY_EXIT}:8'")
        return early_exit(target, as_count(layers))
    assert name is not None
    location = resolve(name)
    whole = read_config(location)
    config = whole.get_text_config()
    check_supported(config)
    limit = min(positions_of(config), target.max_length)
    if is_bare(config, name):
        bare = _read_bare(Path(folder_of(location, WEIGHTS), WEIGHTS), config, target, codec, name)
        decoder = prepare_decoder(bare, layers_for(bare.dtype, bare.device))
        draft = DraftModel(decoder, target.head, config, limit, target.max_slots)
    else:
        _check_same_vocabulary(codec, read_tokenizer(location), name)
        quantize = choose_quantization("auto", target.dtype, target.device, location.gguf is not None)
        model = read_model(location, whole, target.dtype, target.device, ATTENTION_NAME, quantize)
        draft = draft_model_of(model, limit, target.max_slots)
    warn_if_shorter(name, limit, target.max_length)
    return draft


def early_exit(target: PackedModel, layers: int | None = None) -> DraftModel:
    """The target's own first layers with its norm and head, sharing every weight (Draft & Verify without training).

    Args:
        target: whose modules are shared.
        layers: how many of its layers; None for two thirds.

    Raises:
        InvalidRequest: not between 1 and one less than the target's layers.
    """
    total = target.config.num_hidden_layers
    layers = max(1, round(total * EARLY_EXIT_SHARE)) if layers is None else layers
    if not 1 <= layers < total:
        raise InvalidRequest(f"drafter='early-exit:{layers}': the target has {total} layers; take 1 to {total - 1}")
    decoder, config = first_layers(target.decoder, target.config, layers)
    return DraftModel(decoder, target.head, config, target.max_length, target.max_slots)


def draft_model_of(model: "PreTrainedModel", max_length: int, max_slots: int, pack: bool = True) -> DraftModel:
    """A draft model on a loaded causal LM whose attention implementation is ours."""
    decoder, head = prepare(model, pack)
    return DraftModel(decoder, head, model.config.get_text_config(), max_length, max_slots)


def warn_if_shorter(name: str, limit: int, max_length: int) -> None:
    """Warn if a drafter has fewer positions than requests may have: beyond them it drafts nothing."""
    if limit < max_length:
        warnings.warn(
            f"drafter={name!r} has positions for {limit} tokens and requests may have {max_length}: beyond {limit} "
            "tokens it drafts nothing; load with a smaller max_model_len or take a drafter with more",
            stacklevel=2,
        )


def build_bare(config: "PretrainedConfig", dtype: torch.dtype, attention: str, seed: int) -> "PreTrainedModel":
    """A decoder without an embedding, its weights initialised by its family's rules.

    Args:
        config: of the draft model, with the size of the target's vocabulary.
        dtype: of the weights.
        attention: name of the implementation.
        seed: of the weights.
    """
    from transformers import AutoModel

    register_attention()
    sizes = copy.deepcopy(config)
    sizes.vocab_size, sizes.pad_token_id = 1, None  # the embedding is discarded
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # the CPU's alone, where the model is made
        decoder: PreTrainedModel = AutoModel.from_config(sizes, dtype=dtype, attn_implementation=attention)
    decoder.set_input_embeddings(None)  # type: ignore[arg-type]
    decoder.config.vocab_size = config.vocab_size
    return decoder


def write_bare(decoder: "PreTrainedModel", folder: Path, codec: TextCodec, dtype: torch.dtype) -> None:
    """Write a decoder of `build_bare` in the format that `load_draft_model` reads.

    Args:
        decoder: of `build_bare`.
        folder: without a checkpoint.
        codec: the target's tokenizer, of which a fingerprint is written.
        dtype: of the file.

    Raises:
        ModelError: the folder holds a checkpoint, or a weight is NaN.
        OSError: it cannot be written.
    """
    config = copy.deepcopy(decoder.config)
    config.architectures, config.dtype = None, dtype  # no class of transformers reads this file
    fields = json.loads(config.to_json_string()) | {EMBEDDING: TARGETS, VOCABULARY: codec.vocabulary_fingerprint()}
    write_checkpoint(folder, fields, {name: weight.to(dtype) for name, weight in decoder.state_dict().items()})


def _read_bare(
    file: Path, config: "PretrainedConfig", target: PackedModel, codec: TextCodec, name: str
) -> "PreTrainedModel":
    """A written decoder on its target's embedding, in the target's dtype and on its device."""
    needed = {
        "hidden_size": target.config.hidden_size,
        "vocab_size": target.vocab_size,
        VOCABULARY: codec.vocabulary_fingerprint(),
    }
    for field, value in needed.items():
        if (made_for := getattr(config, field, None)) != value:
            raise ModelError(
                f"drafter={name!r}: uses its target's embedding and was made for one with {field}={made_for!r}; this "
                f"target has {value!r}; load the target it was trained for"
            )
    if not file.is_file():
        raise ModelError(f"{name}: holds no {WEIGHTS}; train or copy it again")
    with opened(file) as weights:
        tensors: dict[str, Tensor] = {key: weights.get_tensor(key) for key in weights.keys()}  # noqa: SIM118
    check_sizes(config, max((size for one in tensors.values() for size in one.shape), default=0), name)
    try:
        with torch.device("meta"):  # before memory is allocated: a damaged config may ask for any amount
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


def _check_same_vocabulary(target: TextCodec, draft: TextCodec, name: str) -> None:
    """Ids must mean the same in both models. Either may have more ids at the end: padding, or added tokens."""
    wanted, found = target.vocabulary(), draft.vocabulary()
    shared = range(min(max(wanted), max(found)) + 1)
    differing = [number for number in shared if wanted.get(number) != found.get(number)]
    if differing:
        first = differing[0]
        raise ModelError(
            f"drafter={name!r}: its vocabulary is not the target's: id {first} is {found.get(first)!r} there and "
            f"{wanted.get(first)!r} in the target, {len(differing)} of {len(shared)} ids differ; use a drafter with "
            "the target's tokenizer"
        )
