"""Small language models in the image of a target: to be trained as its draft model, and written as any model is."""

import copy
from pathlib import Path
from typing import Annotated

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from outpace.lib.errors import InvalidRequest, ModelError
from outpace.models.bare import build_bare, write_bare
from outpace.models.families import check_supported, logit_softcap
from outpace.models.frozen import FrozenTarget
from outpace.models.text import TextCodec
from outpace.models.unpacked import stock_weights

# Fields of configs that say something of each layer, and what families call the width inside a block.
_PER_LAYER = ("layer_types", "mlp_layer_types", "no_rope_layers")
_INNER = ("intermediate_size", "moe_intermediate_size", "n_inner")
# Inner widths that are scaled are rounded up to a multiple of this, as kernels of experts want rows of 16 bytes.
_ALIGNED = 8

Count = Annotated[int, Field(ge=1)]


class SmallSizes(BaseModel):
    """Sizes of a small model; what is None follows from the target's. The size of a head is the target's.

    Attributes:
        layers: at most the target's.
        hidden_size: None for the target's.
        intermediate_size: inside a block, of an expert too; None scales the target's as `hidden_size` is, up to a
            multiple of 8.
        heads: of attention; None scales the target's likewise.
        kv_heads: None scales the target's likewise, down to a divisor of `heads`.
        tie_word_embeddings: whether the head is the embedding; None for what the target does.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    layers: Count = 2
    hidden_size: Count | None = None
    intermediate_size: Count | None = None
    heads: Count | None = None
    kv_heads: Count | None = None
    tie_word_embeddings: bool | None = None


class SmallLM(nn.Module):
    """A causal LM over whole sequences.

    Args:
        model: of transformers.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self._cap = logit_softcap(model.config)

    def forward(self, ids: Tensor) -> Tensor:
        """Hidden states that the head reads.

        Args:
            ids: [N, T], padded at the end, where nothing that comes before looks.

        Returns:
            [N, T, H].
        """
        hidden: Tensor = self.model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
        return hidden

    def logits(self, hidden: Tensor, ids: Tensor | None = None) -> Tensor:
        """Logits [..., V] of hidden states [..., H], or [..., K] of some ids."""
        head = self.model.get_output_embeddings()
        weight, bias = head.weight, getattr(head, "bias", None)
        if ids is not None:
            weight, bias = weight[ids], None if bias is None else bias[ids]
        logits = nn.functional.linear(hidden, weight, bias)
        return logits if self._cap is None else torch.tanh(logits / self._cap) * self._cap

    def twin(self) -> "SmallLM":
        """Another model of the same sizes, on the CPU, with weights of its own."""
        return make_small(self.model.config, 0)

    def write(self, folder: str | Path, codec: TextCodec, dtype: torch.dtype) -> None:
        """Write the model and a tokenizer, as `outpace.load(..., drafter=FOLDER)` reads them.

        Args:
            folder: new, or without a model.
            codec: the target's tokenizer.
            dtype: of the file.

        Raises:
            ModelError: the folder holds a model, or cannot be written.
        """
        path = Path(folder).expanduser()
        if (path / "config.json").exists():
            raise ModelError(f"{folder}: already holds a checkpoint; choose an empty folder")
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._save(path, codec, dtype)
        except OSError as error:
            raise ModelError(f"{folder}: cannot be written: {error}") from error

    def _save(self, path: Path, codec: TextCodec, dtype: torch.dtype) -> None:
        copy.deepcopy(self.model).to(dtype).save_pretrained(path)  # type: ignore[arg-type]
        codec.tokenizer.save_pretrained(path)


class BareLM(SmallLM):
    """One that reads its target's embedding and speaks through its target's head: neither is a part of the module.

    Args:
        model: a decoder of `bare.build_bare`.
        target: of the same width.
    """

    def __init__(self, model: PreTrainedModel, target: FrozenTarget) -> None:
        super().__init__(model)
        self.target = target  # no module: neither trained nor saved

    def forward(self, ids: Tensor) -> Tensor:
        # The sum that layers add to is in the dtype of their weights, also where the target computes in less.
        embedded = self.target.embed(ids).to(torch.float32)  # [N, T, H]
        hidden: Tensor = self.model(inputs_embeds=embedded, use_cache=False).last_hidden_state
        return hidden

    def logits(self, hidden: Tensor, ids: Tensor | None = None) -> Tensor:
        return self.target.logits(hidden, ids)

    def twin(self) -> "BareLM":
        return make_bare(self.model.config, self.target, 0)

    def _save(self, path: Path, codec: TextCodec, dtype: torch.dtype) -> None:
        write_bare(self.model, path, codec, dtype)


