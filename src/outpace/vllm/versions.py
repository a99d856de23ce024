"""Which vLLM this plugin was tested with, and whether everything that it hooks into is there."""

import ast
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from outpace.lib.errors import ModelError

TESTED = SpecifierSet(">=0.32,<0.34")
"""0.32 by running it on a CPU; of 0.33, for which there is no CPU wheel, the hooks were compared."""


@dataclass(frozen=True)
class Hook:
    """Something of vLLM's that is subclassed, replaced or called. `name`: of a function, or of a class and its method
    with a dot between."""

    module: str
    name: str
    parameters: tuple[str, ...]


DFLASH = "vllm.model_executor.models.qwen3_dflash"
DOMINO_HOOKS = (
    Hook("vllm.model_executor.models.registry", "_ModelRegistry.register_model", ("model_arch", "model_cls")),
    Hook(DFLASH, "DFlashQwen3Model._normalize_context_k", ("all_k",)),
    Hook(DFLASH, "DFlashQwen3ForCausalLM.__init__", ("vllm_config", "prefix")),
    Hook(DFLASH, "DFlashQwen3ForCausalLM.forward", ("input_ids", "positions", "inputs_embeds")),
    Hook(DFLASH, "DFlashQwen3ForCausalLM.compute_logits", ("hidden_states",)),
    Hook(DFLASH, "DFlashQwen3ForCausalLM.load_weights", ("weights",)),
)
SAMPLER = "vllm.v1.sample.rejection_sampler"
SAMPLING_HOOKS = (
    Hook(SAMPLER, "expand_batch_to_tokens", ("x", "cu_num_tokens", "num_tokens", "replace_from", "replace_to")),
    Hook(SAMPLER, "apply_sampling_constraints", ("logits", "cu_num_draft_tokens", "sampling_metadata")),
)


def installed_version() -> str:
    """Of vLLM."""
    try:
        import vllm
    except ImportError as error:
        raise ModelError(f"vLLM cannot be imported ({error}); install it: pip install 'outpace[vllm]'") from error
    return str(vllm.__version__)


def is_tested(version: str | None = None) -> bool:
    """Whether a version of vLLM, by default the one installed, is in the range; one that is no version is not."""
    try:
        return TESTED.contains(Version(installed_version() if version is None else version), prereleases=True)
    except InvalidVersion:  # "dev", of a checkout without tags
        return False


def refusal(version: str | None = None) -> str | None:
    """Why this plugin does not work with a vLLM; None if it does. `version`: of vLLM; None for the one installed, whose
    hooks are looked at as well."""
    found = installed_version() if version is None else version
    if not is_tested(found):
        return (
            f"vLLM {found} is not among the versions this plugin was tested with ({TESTED}); install one of them, "
            "or a newer outpace"
        )
    missing = missing_hooks(DOMINO_HOOKS) if version is None else []
    if missing:
        return f"vLLM {found} lacks what this plugin builds on: {'; '.join(missing)}; install another, or report it"
    return None


def missing_hooks(hooks: Sequence[Hook], root: Path | None = None) -> list[str]:
    """Hooks that are gone or take other parameters, in words.

    Sources are read rather than imported: this runs in processes of vLLM's that never import models.

    Args:
        root: the folder that holds the package `vllm`; None for the one installed.
    """
    missing, sources = [], {module: _source(module, root) for module in {hook.module for hook in hooks}}
    for hook in hooks:
        tree = sources[hook.module]
        function = None if tree is None else _function(tree, hook.name.split("."))
        if function is None:
            missing.append(f"{hook.module} has no {hook.name}")
            continue
        taken = {argument.arg for argument in (*function.args.args, *function.args.kwonlyargs)}
        absent = [name for name in hook.parameters if name not in taken]
        if absent:
            missing.append(f"{hook.module}.{hook.name} takes no {', '.join(absent)}")
    return missing


def _source(module: str, root: Path | None) -> ast.Module | None:
    if root is None:
        try:
            spec = importlib.util.find_spec(module)
        except ImportError:
            return None
        path = None if spec is None or spec.origin is None else Path(spec.origin)
    else:
        path = root.joinpath(*module.split(".")).with_suffix(".py")
    return ast.parse(path.read_text(encoding="utf-8")) if path is not None and path.is_file() else None


def _function(tree: ast.AST, names: Sequence[str]) -> ast.FunctionDef | None:
    """The function that names lead to, from class to method."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == names[0]:
            if len(names) > 1:
                return _function(node, names[1:])
            return node if isinstance(node, ast.FunctionDef) else None
    return None
