"""What goes wrong, on real vLLM: it says what, and does not start, or goes on without speculation."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

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

    known, make = dict(ModelRegistry.models), rejection_sampler.RejectionSampler.__init__
    monkeypatch.setattr(vllm.plugins, "plugins_loaded", False)
    monkeypatch.setattr(rejection_sampler, "expand_batch_to_tokens", _stock())
    rejection_sampler.RejectionSampler.__init__ = getattr(make, "__wrapped__", make)
    for name in ("DominoDraftModel", "DFlashDominoDraftModel"):
        ModelRegistry.models.pop(name, None)
    yield monkeypatch
    ModelRegistry.models.clear()
    ModelRegistry.models.update(known)
    rejection_sampler.RejectionSampler.__init__ = make


def test_an_unsupported_vllm_is_named(tiny: Tiny, fresh: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Guards against a plugin that works on a vLLM nobody tried: it registers nothing and says so."""
    fresh.setattr(versions, "installed_version", lambda: "0.40.0")
    logger = logging.getLogger("vllm.outpace")  # vLLM keeps what stands below its own name to itself
    logger.addHandler(caplog.handler)
    speculation = speculative("dflash", tiny.domino, BLOCK - 1)
    with pytest.raises(Exception, match="DominoDraftModel"), engine(tiny.target, speculation):
        pass
    logger.removeHandler(caplog.handler)
    assert "outpace registers nothing: vLLM 0.40.0 is not among the versions" in caplog.text


def test_a_plugin_that_throws_is_heard(tiny: Tiny, fresh: pytest.MonkeyPatch) -> None:
    """Guards against an error of the plugin's that is swallowed, after which sampling on a CPU would not be guarded."""

    def broken() -> None:
        raise RuntimeError("the plugin is broken")

    fresh.setattr(outpace.vllm, "register", broken)
    with pytest.raises(RuntimeError, match="the plugin is broken"), engine(tiny.target):
        pass


def test_sampling_that_cannot_be_mended_starts_no_engine_that_speculates(tiny: Tiny, fresh: pytest.MonkeyPatch) -> None:
    """Guards against wrong answers at T > 0 where the mend does not take, by whatever method."""
    fresh.setattr(cpu_sampling, "expand", lambda x, counts, total, *replaced: x.new_empty(total))
    stock = speculative("dflash", tiny.dflash, BLOCK - 1)
    with pytest.raises(RuntimeError, match="samples wrongly on a CPU"), engine(tiny.target, stock):
        pass
    with engine(tiny.target) as plain:
        assert len(plain.generate([[5, 9, 14, 200, 31]], 4, temperature=1.0, seed=1)[0]) == 4


def test_the_fault_is_there_and_mended(tiny: Tiny, fresh: pytest.MonkeyPatch) -> None:
    """Guards against a guard that guards nothing: vLLM's own sampler shows the fault."""
    from vllm.v1.sample import rejection_sampler

    seen = []
    right = cpu_sampling.is_right

    def watched(sampler: Any) -> bool:
        seen.append(right(sampler))
        return seen[-1]

    fresh.setattr(cpu_sampling, "is_right", watched)
    with engine(tiny.target, speculative("dflash", tiny.dflash, BLOCK - 1)):
        assert seen == [False, True]
        assert rejection_sampler.expand_batch_to_tokens is cpu_sampling.expand


def _stock() -> Any:
    """vLLM's function, read afresh from its source: an engine before may have mended the module."""
    from vllm.v1.sample import rejection_sampler

    namespace = dict(vars(rejection_sampler))
    source = Path(rejection_sampler.__file__).read_text()
    start = source.index("def expand_batch_to_tokens(")
    exec(source[start : source.index("\ndef ", start)], namespace)
    return namespace["expand_batch_to_tokens"]
