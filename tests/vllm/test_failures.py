"""What goes wrong, on real vLLM: it says what, and does not start, or goes on without speculation."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor

import outpace.vllm
from outpace.drafters.domino.net import DominoNet
from outpace.drafters.kinds import write_net
from outpace.lib.errors import ModelError
from outpace.vllm import cpu_sampling, versions
from tests.vllm.engines import engine, speculative
from tests.vllm.tiny import BLOCK, HIDDEN, Tiny, domino_config, randomised


def lacking(tiny: Tiny, folder: Path) -> Path:
    """A drafter without one of its head's tensors."""
    folder.mkdir()
    tensors = load_file(tiny.domino / "model.safetensors")
    del tensors["embed_proj.0.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text((tiny.domino / "config.json").read_text())
    return folder


def foreign(tiny: Tiny, folder: Path) -> Path:
    """A drafter for a narrower model."""
    net = DominoNet(domino_config(hidden_size=128, target_hidden_size=128))
    write_net(randomised(net, 7), folder, "domino")
    return folder


@pytest.mark.parametrize(
    ("write", "said"),
    [
        (lacking, r"missing head.embed_proj.0.weight \[24, 296\]"),
        (foreign, f"target_hidden_size=128: the target's hidden size is {HIDDEN}"),
    ],
)
def test_a_drafter_that_does_not_fit_is_refused(
    tiny: Tiny, tmp_path: Path, write: Callable[[Tiny, Path], Path], said: str
) -> None:
    """Guards against a drafter of another model."""
    folder = write(tiny, tmp_path / "drafter")
    speculation = speculative("dflash", folder, BLOCK - 1)
    with pytest.raises(ModelError, match=said), engine(tiny.target, speculation):
        pass


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Plugins are loaded again, into a vLLM that has not seen them; afterwards all is as before."""
    import vllm.plugins
    from vllm import ModelRegistry
    from vllm.v1.sample import rejection_sampler

    known, constrain = dict(ModelRegistry.models), rejection_sampler.apply_sampling_constraints
    monkeypatch.setattr(vllm.plugins, "plugins_loaded", False)
    monkeypatch.setattr(rejection_sampler, "expand_batch_to_tokens", None)  # until it is replaced
    monkeypatch.setattr(rejection_sampler, "apply_sampling_constraints", getattr(constrain, "__wrapped__", constrain))
    for name in ("DominoDraftModel", "DFlashDominoDraftModel"):
        ModelRegistry.models.pop(name, None)
    yield monkeypatch
    ModelRegistry.models.clear()
    ModelRegistry.models.update(known)


def test_an_unsupported_vllm_is_named(tiny: Tiny, fresh: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Guards against a plugin that works on a vLLM it was never tested with: it registers nothing and says so."""
    fresh.setattr(versions, "installed_version", lambda: "0.40.0")
    logger = logging.getLogger("vllm.outpace")  # vLLM keeps what stands below its own name to itself
    logger.addHandler(caplog.handler)
    speculation = speculative("dflash", tiny.domino, BLOCK - 1)
    with pytest.raises(Exception, match="DominoDraftModel"), engine(tiny.target, speculation):
        pass
    logger.removeHandler(caplog.handler)
    assert "outpace registers nothing: vLLM 0.40.0 is not among the versions" in caplog.text


def test_an_error_of_the_plugin_is_not_swallowed(tiny: Tiny, fresh: pytest.MonkeyPatch) -> None:
    """Guards against an error of the plugin's that is swallowed, after which sampling on a CPU would not be guarded."""

    def broken() -> None:
        raise RuntimeError("the plugin is broken")

    fresh.setattr(outpace.vllm, "register", broken)
    with pytest.raises(RuntimeError, match="the plugin is broken"), engine(tiny.target):
        pass


def test_vllm_samples_by_our_function(tiny: Tiny, fresh: pytest.MonkeyPatch) -> None:
    """Guards against a replacement that vLLM passes by."""
    from vllm.v1.sample import rejection_sampler

    seen, expand = list[int](), cpu_sampling.expand

    def watched(x: Tensor, counts: Tensor, total: int, *replaced: float, **named: float) -> Tensor:
        seen.append(total)
        return expand(x, counts, total, *replaced, **named)

    fresh.setattr(cpu_sampling, "expand", watched)
    with engine(tiny.target, speculative("dflash", tiny.dflash, BLOCK - 1)) as made:
        made.generate([[5, 9, 14, 200, 31]], 4, temperature=1.0, seed=1)
    assert rejection_sampler.expand_batch_to_tokens is watched
    assert max(seen) > 1
