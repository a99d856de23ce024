"""Outpace inside vLLM: the function that `vllm.general_plugins` calls in every vLLM process."""

import logging

ARCHITECTURES = ("DominoDraftModel", "DFlashDominoDraftModel", "DFlashDraftModel")
"""Architectures of Domino drafters: our layout's, vLLM's name for it, and SGLang's layout's, which plain DFlash
drafters also have; vLLM handles those."""
MODEL = "outpace.vllm.domino:DominoForCausalLM"


def register() -> None:
    """Register Domino drafters with vLLM, and fix its sampling on CPUs. Further calls change nothing.

    With an untested vLLM it registers nothing and logs an error: Domino drafters are then refused by
    vLLM itself, and everything else works as without this plugin.
    """
    from outpace.vllm.cpu_sampling import mend
    from outpace.vllm.versions import installed_version, refusal

    reason = refusal(installed_version())
    if reason is not None:
        logging.getLogger("vllm.outpace").error("outpace registers nothing: %s", reason)
        return
    mend()
    from vllm import ModelRegistry

    for name in ARCHITECTURES:
        ModelRegistry.register_model(name, MODEL)
