"""Models that draft: a small causal LM, or the target's own first layers."""

import copy
import json
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModel, PretrainedConfig, PreTrainedModel
from transformers.utils.hub import cached_file

from outpace.lib.checkpoint import WEIGHTS, opened, write_checkpoint
from outpace.lib.checks import as_count
from outpace.lib.errors import InvalidRequest, ModelError
from outpace.lib.weights import check_fit
from outpace.models.attention import ATTENTION_NAME
from outpace.models.families import check_supported
from outpace.models.head import LmHead, SubsetHead
from outpace.models.layers.linear import layers_for
from outpace.models.layers.prepare import prepare, prepare_decoder
from outpace.models.loading.checkpoint import read_model
from outpace.models.loading.config import EMBEDDING, TARGETS, VOCABULARY, check_sizes, is_bare, read_config
from outpace.models.loading.registry import first_line, resolve
from outpace.models.packed import PackedModel, Part, first_layers
from outpace.models.tokenizer import TextCodec, read_tokenizer

EARLY_EXIT = "early-exit"


EARLY_EXIT_SHARE = 2 / 3


@dataclass(frozen=True, eq=False)
class Growth:
    """One request's share of a draft pass.

    Attributes:
        slot: the request's slot in the draft model.
        tokens: [N] int64 fresh rows.
        offsets: [S + N] positions of scratch and fresh rows behind the committed ones.
        visible: [N, S + N] bool; None if all.
        scratch: S.
        wanted: how many of the last rows to score.
    """

    slot: int
    tokens: Tensor
    offsets: Tensor
    visible: Tensor | None
    scratch: int
    wanted: int


class DraftModel(PackedModel):
    """A causal LM with slots of its own, which writes the levels of a tree as scratch behind each request's ids.

    Attributes:
        passes, rows: forward passes and rows computed so far, prompts included.
    """

    def __init__(
        self, decoder: nn.Module, head: LmHead, config: PretrainedConfig, max_length: int, max_slots: int
    ) -> None:
        weight = next(decoder.parameters())
        # Nobody compares a draft's bits with anything, so sums in float32 will do.
        dtype = torch.promote_types(weight.dtype, torch.float32) if weight.device.type == "cpu" else weight.dtype
        super().__init__(decoder, head, config, max_length, max_slots, key_dtype=dtype, value_dtype=dtype)
        self.passes = self.rows = 0

    def plain_tensors(self) -> dict[str, Tensor]:
        """Its tensors by name but for linear layers, which may be packed: embedding, norms, head."""
        found = {
            f"{name}.weight": module.weight
            for name, module in self.decoder.named_modules()
            if isinstance(module, nn.Embedding) or getattr(getattr(module, "weight", None), "ndim", 2) == 1
        }
        return {"head": self.head.weight, **found}

    def length(self, slot: int) -> int:
        """Committed ids of a slot."""
        return self.kv.lengths[slot]

    def fill(self, slots: Sequence[int], tokens: Sequence[Tensor]) -> None:
        """Write and commit runs of ids, one per slot."""
        parts = [self._chain(slot, ids) for slot, ids in zip(slots, tokens, strict=True)]
        self._pass(parts, captured=False)
        for slot, ids in zip(slots, tokens, strict=True):
            self.kv.commit([slot], [range(len(ids))])

    @torch.inference_mode()
    def grow(self, growths: Sequence[Growth], head: SubsetHead | None = None) -> Tensor:
        """Float32 logits of the wanted rows of all requests, [W, V], from one pass. Nothing is committed.

        Args:
            growths: the requests' rows.
            head: scores some ids only, [W, K]; None for the model's own head.
        """
        parts = [
            Part(growth.slot, self._known(growth.tokens), growth.offsets, growth.visible, growth.scratch, True)
            for growth in growths
        ]
        hidden = self._pass(parts)
        sizes = [len(growth.tokens) for growth in growths]
        last = [
            rows[-growth.wanted :] for rows, growth in zip(hidden.split(sizes), growths, strict=True)
        ]  # [wanted, H] each
        return (head or self.head).own_scores(torch.cat(last))

    def _pass(self, parts: Sequence[Part], captured: bool = True) -> Tensor:
        self.passes += 1
        self.rows += sum(len(part.tokens) for part in parts)
        return self.run(parts, captured)

    def _chain(self, slot: int, tokens: Tensor) -> Part:
        count = len(tokens)
        causal = torch.ones(count, count, dtype=torch.bool).tril()
        return Part(slot, self._known(tokens), torch.arange(count), causal, is_prompt=True)

    def _known(self, tokens: Tensor) -> Tensor:
        """The target may have padded more ids onto its vocabulary; whatever stands for them costs drafts only."""
        return tokens.clamp(max=self.config.vocab_size - 1)


