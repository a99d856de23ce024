"""Checks that our proposers can run in this vLLM with its settings."""

import os
from copy import copy
from typing import Any

import torch

from outpace.lib.errors import InvalidRequest, ModelError
from outpace.vllm.cpu_sampling import mend
from outpace.vllm.versions import installed_version, refusal

BREAKABLE = "VLLM_USE_BREAKABLE_CUDAGRAPH"


def check_host() -> None:
    """Refuse an untested vLLM, and fix its sampling on CPUs, even if plugins are turned off."""
    reason = refusal(installed_version())
    if reason is not None:
        raise ModelError(f"outpace's proposers: {reason}")
    mend()


def check_parallel(config: Any) -> None:
    """Refuse pipeline parallelism: no rank sees both the first and the last hidden states."""
    stages = config.parallel_config.pipeline_parallel_size
    if stages > 1:
        raise InvalidRequest(
            f"pipeline_parallel_size={stages}: our proposers need the whole model on a rank; use tensor_parallel_size"
        )


def check_graphs(config: Any) -> None:
    """Refuse graphs of whole passes: replaying them does not call the model, and they cannot be recorded while passes
    are captured. Breakable graphs are of whole passes too, in pieces."""
    mode = getattr(config.compilation_config, "cudagraph_mode", None)
    if mode is None or mode.name == "NONE" or not torch.cuda.is_available():
        return
    if mode.has_full_cudagraphs():
        raise InvalidRequest(
            f"cudagraph_mode={mode.name}: our proposers observe passes, which full graphs hide; run with "
            '--compilation-config \'{"cudagraph_mode": "PIECEWISE"}\''
        )
    if os.environ.get(BREAKABLE) == "1":  # set by vLLM itself for some models, and for VLLM_BATCH_INVARIANT
        raise InvalidRequest(
            f"{BREAKABLE}=1: our proposers observe passes, which these graphs hide; run with {BREAKABLE}=0 in the "
            "environment, or with --enforce-eager"
        )


def draft_to_the_end(config: Any) -> None:
    """Have vLLM ask for drafts in every step; `Rounds` itself drafts nothing beyond the longest request.

    vLLM asks for no drafts of the whole batch while one request has less than a chain left to the drafter's maximal
    length, for custom classes the target's. It then verifies zeros, and the proposer never sees the hidden states of
    these passes: every other request would lose its context. The runner reads this length after it has made the
    proposer.
    """
    speculation = config.speculative_config
    own = copy(speculation.draft_model_config)  # the target's own config
    own.max_model_len = config.model_config.max_model_len + speculation.num_speculative_tokens
    speculation.draft_model_config = own


def check_inputs(config: Any) -> None:
    """Refuse embeddings as prompts: vLLM then gives a text model no ids, not even for other requests."""
    model = config.model_config
    if getattr(model, "enable_prompt_embeds", False) and not model.is_multimodal_model:
        raise InvalidRequest(
            "enable_prompt_embeds=True: our proposers learn from the ids of a pass, which vLLM then leaves out; leave "
            "it out, or use a method that vLLM has itself"
        )


def ending_ids(config: Any) -> tuple[int, ...]:
    """The EOS ids of a model's config, after which nothing is drafted."""
    found = getattr(config, "eos_token_id", None)
    return tuple(found) if isinstance(found, list | tuple) else () if found is None else (int(found),)
