"""Models that would be decoded wrongly are refused at load, and told why."""

from typing import Any

import pytest
from transformers import (
    FalconMambaConfig,
    JambaConfig,
    LlamaConfig,
    Mamba2Config,
    MambaConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3NextConfig,
)

from outpace.core.errors import UnsupportedModel
from outpace.models.families import SUPPORTED_FAMILIES, check_supported
from tests.unit.models.tiny import FAMILIES, tiny_config


@pytest.mark.parametrize(
    "config", [MambaConfig(), Mamba2Config(), FalconMambaConfig(), JambaConfig(), Qwen3NextConfig()], ids=type
)
def test_recurrent_models_are_refused_for_their_state(config: PretrainedConfig) -> None:
    """Guards against drafts that stay in a recurrent state after they were rejected, hybrids included."""
    with pytest.raises(UnsupportedModel, match=rf"'{config.model_type}'.*recurrent state cannot be rolled back"):
        check_supported(config)


class UnheardOfConfig(LlamaConfig):
    """Looks like a Llama to every check but that of its name."""

    model_type = "unheard-of"


def test_families_without_a_contract_test_are_refused_by_name() -> None:
    """Guards against decoding an architecture whose masks or positions nobody checked."""
    supported = ", ".join(SUPPORTED_FAMILIES)
    with pytest.raises(UnsupportedModel, match=f"'unheard-of': not supported; supported are {supported}"):
        check_supported(UnheardOfConfig())


def test_sliding_windows_are_refused_but_not_windows_that_are_off() -> None:
    """Guards against layers that must not see far back, and against refusing every Qwen2 for a window it never uses."""
    sizes: dict[str, Any] = {"num_hidden_layers": 3, "sliding_window": 16}
    with pytest.raises(UnsupportedModel, match="sliding window"):
        check_supported(Qwen2Config(use_sliding_window=True, max_window_layers=1, **sizes))
    check_supported(Qwen2Config(use_sliding_window=False, **sizes))
    check_supported(Qwen2Config(use_sliding_window=True, max_window_layers=3, **sizes))


@pytest.mark.parametrize("key", ["rope_type", "type"])
@pytest.mark.parametrize("field", ["rope_scaling", "rope_parameters"])
def test_rotations_that_depend_on_the_batch_are_refused(field: str, key: str) -> None:
    """Guards against dynamic scaling under its old and new names: a draft's length would change its neighbours."""
    scaling = {key: "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    with pytest.raises(UnsupportedModel, match=r"rope_type='dynamic'.*longest position"):
        check_supported(tiny_config("llama", **{field: scaling}))


@pytest.mark.parametrize("scaling", ["linear", "llama3", "yarn"])
def test_static_rotations_are_accepted(scaling: str) -> None:
    """Guards against refusing Llama 3 and Qwen2.5 long-context checkpoints, whose scaling is static."""
    parameters: dict[str, Any] = {"rope_type": scaling, "factor": 2.0, "rope_theta": 10000.0}
    parameters |= {"original_max_position_embeddings": 64, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    check_supported(tiny_config("llama", rope_parameters=parameters))


@pytest.mark.parametrize("family", list(FAMILIES))
def test_supported_families_pass(family: str) -> None:
    """Guards against a check that refuses everything."""
    check_supported(tiny_config(family))
