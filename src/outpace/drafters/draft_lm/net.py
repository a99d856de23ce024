"""Small language models of a target's family, to train as its draft model."""

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from outpace.drafters.training.settings import Section
from outpace.lib.errors import InvalidRequest, ModelError, first_line
from outpace.models.draft import build_bare, write_bare
from outpace.models.families import check_supported, logit_softcap
from outpace.models.frozen import FrozenTarget
from outpace.models.loading.weights import stock_attention
from outpace.models.plain_decoder import stock_config
from outpace.models.tokenizer import TextCodec

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

# Fields of configs with an entry per layer, and names of the width inside a block.
_PER_LAYER = ("layer_types", "mlp_layer_types", "no_rope_layers")
_INNER = ("intermediate_size", "moe_intermediate_size", "n_inner")
_ALIGNED = 8  # scaled inner widths are multiples of this: kernels of experts need rows of 16 bytes
Count = Annotated[int, Field(ge=1)]


class DraftLmNetSettings(Section):
    """A new draft model, of the target's family; None follows the target's sizes. The number of attention heads is the
    target's scaled with hidden_size, and the size of a head is the target's."""

    layers: Count = Field(default=2, description="At most the target's.")
    hidden_size: Count | None = Field(default=None, description="None for the target's.")
    intermediate_size: Count | None = Field(
        default=None, description="Inside a block, also of an expert; None scales the target's with hidden_size."
    )
    embedding: Literal["own", "target"] = Field(
        default="own",
        description="own, which is trained; or target: the target's embedding and head, which are neither trained nor "
        "stored.",
    )


class SmallLM(nn.Module):
    """A transformers model over whole sequences."""

    def __init__(self, model: "PreTrainedModel") -> None:
        super().__init__()
        self.model = model
        self._cap = logit_softcap(model.config)

    def forward(self, ids: Tensor) -> Tensor:
        """Hidden states [N, T, H] that the head reads, for ids [N, T] padded at the end."""
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

    @property
    def head_weights(self) -> tuple[Tensor, ...]:
        """The trained tensors that `logits` reads."""
        return tuple(self.model.get_output_embeddings().parameters())

    def write(self, folder: Path, codec: TextCodec, dtype: torch.dtype) -> None:
        """Write the model and a tokenizer, as `outpace.load(..., drafter=FOLDER)` reads them, into an empty folder.

        Raises:
            ModelError: a full disk, or a folder that cannot be written.
        """
        model = copy.deepcopy(self.model).to(dtype)  # type: ignore[arg-type]
        try:
            model.save_pretrained(folder)
            codec.tokenizer.save_pretrained(folder)
        except Exception as error:  # safetensors and tokenizers have errors of their own kinds for a full disk
            raise ModelError(
                f"{folder}: cannot be written ({first_line(error)}); free some space and run the same command again"
            ) from error


class BareLM(SmallLM):
    """A decoder (`models.draft.build_bare`) that uses the embedding and head of a target of the same width. Neither is
    part of the module, so they are not trained and not saved."""

    def __init__(self, model: "PreTrainedModel", target: FrozenTarget) -> None:
        super().__init__(model)
        self.target = target

    def forward(self, ids: Tensor) -> Tensor:
        # The residual stream has the dtype of the layers' weights, also where the target's is narrower.
        embedded = self.target.embed(ids).to(torch.float32)  # [N, T, H]
        hidden: Tensor = self.model(inputs_embeds=embedded, use_cache=False).last_hidden_state
        return hidden

    def logits(self, hidden: Tensor, ids: Tensor | None = None) -> Tensor:
        return self.target.logits(hidden, ids)

    @property
    def head_weights(self) -> tuple[Tensor, ...]:
        return ()

    def write(self, folder: Path, codec: TextCodec, dtype: torch.dtype) -> None:
        write_bare(self.model, folder, codec, dtype)


def small_config(config: "PretrainedConfig", sizes: DraftLmNetSettings) -> "PretrainedConfig":
    """The config of a smaller model of the same family, without dropout; `config` is of the target's text part."""
    if sizes.layers > config.num_hidden_layers:
        raise InvalidRequest(f"layers={sizes.layers}: the target has {config.num_hidden_layers}; take as many or fewer")
    small = copy.deepcopy(stock_config(config))
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
    small.num_attention_heads = heads = scaled(config.num_attention_heads)
    if getattr(small, "head_dim", None) is None and hidden % heads:
        raise InvalidRequest(f"hidden_size={hidden}: must be a multiple of its {heads} heads")
    if (kv_heads := getattr(config, "num_key_value_heads", None)) is not None:
        most = min(scaled(kv_heads), heads)
        small.num_key_value_heads = next(size for size in range(most, 0, -1) if heads % size == 0)
    for name in vars(small):
        if name.endswith(("dropout", "pdrop")):
            setattr(small, name, 0.0)
    check_supported(small)
    return small


def make_small(config: "PretrainedConfig", seed: int) -> SmallLM:
    """A model in float32 with its family's random weights."""
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # the model is made on the CPU
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            copy.deepcopy(config), dtype=torch.float32, attn_implementation=stock_attention(config)
        )
    embedding = model.get_input_embeddings()
    assert isinstance(embedding, nn.Embedding)
    embedding.padding_idx = None  # that row would never be trained, and may be an EOS
    return SmallLM(model)


def make_bare(config: "PretrainedConfig", target: FrozenTarget, seed: int) -> BareLM:
    """As `make_small`, with the embedding and head of a target of the same width."""
    return BareLM(build_bare(config, torch.float32, stock_attention(config), seed), target)
