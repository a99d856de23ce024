"""Damaged, foreign and contradictory checkpoints of every layout: a clear error each, never a traceback.

What a wrong value of one layout means is tested beside that layout; here are the faults that all of them share.
"""

import copy
import json
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from outpace.drafters.load import load_net, read_net
from outpace.lib.checkpoint import Checkpoint, filled, read_checkpoint, write_checkpoint
from outpace.lib.errors import ModelError
from tests.fuzz.mutation import TENSOR_EDITS
from tests.unit.drafters.net.test_load import write_all

NAMES = ("dart-own", "dflash-speculators", "dflash-z-lab", "domino-domino", "domino-sglang", "eagle3-midlayer",
         "eagle3-speculators", "medusa-authors", "medusa-vllm")  # fmt: skip
LAYOUTS = dict.fromkeys(NAMES, "model.safetensors") | {"medusa-authors": "medusa_lm_head.safetensors"}
each_layout = pytest.mark.parametrize("layout", LAYOUTS)
each_file = pytest.mark.parametrize("layout", ["dart-own", "medusa-authors"])  # files are read before layouts are known


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("written")
    write_all(folder)
    assert {path.name for path in folder.iterdir()} == LAYOUTS.keys()
    return folder


@pytest.fixture
def folder(written: Path, layout: str, tmp_path: Path) -> Path:
    """A copy of one layout's files, to be damaged."""
    copied = tmp_path / layout
    copied.mkdir()
    for file in (written / layout).iterdir():
        (copied / file.name).write_bytes(file.read_bytes())
    return copied


def shards(folder: Path, weights: str, listed: Callable[[list[str]], dict[str, Any]] | None = None) -> None:
    """Split the weights into two shards; `listed` makes the index from all names, by default the right one."""
    tensors = load_file(folder / weights)
    (folder / weights).unlink()
    names = sorted(tensors)
    right = {name: f"{index % 2}.safetensors" for index, name in enumerate(names)}
    for file in set(right.values()):
        save_file({name: tensors[name] for name in names if right[name] == file}, folder / file)
    index = right if listed is None else right | listed(names)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


@each_layout
def test_shards_are_read_as_one_file_is(layout: str, folder: Path) -> None:
    """Guards against the faults below being found in files that were never whole."""
    whole = load_net(str(folder)).state_dict()
    shards(folder, LAYOUTS[layout])
    found = load_net(str(folder)).state_dict()
    assert found.keys() == whole.keys()
    assert all(torch.equal(found[key], tensor) for key, tensor in whole.items())


@each_file
@pytest.mark.parametrize("share", [0.0, 0.001, 0.1, 0.5, 0.999])
def test_a_file_cut_off_is_refused(layout: str, share: float, folder: Path) -> None:
    """Guards against an interrupted download, cut in the header or in the weights, read as far as it goes."""
    path = folder / LAYOUTS[layout]
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])
    with pytest.raises(ModelError, match=rf"{LAYOUTS[layout]}: cannot be read, maybe cut off.*download it again"):
        load_net(str(folder))


@each_file
@pytest.mark.parametrize(
    ("listed", "complaint"),
    [
        (lambda names: {names[0]: "2.safetensors"}, r"2\.safetensors: cannot be read"),
        (lambda names: {names[0]: "../x/0.safetensors"}, "must give a file name of this folder"),
        (lambda names: {names[0]: 3}, "must give a file name of this folder"),
        (lambda names: {names[0]: "/etc/hostname"}, "must give a file name of this folder"),
        (lambda names: {names[0]: ".."}, "cannot be read|file name of this folder"),
        (lambda names: {names[0]: ""}, "cannot be read|file name of this folder"),
        (lambda names: {names[0]: None}, "must give a file name of this folder"),
        (lambda names: {names[0]: ["0.safetensors"]}, "must give a file name of this folder"),
        (lambda names: {names[0]: "a\0b"}, "cannot be read"),
        (lambda names: {"lm_head.extra": "0.safetensors"}, r"lists lm_head\.extra, which no shard holds"),
    ],
)
def test_an_index_that_says_something_else_is_refused(
    layout: str, listed: Callable[[list[str]], dict[str, Any]], complaint: str, folder: Path
) -> None:
    """Guards against shards that are missing, files elsewhere on the machine, and optional tensors lost in silence."""
    shards(folder, LAYOUTS[layout], listed)
    with pytest.raises(ModelError, match=complaint):
        load_net(str(folder))


