"""The base of all training objectives, and what builds a new net: initial weights and sizes."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from outpace.drafters.convert import DTYPES
from outpace.drafters.kinds import kind_of, write_net
from outpace.drafters.ranked_vocabulary import FILE_NAME, save_vocabulary
from outpace.drafters.training.batch import Anchors, Batch
from outpace.drafters.training.losses import LossVocabulary
from outpace.lib.checkpoint import filled, write_index
from outpace.models.frozen import FrozenTarget
from outpace.models.tokenizer import TextCodec

N = TypeVar("N", bound=nn.Module)
SPREAD = 0.02  # standard deviation of new matrices in transformers and the published recipes
THETA, RMS_EPS = 10000.0, 1e-5  # for targets that have none, like GPT-2


class Objective(nn.Module, ABC):
    """A drafter in training. Its target is not part of the module: neither saved, wrapped nor moved.

    Args:
        net: the drafter; its parameters require gradients.
        target: stays as it is.
        taps: the target's hidden states that `batch.features` holds, concatenated.
        depth: most tokens that a chain drafts per round.
        vocabulary: which ids the loss compares; None for all.

    Attributes:
        by_id: names of the weights in `net` with a row per id of the target. In training they have a row per id that
            the drafter drafts: the others would cost an optimizer's time and memory and never be used.
    """

    target: FrozenTarget
    by_id: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        net: nn.Module,
        target: FrozenTarget,
        taps: tuple[int, ...],
        depth: int,
        vocabulary: LossVocabulary | None = None,
    ) -> None:
        super().__init__()
        self.net, self.taps, self.depth = net, taps, depth
        object.__setattr__(self, "target", target)
        self.compare(vocabulary or LossVocabulary())
        for name, rows in self.narrowed({name: net.get_parameter(name).detach() for name in self.by_id}).items():
            layer, _, parameter = name.rpartition(".")
            setattr(net.get_submodule(layer), parameter, nn.Parameter(rows))

    def compare(self, vocabulary: LossVocabulary) -> None:
        """Let the loss compare these ids, and the drafter draft them."""
        self.vocabulary, self.scores = vocabulary, self.target.drafting_head(vocabulary.ranked)

    def narrowed(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of a whole drafter as `net` has them in training."""
        ranked = self.vocabulary.ranked
        if ranked is None:
            return dict(tensors)
        return {name: one[ranked.to(one.device)] if name in self.by_id else one for name, one in tensors.items()}

    def whole(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The reverse of `narrowed`: zeros for ids that are not drafted."""
        ranked = self.vocabulary.ranked
        if ranked is None:
            return dict(tensors)
        return {
            name: one.new_zeros(self.target.vocab_size, *one.shape[1:]).index_copy_(0, ranked.to(one.device), one)
            if name in self.by_id
            else one
            for name, one in tensors.items()
        }

    @abstractmethod
    def forward(self, batch: Batch, progress: float) -> Mapping[str, Tensor]:
        """Losses of a batch.

        All parameters take part in every call, if with a factor of zero, as data-parallel processes require.

        Args:
            batch: sequences.
            progress: part of the training that is done, 0 to 1.

        Returns:
            "loss": the differentiable sum over everything supervised; "weight": its divisor, which depends on the batch
            only. Others are logged, sums too. All float32 scalars.
        """

    @abstractmethod
    def hits(self, batch: Batch, anchors: Anchors) -> Tensor:
        """Whether greedy drafts are right at each depth, given that all earlier ones are.

        Drafts count only up to the first wrong one, so feeding the true tokens finds the same number of accepted drafts
        as feeding the drafts themselves (Domino, section 4.2).

        Returns:
            [A, depth] bool: the token drafted at depth k + 1 after each anchor is the true one; false beyond the end.
        """

    def calibrate(self, batches: Iterable[Batch]) -> None:
        """Fit the calibration of the drafter's probabilities, if it has one, on held-out sequences before it is
        written."""

    def _nothing(self, *names: str) -> dict[str, Tensor]:
        """The losses of a batch without anchors; all parameters take part."""
        zero = torch.stack([weight.float().sum() * 0 for weight in self.net.parameters()]).sum()
        return {"loss": zero} | {name: zero.detach() for name in names}

    @property
    def layout(self) -> str:
        """The public layout that the drafter is written in."""
        return kind_of(self.net).default_layout

    def write(self, tensors: Mapping[str, Tensor], folder: Path, codec: TextCodec, dtype: str) -> None:
        """Write the drafter in its public layout.

        Args:
            tensors: weights and buffers by their names in `net`.
            folder: an empty one.
            codec: the target's tokenizer, which language models are stored with.
            dtype: of the files.

        Raises:
            ModelError: a weight is NaN.
        """
        del codec
        wanted = DTYPES[dtype]
        cast = {name: one.to(wanted) if one.is_floating_point() else one for name, one in self.whole(tensors).items()}
        net = filled(partial(type(self.net), self.net.config), cast, str(folder))
        write_net(net, folder, self.layout)
        self.write_vocabulary(folder)

    def write_vocabulary(self, folder: Path) -> None:
        """Store the ids that the drafter was trained for, which it drafts by default."""
        if self.vocabulary.ranked is not None:
            save_vocabulary(folder / FILE_NAME, self.vocabulary.ranked.cpu(), self.target.vocab_size)
            write_index(folder)  # otherwise vLLM and SGLang load the ids as a weight


def initialise(net: N, seed: int) -> N:
    """Fill a new net: matrices and mask vectors normal, norms one, biases zero; parameters require gradients."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in net.named_parameters():
        with torch.no_grad():
            if name.endswith("bias"):
                weight.zero_()
            elif weight.ndim == 1 and "norm" in name:
                weight.fill_(1.0)
            else:
                weight.copy_(torch.randn(weight.shape, generator=generator) * SPREAD)
        weight.requires_grad_(True)
    return net


def layer_sizes(target: FrozenTarget, scalings: Collection[str]) -> dict[str, Any]:
    """Fields of a `LayerConfig`, and `rms_eps`, as in the target's own layers. `scalings`: kinds of `rope_scaling` that
    the drafter supports. Of other kinds only the base is taken: a drafter's rotation need not be the target's."""
    config, hidden = target.config, target.hidden_size
    heads: int = config.num_attention_heads
    inner = getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None)
    rotation: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    rotation = rotation.get("full_attention", rotation)  # families with windows have one per kind of layer
    scaling = {key: value for key, value in rotation.items() if key not in ("rope_theta", "partial_rotary_factor")}
    return {
        "hidden_size": hidden,
        "target_hidden_size": hidden,
        "intermediate_size": inner or 4 * hidden,
        "heads": heads,
        "kv_heads": getattr(config, "num_key_value_heads", None) or heads,
        "head_dim": getattr(config, "head_dim", None) or hidden // heads,
        "rms_eps": getattr(config, "rms_norm_eps", None) or RMS_EPS,
        "rope_theta": float(rotation.get("rope_theta", THETA)),
        "rope_scaling": scaling if rotation.get("rope_type") in scalings else None,
        "max_positions": config.max_position_embeddings,
        "vocab_size": target.vocab_size,
    }
