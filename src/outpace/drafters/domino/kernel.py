"""Domino's causal head by the compiled kernels: a level of every tree in one call. Python reference: `DominoHead`."""

import torch
from torch import Tensor

from outpace.drafters.domino.net import DominoHead
from outpace.kernels import structs
from outpace.kernels.decoder import matrix_of
from outpace.kernels.dispatch import COMPILED, NotCompiled, check_classes, check_kernels, check_same, in_python
from outpace.kernels.domino_head import CompiledHead, HeadRows
from outpace.kernels.linear import KernelLinear, Kind
from outpace.models.layers.linear import frozen_layers


def compiled_head(head: DominoHead, ids: Tensor | None) -> tuple[CompiledHead | None, str]:
    """The compiled head over some ids [K], or all; None where its own Python runs; and which of the two runs, in
    words."""
    weight = head.vocabulary_weight
    try:
        check_kernels(weight.device)
        check_classes(head, (DominoHead,))
        made = head_over(head, frozen_layers(weight.dtype)(weight if ids is None else weight[ids], None))
        _compare(head, made, ids)
    except NotCompiled as reason:
        return None, in_python(reason)
    return made, COMPILED


def head_over(head: DominoHead, vocabulary: torch.nn.Module) -> CompiledHead:
    """The head over the ids whose rows of W2 [K, r] are given."""
    if not isinstance(vocabulary, KernelLinear):
        raise NotCompiled(f"W2 is a {type(vocabulary).__name__}")
    config = head.config
    made = CompiledHead(
        structs.CausalHead(
            of_input=matrix_of(head, "of_input"),
            of_state=matrix_of(head, "of_state"),
            down=matrix_of(head.embed_proj, "0"),
            up=vocabulary.matrix,
            hidden=config.target_hidden_size,
            state=config.gru_hidden_dim,
            rank=config.emb_dim,
        )
    )
    made.kept = vocabulary
    return made


@torch.inference_mode()
def _compare(head: DominoHead, made: CompiledHead, ids: Tensor | None) -> None:
    """Check a step over random rows against the head's own Python."""
    generator, dtype, config = torch.Generator().manual_seed(0), head.vocabulary_weight.dtype, head.config
    hidden, embeddings = torch.randn(2, 2, config.target_hidden_size, generator=generator)
    before = torch.randn(2, config.gru_hidden_dim, generator=generator)
    after = head.step(before.to(dtype), embeddings.to(dtype))
    expected = head.correction(hidden.to(dtype), after)
    base = torch.zeros(2, expected.shape[1] if ids is None else len(ids))
    found = made.correct(HeadRows(embeddings, [(before, [0, 1])], [(hidden, [0, 1])], [(base, [0, 1])]), None)
    assert found.logits is not None
    is_coarse = made.kind != Kind.FLOAT32
    check_same("DominoHead.step", found.states, after, is_coarse)
    check_same("DominoHead.correction", found.logits, expected if ids is None else expected[:, ids], is_coarse)