@each_file
def test_a_tensor_in_two_shards_is_refused(layout: str, folder: Path) -> None:
    """Guards against one of two versions of a weight taken by the order of files."""
    shards(folder, LAYOUTS[layout])
    first, second = load_file(folder / "0.safetensors"), load_file(folder / "1.safetensors")
    name = next(iter(first))
    save_file(second | {name: first[name]}, folder / "1.safetensors")
    with pytest.raises(ModelError, match="and so does another shard"):
        load_net(str(folder))


@each_file
def test_a_folder_without_weights_says_what_to_do(layout: str, folder: Path) -> None:
    """Guards against a folder of other formats answered by a traceback, and without a way out."""
    (folder / LAYOUTS[layout]).rename(folder / "consolidated.00.pth")
    with pytest.raises(ModelError, match=r"no model\.safetensors.*; save the weights as safetensors"):
        load_net(str(folder))
    torch.save({"step": 3, "model": {}}, folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match="must hold a dictionary of tensors and nothing else"):
        load_net(str(folder))
    (folder / "pytorch_model.bin").write_bytes(b"not a pickle")
    with pytest.raises(ModelError, match=r"(?s)cannot be read as tensors alone.*; save it as safetensors"):
        load_net(str(folder))


# Of one checkpoint's tensors in turn: what each must be refused for.
EDITS = ("transposed", "a row short", "flat", "one number", "empty", "int8", "float8", "complex", "NaN")
SPOILT: dict[str, Callable[[Tensor], Tensor]] = {name: TENSOR_EDITS[name] for name in EDITS}
SPOILT["infinite"] = lambda one: torch.full(one.shape, torch.inf)


@each_layout
@pytest.mark.parametrize("fault", SPOILT)
def test_every_tensor_is_checked(layout: str, fault: str, written: Path) -> None:
    """Guards against a weight of another shape or kind, or of no numbers, that is used all the same."""
    whole = read_checkpoint(written / layout)
    for key, tensor in whole.tensors.items():
        spoilt = SPOILT[fault](tensor)
        if fault == "transposed" and spoilt.shape == tensor.shape:
            continue  # square: no shape tells
        with pytest.raises(ModelError, match="here: "):
            read_net(Checkpoint("here", whole.config, whole.tensors | {key: spoilt}))


@each_layout
def test_no_other_tensor_is_taken(layout: str, written: Path) -> None:
    """Guards against weights that are left over, or all missing, without a word; test_golden.py leaves out each."""
    whole = read_checkpoint(written / layout)
    for key in ("extra.weight", "layers.9.mlp.up_proj.weight", "0.7.weight", "heads.weight", "9.0.linear.weight"):
        with pytest.raises(ModelError, match="here: "):
            read_net(Checkpoint("here", whole.config, whole.tensors | {key: torch.ones(2, 2)}))
    with pytest.raises(ModelError, match="here: "):
        read_net(Checkpoint("here", whole.config, {}))


@pytest.mark.parametrize("layout", ["dart-own", "eagle3-midlayer", "eagle3-speculators"])
@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (lambda d2t: d2t + 50, "outside vocab_size=50"),
        (lambda d2t: d2t - 50, "outside vocab_size=50"),
        (lambda d2t: torch.full_like(d2t, 2**62), "outside vocab_size=50"),
        (lambda d2t: -2 * torch.arange(20) + 40, "must lead to ascending target ids"),
        (lambda d2t: 20 - torch.arange(20), "must lead to ascending target ids"),
        (lambda d2t: torch.zeros_like(d2t), "t2d and d2t disagree"),
        (lambda d2t: d2t.int(), r"torch\.int32 \[20\]; draft_vocab_size=20 asks for int64"),
        (lambda d2t: d2t[:19], r"int64 \[19\]"),
        (lambda d2t: d2t[None], r"int64 \[1, 20\]"),
    ],
)
def test_a_map_of_ids_that_leads_astray_is_refused(
    layout: str, spoil: Callable[[Tensor], Tensor], complaint: str, written: Path
) -> None:
    """Guards against drafts that stand for other tokens, and an index out of range in the middle of an answer."""
    whole = read_checkpoint(written / layout)
    tensors = whole.tensors | {"d2t": spoil(whole.tensors["d2t"])}
    with pytest.raises(ModelError, match=complaint):
        read_net(Checkpoint("here", whole.config, tensors))


