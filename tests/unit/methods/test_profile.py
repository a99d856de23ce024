"""Profiles: what is kept of a search, and when it chooses the method of a model that is loaded."""

import json
import logging
from datetime import date
from pathlib import Path
from typing import Any

import pytest

import outpace
from outpace.drafters.build_context import BuildContext
from outpace.kernels.build import Build
from outpace.lib.errors import InvalidRequest
from outpace.methods import profile, stores
from outpace.methods.catalog import MethodSpec, build_proposer
from outpace.methods.profile import Figures, Profile, profile_file, read_profile, write_profile
from outpace.models import costs_file
from tests.unit.methods.test_speculative_config import NGRAM
from tests.unit.models.tiny import save_tiny_model

FIGURES = Figures(
    speedup=1.5, speedup_interval=(1.2, 1.9), tokens_per_step=2.0, drafting_share=0.1, break_even=1.3, prompts=7
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(profile, "user_cache_path", lambda name: tmp_path)
    return tmp_path


def made(method: str = "recycle:budget=7", **changes: Any) -> Profile:
    facts: dict[str, Any] = {
        "drafter": None, "model": "tiny", "measured": FIGURES, "workload": ("builtin",), "prompts": "7 prompts",
        "max_new_tokens": 64, "made": date(2026, 11, 23), "version": "0.1.0", "hardware": "a CPU", "threads": 1,
        "dtype": "float32", "quantize": "none", "kv_cache_dtype": "float32",
    }  # fmt: skip
    return Profile(method=method, **(facts | changes))


def load(folder: str, *given: Any, **options: Any) -> outpace.Model:
    return outpace.load(folder, *given, **({"dtype": "float32", "device": "cpu"} | options))


def keep(folder: str, one: Profile) -> Path:
    """Write a profile where `load` looks for it."""
    file = profile_file(load(folder, "plain").target, folder)
    write_profile(file, one)
    return file


def test_what_was_written_is_read_and_taken(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a profile that loses a field on the way, that nobody reads, or that is not said to have chosen."""
    before = load(folder)
    assert (before.method_name, before.method_from) == ("outpace:draft=none", "the default")
    file = keep(folder, made())
    assert read_profile(file) == made()
    model = load(folder)
    assert model.method_name == "recycle:budget=7"
    assert model.method_from == f"from the profile of 2026-11-23, {file}"
    assert model.generate("abc", max_new_tokens=12).token_ids == before.generate("abc", max_new_tokens=12).token_ids
    monkeypatch.chdir(Path(folder).parent)
    assert load(Path(folder).name).method_name == "recycle:budget=7", "the same folder by another way"
    assert load(folder, profile=False).method_from == "the default"


def test_the_method_of_a_profile_is_built_once(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a load that builds the method of a profile, drops it and builds it again: `self` copied all
    weights twice."""
    keep(folder, made())
    built, build = list[str](), build_proposer

    def counted(spec: MethodSpec, context: BuildContext) -> Any:
        built.append(str(spec))
        return build(spec, context)

    monkeypatch.setattr(stores, "build_proposer", counted)
    assert load(folder).method_name == "recycle:budget=7"
    assert built == ["recycle:budget=7"]


def test_what_the_user_names_goes_first(folder: str) -> None:
    """Guards against a profile that overrules a method, a drafter, vLLM's config or a budget."""
    keep(folder, made())
    named = load(folder, "lookup")
    assert (named.method_name, named.method_from) == ("lookup", "named")
    drafted = load(folder, drafter="early-exit:1")
    assert (drafted.method_name, drafted.method_from) == ("outpace:draft=linear", "the default")
    assert load(folder, speculative_config=NGRAM).method_from == "named"
    answer = load(folder, budget=2).generate("abcabcabc", max_new_tokens=12)
    assert 0 < answer.metrics.drafted <= 2 * answer.metrics.steps


def test_the_drafter_of_a_profile(folder: str) -> None:
    """Guards against a method that was tuned with a drafter and drafts with another."""
    keep(folder, made("linear:budget=2", drafter="early-exit:1"))
    model = load(folder)
    assert (model.method_name, model.drafter) == ("linear:budget=2", "early-exit:1")
    assert model.drafters.language_model().config.num_hidden_layers == 1


def test_another_precision_machine_or_model(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a method chosen for what costs something else: another dtype, processor or number of threads."""
    keep(folder, made())
    assert load(folder).method_name == "recycle:budget=7"
    assert load(folder, dtype="bfloat16").method_from == "the default"
    other = save_tiny_model(tmp_path / "other", eos_token_id=None, max_position_embeddings=2048)
    assert load(str(other)).method_from == "the default"
    with monkeypatch.context() as patch:
        patch.setattr(costs_file, "threads", lambda: 64)
        assert load(folder).method_from == "the default"
    with monkeypatch.context() as patch:
        patch.setattr(costs_file, "cpu_flags", lambda: frozenset({"sve2"}))
        assert load(folder).method_from == "the default"


def test_times_of_other_kernels_are_measured_anew(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against trees sized for kernels of an older version, which were slower."""
    monkeypatch.setattr(costs_file, "_SMALL", 0)
    target, now = load(folder).target, costs_file.costs_file
    before = now(target)
    assert before == now(target)
    monkeypatch.setattr(costs_file, "loaded_kernels", object)
    monkeypatch.setattr(costs_file, "build", lambda: Build(None, "", tmp_path / "other.so"))
    assert before != now(target)


def test_kernels_that_are_off_are_not_compiled(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a compiler that runs, at each start, for kernels that the user has turned off."""
    monkeypatch.setenv("OUTPACE_KERNELS", "off")
    monkeypatch.setattr(costs_file, "_SMALL", 0)
    monkeypatch.setattr(costs_file, "build", lambda: pytest.fail("compiled"))
    assert costs_file.costs_file(load(folder).target) is not None


def test_tests_keep_their_times_to_themselves(folder: str, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against times of passes that were measured beside other tests, and size the trees of this machine's user,
    whose older times decide what tests find."""
    monkeypatch.setattr(costs_file, "_SMALL", 0)
    file = costs_file.costs_file(load(folder, "plain").target)
    assert file is not None
    assert file.is_relative_to(own_cache)


DAMAGES: dict[str, dict[str, Any]] = {
    "an unknown method": {"method": "magic"},
    "an unknown option": {"method": "recycle:sparkle=7"},
    "a value that is none": {"measured": {**FIGURES.model_dump(), "speedup": "fast"}},
    "a field of another version": {"colour": "red"},
    "a drafter that is gone": {"method": "linear", "drafter": "/nowhere/at/all"},
    "a drafter of a kind that does not ship": {"method": "eagle3"},
}


@pytest.mark.parametrize("damage", ["half a file", "a missing field", "bytes", *DAMAGES])
def test_a_profile_that_cannot_be_used(folder: str, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    """Guards against a model that cannot be loaded for a file it can do without, and one passed over in silence."""
    file = keep(folder, made())
    fields = json.loads(file.read_text())
    if damage == "half a file":
        file.write_text(file.read_text()[:100])
    elif damage == "bytes":
        file.write_bytes(b"\xff\xfe")
    else:
        fields.pop("method") if damage == "a missing field" else fields.update(DAMAGES[damage])
        file.write_text(json.dumps(fields))
    with caplog.at_level(logging.WARNING, "outpace"):
        model = load(folder)
    assert (model.method_name, model.method_from) == ("outpace:draft=none", "the default")
    (record,) = [one for one in caplog.records if one.name == "outpace" and "profile" in one.getMessage()]
    said = record.getMessage()
    assert said.startswith(f"outpace: the profile {file} is not used: ")
    assert said.endswith("; run `outpace tune` again, or delete it")
    assert "\n" not in said


def test_a_home_that_is_no_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Guards against a warning of a damaged profile at every load, where there can be none."""
    (tmp_path / "home").write_text("")
    assert read_profile(tmp_path / "home" / "profiles" / "0.json") is None
    assert not caplog.records


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    """Guards against a traceback after minutes of measuring."""
    (tmp_path / "profiles").write_text("in the way")
    with pytest.raises(InvalidRequest, match=r"cannot be written: .*; set XDG_CACHE_HOME"):
        write_profile(tmp_path / "profiles" / "0.json", made())