def early_exit(target: PackedModel, layers: int | None = None) -> DraftModel:
    """The target's own first layers with its norm and head, sharing every weight (Draft & Verify without training).

    Args:
        target: the model; its modules are shared, not copied.
        layers: how many of its layers; None takes two thirds.

    Raises:
        InvalidRequest: not between 1 and one less than the target's layers.
    """
    total = target.config.num_hidden_layers
    layers = max(1, round(total * EARLY_EXIT_SHARE)) if layers is None else layers
    if not 1 <= layers < total:
        raise InvalidRequest(f"drafter='early-exit:{layers}': the target has {total} layers; take 1 to {total - 1}")
    decoder, config = first_layers(target.decoder, target.config, layers)
    return DraftModel(decoder, target.head, config, target.max_length, target.max_slots)


def load_drafter(name: str | None, target: PackedModel, codec: TextCodec) -> DraftModel:
    """The draft model for a target.

    Args:
        name: "early-exit" or "early-exit:LAYERS" for the target's own first layers, which None means too; else a
            folder, GGUF file, pulled name or hub id.
        target: the target; the draft model gets its dtype, device, slots and limit of tokens.
        codec: the target's tokenizer.

    Raises:
        ModelError: the drafter cannot be found or read, has another vocabulary, or was made on another's embedding.
        UnsupportedModel: its architecture cannot roll back.
        InvalidRequest: an early exit that does not exist.
    """
    kind, _, layers = (name or EARLY_EXIT).partition(":")
    if kind == EARLY_EXIT:
        if layers and as_count(layers) is None:
            raise InvalidRequest(f"drafter={name!r}: give the number of layers, as in '{EARLY_EXIT}:8'")
        return early_exit(target, as_count(layers))
    assert name is not None
    source = resolve(name)
    whole = read_config(source)
    config = whole.get_text_config()
    check_supported(config)
    limit = min(config.max_position_embeddings, target.max_length)
    if is_bare(config, name):
        bare = read_bare(source.path, config, target, codec, name)
        decoder = prepare_decoder(bare, layers_for(bare.dtype, bare.device))
        draft = DraftModel(decoder, target.head, config, limit, target.max_slots)
    else:
        check_same_vocabulary(codec, read_tokenizer(source), name)
        model = read_model(source, whole, target.dtype, target.device, ATTENTION_NAME)
        draft = draft_model_of(model, limit, target.max_slots)
    warn_if_shorter(name, limit, target.max_length)
    return draft


def draft_model_of(model: PreTrainedModel, max_length: int, max_slots: int, pack: bool = True) -> DraftModel:
    """A draft model on a loaded causal LM whose attention implementation is ours."""
    decoder, head = prepare(model, pack)
    return DraftModel(decoder, head, model.config.get_text_config(), max_length, max_slots)


def check_same_vocabulary(target: TextCodec, draft: TextCodec, name: str) -> None:
    """A draft id must mean the same to both models. Either may have more ids behind the other's last: padding of an
    embedding, or tokens that only one of them added.

    Raises:
        ModelError: the tokenizers give an id different texts.
    """
    wanted, found = (
        {number: text for text, number in codec.tokenizer.get_vocab().items()} for codec in (target, draft)
    )
    shared = range(min(max(wanted), max(found)) + 1)
    differing = [number for number in shared if wanted.get(number) != found.get(number)]
    if differing:
        first = differing[0]
        raise ModelError(
            f"drafter={name!r}: its vocabulary is not the target's: id {first} is {found.get(first)!r} there and "
            f"{wanted.get(first)!r} in the target, {len(differing)} of {len(shared)} ids differ; use a drafter with "
            "the target's tokenizer"
        )


def warn_if_shorter(name: str, limit: int, max_length: int) -> None:
    """Tell that drafting ends before the context does: a request that grows longer goes on undrafted."""
    if limit < max_length:
        warnings.warn(
            f"drafter={name!r} has positions for {limit} tokens and requests may have {max_length}: beyond {limit} "
            "tokens they are decoded without drafts; load with a smaller max_model_len or take a drafter with more",
            stacklevel=2,
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