def places(config: dict[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every field of a config, of objects in it as well."""
    for key, value in config.items():
        yield (*above, key)
        if isinstance(value, dict):
            yield from places(value, (*above, key))


def changed(config: dict[str, Any], place: tuple[str, ...], *value: Any) -> dict[str, Any]:
    """A copy with one field set, or removed for no value."""
    whole = copy.deepcopy(config)
    inner = whole
    for key in place[:-1]:
        inner = inner[key]
    if value:
        inner[place[-1]] = value[0]
    else:
        del inner[place[-1]]
    return whole


DECODER = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "num_hidden_layers",
           "head_dim", "rms_norm_eps", "max_position_embeddings", "vocab_size")  # fmt: skip
DFLASH = (*DECODER, "rope_theta", "mask_token_id")
HEAD = ("gru_hidden_dim", "shift_label", "pure_draft_prefix_len")
# Fields whose absence a layout has no meaning for.
NEEDED = {
    "dart-own": (*DECODER, "draft_length"),
    "dflash-speculators": (*DFLASH, "aux_hidden_state_layer_ids", "block_size", "transformer_layer_config"),
    "dflash-z-lab": (*DFLASH, "dflash_config"),
    "domino-domino": (*DFLASH, *HEAD),
    "domino-sglang": (*DFLASH, *HEAD, "projector_type"),
    "eagle3-midlayer": (*DECODER, "rope_theta", "draft_vocab_size"),
    "eagle3-speculators": (*DECODER, "rope_theta", "draft_vocab_size", "norm_before_residual"),
    "medusa-authors": ("medusa_num_heads",),
    "medusa-vllm": ("num_heads",),
}


@each_layout
def test_a_field_that_nothing_replaces_is_asked_for(layout: str, written: Path) -> None:
    """Guards against a size or a convention guessed where the config does not state it."""
    whole = read_checkpoint(written / layout)
    needed = [place for place in places(whole.config) if place[-1] in NEEDED[layout]]
    assert {place[-1] for place in needed} == set(NEEDED[layout])
    for place in needed:
        with pytest.raises(ModelError, match="here: "):
            read_net(Checkpoint("here", changed(whole.config, place), whole.tensors))


WEIRD = ["x", [], {}, [1], ["x"], {"a": 1}, True, -1, 0, 2.5, float("inf"), float("nan"), 10**9, 10**30, [10**30]]
ELSEWHERE = ("architectures", "rope_scaling", "rope_parameters", "eagle_config", "dflash_config", "layer_types",
             "sliding_window", "max_window_layers", "use_sliding_window", "num_target_layers", "target_hidden_size",
             "speculators_model_type", "eagle_aux_hidden_state_layer_ids", "original_lm_head", "model_type",
             "medusa_num_layers", "partial_rotary_factor", "norm_output", "mlp_bias")  # fmt: skip


@each_layout
def test_no_value_of_any_field_is_a_traceback(layout: str, written: Path) -> None:
    """Guards against configs of another version, hand-edited or hostile."""
    whole = read_checkpoint(written / layout)
    refused = 0
    for place in {*places(whole.config), *((key,) for key in ELSEWHERE)}:
        configs = [changed(whole.config, place, value) for value in WEIRD]
        if place in places(whole.config):
            configs.append(changed(whole.config, place))
        for config in configs:
            try:
                read_net(Checkpoint("here", config, whole.tensors))
            except ModelError:
                refused += 1
    assert refused > 20, "odd values must have been refused"


@each_layout
def test_weights_of_another_kind_are_refused(layout: str, written: Path) -> None:
    """Guards against a config copied beside the wrong weights: of the same sizes, so that some shapes fit."""
    config = read_checkpoint(written / layout).config
    for other in LAYOUTS.keys() - {layout}:
        if other.partition("-")[0] == layout.partition("-")[0]:
            continue  # names of tensors of either layout are read
        with pytest.raises(ModelError, match="here: "):
            read_net(Checkpoint("here", config, read_checkpoint(written / other).tensors))


TENSORS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4, dtype=torch.int64)}


class Hostile:
    """Unpickles by writing a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def written_config(path: Path, config: str = "{}") -> Path:
    (path / "config.json").write_text(config)
    return path


@pytest.mark.parametrize("is_archive", [True, False])
def test_torch_files_are_read(tmp_path: Path, is_archive: bool) -> None:
    """Guards against EAGLE's torch files left out, of the old kind too."""
    written_config(tmp_path, '{"x": 1}')
    torch.save(TENSORS, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=is_archive)
    checkpoint = read_checkpoint(tmp_path)
    assert checkpoint.config == {"x": 1}
    assert checkpoint.tensors.keys() == TENSORS.keys()
    assert all(torch.equal(checkpoint.tensors[key], TENSORS[key]) for key in TENSORS)


@pytest.mark.parametrize("index", ["[]", "{}", "{"])
def test_a_malformed_index_is_refused(tmp_path: Path, index: str) -> None:
    """Guards against stack traces from a damaged index."""
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelError, match=r"model\.safetensors\.index\.json"):
        read_checkpoint(written_config(tmp_path))


def test_a_pickle_that_would_execute_code_is_refused(tmp_path: Path) -> None:
    """Guards against a drafter that runs its author's code on the machine that loads it."""
    for name, write in (
        ("zip", lambda path, what: torch.save(what, path)),
        ("bare", lambda path, what: path.write_bytes(pickle.dumps(what, protocol=2))),
    ):
        (tmp_path / name).mkdir()
        evidence = tmp_path / name / "executed"
        write(tmp_path / name / "pytorch_model.bin", {"a": Hostile(evidence)})
        with pytest.raises(ModelError, match=r"pytorch_model\.bin: cannot be read"):
            read_checkpoint(written_config(tmp_path / name))
        assert not evidence.exists()


def test_a_folder_without_a_checkpoint_says_what_is_missing(tmp_path: Path) -> None:
    """Guards against a name on a hub answered by a stack trace."""
    with pytest.raises(ModelError, match=r"no config\.json"):
        read_checkpoint(tmp_path / "nobody")


def test_all_that_does_not_fit_is_named_at_once() -> None:
    """Guards against errors that come one by one."""
    with pytest.raises(ModelError) as caught:
        filled(lambda: nn.Linear(3, 2), {"weight": torch.ones(3, 2), "scale": torch.ones(1)}, "here")
    for part in ("missing bias [2]", "unexpected scale [1]", "weight has shape [3, 2], its config says [2, 3]"):
        assert part in str(caught.value)


def test_memory_is_asked_for_only_once_everything_fits() -> None:
    """Guards against a damaged size in a config that takes the machine down before it is compared with the file."""
    with pytest.raises(ModelError, match=r"its config says \[67108864, 67108864\]"):
        filled(lambda: nn.Linear(2**26, 2**26, bias=False), {"weight": torch.ones(2, 3)}, "here")


def test_nan_is_never_written(tmp_path: Path) -> None:
    """Guards against a forgotten weight spread to everyone who loads the file."""
    with pytest.raises(ModelError, match="NaN: a"):
        write_checkpoint(tmp_path, {}, {"a": torch.tensor([1.0, torch.nan]), "b": torch.ones(1)})
    assert not list(tmp_path.iterdir())


def test_nothing_is_written_over(tmp_path: Path) -> None:
    """Guards against a drafter overwritten by a slip of the path."""
    write_checkpoint(tmp_path, {}, {"a": torch.ones(1)})
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(ModelError, match="already holds"):
        write_checkpoint(tmp_path, {"x": 1}, {"a": torch.zeros(1)})
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
