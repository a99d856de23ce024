"""Which vLLM is accepted, and what is said of one that lacks a hook: without vLLM, on sources made for the purpose."""

from pathlib import Path

import pytest

from outpace.vllm.versions import DOMINO_HOOKS, SAMPLING_HOOKS, Hook, missing_hooks, refusal

HOOKS = (*DOMINO_HOOKS, *SAMPLING_HOOKS)


def write_sources(root: Path, hooks: tuple[Hook, ...], without: str = "", renamed: str = "") -> None:
    """A package `vllm` that has the hooks, less one function or with one parameter of another name."""
    modules: dict[str, dict[str, list[str]]] = {}
    for hook in hooks:
        owner, _, function = hook.name.rpartition(".")
        if hook.name != without:
            parameters = ["renamed" if name == renamed else name for name in hook.parameters]
            modules.setdefault(hook.module, {}).setdefault(owner, []).append(
                f"def {function}({', '.join(parameters)}):"
            )
    for module, owners in modules.items():
        lines: list[str] = []
        for owner, functions in owners.items():
            indent = "    " if owner else ""
            lines += [f"class {owner}:"] if owner else []
            lines += [f"{indent}{line} ..." for line in functions]
        path = root.joinpath(*module.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(lines))


@pytest.mark.parametrize("version", ["0.32.0", "0.32.0+cpu", "0.33.1", "0.33.0rc2"])
def test_tested_versions_are_accepted(version: str) -> None:
    """Guards against a range that turns away what it was made for: local builds and release candidates."""
    assert refusal(version) is None


@pytest.mark.parametrize("version", ["0.31.9", "0.34.0", "0.34.0rc1", "1.0", "dev"])
def test_other_versions_are_refused_with_a_remedy(version: str) -> None:
    """Guards against a plugin that goes on in a vLLM nobody tried it with, and an error without the way out."""
    reason = refusal(version)
    assert reason is not None
    assert version in reason
    assert "0.32" in reason
    assert "install" in reason


@pytest.mark.parametrize("gone", [hook.name for hook in HOOKS])
def test_a_hook_that_is_gone_is_named(tmp_path: Path, gone: str) -> None:
    """Guards against a rename upstream that this plugin would fall over later, or pass by without a word, and against a
    check that misses what is there, functions of a module and methods of a class alike."""
    write_sources(tmp_path / "whole", HOOKS)
    assert missing_hooks(HOOKS, tmp_path / "whole") == []
    write_sources(tmp_path, HOOKS, without=gone)
    (said,) = missing_hooks(HOOKS, tmp_path)
    assert said.endswith(f"has no {gone}")


def test_a_parameter_that_is_gone_is_named(tmp_path: Path) -> None:
    """Guards against a function that kept its name and takes other things."""
    write_sources(tmp_path, DOMINO_HOOKS, renamed="hidden_states")
    (said,) = missing_hooks(DOMINO_HOOKS, tmp_path)
    assert said.endswith("DFlashQwen3ForCausalLM.compute_logits takes no hidden_states")