def small_config(config: PretrainedConfig, sizes: SmallSizes) -> PretrainedConfig:
    """The config of a smaller model of the same family, without dropout.

    Args:
        config: of the target's text part.
        sizes: of the small model.

    Raises:
        InvalidRequest: more layers than the target has, or heads that do not go together.
    """
    if sizes.layers > config.num_hidden_layers:
        raise InvalidRequest(f"layers={sizes.layers}: the target has {config.num_hidden_layers}; take as many or fewer")
    small = copy.deepcopy(config)
    hidden = sizes.hidden_size or config.hidden_size

    def scaled(size: int) -> int:
        return max(1, int(size * hidden // config.hidden_size))

    for name in _PER_LAYER:
        if isinstance(getattr(small, name, None), list):
            setattr(small, name, getattr(small, name)[: sizes.layers])
    for name in _INNER:
        if (inner := getattr(config, name, None)) is not None:
            setattr(small, name, sizes.intermediate_size or -(-scaled(inner) // _ALIGNED) * _ALIGNED)
    small.num_hidden_layers, small.hidden_size = sizes.layers, hidden
    small.num_attention_heads = heads = sizes.heads or scaled(config.num_attention_heads)
    if (kv_heads := getattr(config, "num_key_value_heads", None)) is not None:
        small.num_key_value_heads = sizes.kv_heads or _divisor(heads, scaled(kv_heads))
    if sizes.tie_word_embeddings is not None:
        small.tie_word_embeddings = sizes.tie_word_embeddings
    for name in vars(small):
        if name.endswith(("dropout", "pdrop")):
            setattr(small, name, 0.0)
    _check_heads(small, sizes.kv_heads)
    check_supported(small)
    return small


def _divisor(number: int, limit: int) -> int:
    """The largest divisor of a number up to a limit."""
    return next(size for size in range(min(limit, number), 0, -1) if number % size == 0)


def _check_heads(config: PretrainedConfig, asked_kv_heads: int | None) -> None:
    heads, kv_heads = config.num_attention_heads, getattr(config, "num_key_value_heads", None)
    if kv_heads is None and asked_kv_heads not in (None, heads):
        raise InvalidRequest(
            f"kv_heads={asked_kv_heads}: {config.model_type} has as many as heads={heads}; leave it out"
        )
    if kv_heads is not None and heads % kv_heads:
        raise InvalidRequest(f"kv_heads={kv_heads}: must divide heads={heads}")
    if getattr(config, "head_dim", None) is None and config.hidden_size % heads:
        raise InvalidRequest(f"heads={heads}: must divide hidden_size={config.hidden_size}")


def make_small(config: PretrainedConfig, seed: int) -> SmallLM:
    """A model in float32 whose weights its family's own rules draw.

    Args:
        config: of the model.
        seed: of the weights.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # of the CPU alone, where the model is made
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            copy.deepcopy(config), dtype=torch.float32, attn_implementation=_attention(config)
        )
    embedding = model.get_input_embeddings()
    assert isinstance(embedding, nn.Embedding)
    embedding.padding_idx = None  # such a row would never learn, and may be an EOS that is read
    return SmallLM(model)


def make_bare(config: PretrainedConfig, target: FrozenTarget, seed: int) -> BareLM:
    """As `make_small`, on a target's embedding and head.

    Args:
        config: of the model, as wide as the target.
        target: stays what it is.
        seed: of the weights.
    """
    return BareLM(build_bare(config, torch.float32, _attention(config), seed), target)


def _attention(config: PretrainedConfig) -> str:
    # Only the stock path written out caps the scores of attention.
    return "sdpa" if getattr(config, "attn_logit_softcapping", None) is None else "eager"


def copy_layers(small: SmallLM, decoder: nn.Module, head: Tensor) -> None:
    """Give a model the weights of a larger one of the same width: first layers and final norm, embedding and head
    where it has them.

    Args:
        small: is changed.
        decoder: of the larger model; its layers may be packed.
        head: [V, H] of its LM head.
    """
    twin: nn.Module = small.model.get_decoder()
    with torch.no_grad():
        for name, module in twin.named_modules():
            own = dict(module.named_parameters(recurse=False))
            if own:
                _copy(own, stock_weights(decoder.get_submodule(name), module))
        if (own_head := small.model.get_output_embeddings()) is not None:
            own_head.weight.copy_(head)


def _copy(own: dict[str, nn.Parameter], weights: dict[str, Tensor]) -> None:
    assert own.keys() == weights.keys(), "a family's layers have the same weights wherever they stand"
    for name, weight in own.items():
        weight.copy_(weights[name])
