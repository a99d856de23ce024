"""The reader of GGUF files: values, arrays, tensors without copies, and files that are refused."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter

from outpace.lib.errors import ModelError
from outpace.models.loading.gguf import read_gguf

ROWS, WIDTH = 6, 256


def write(path: Path, **arrays: Any) -> Path:
    """A file of a vector, and a matrix of three experts in each of some types."""
    writer = GGUFWriter(str(path), "llama")
    for key, value in arrays.items():
        writer.add_array(key, value)
    writer.add_float32("half", 0.5)
    writer.add_bool("yes", True)
    numbers = np.random.default_rng(3).normal(size=(3, ROWS, WIDTH)).astype(np.float32)
    writer.add_tensor("vector", numbers[0, 0])
    for kind in ("F16", "BF16", "Q4_0", "Q5_1", "Q8_0"):
        raw = GGMLQuantizationType[kind]
        writer.add_tensor(kind, gguf.quants.quantize(numbers, raw), raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_values_and_tensors_are_those_of_the_reference_reader(tmp_path: Path) -> None:
    """Guards against values, sizes or bytes that differ from what the format's own slow reader finds."""
    words = ["", "a", "Größe 日本", "x" * 70_000]
    path = write(tmp_path / "a.gguf", words=words, numbers=[1, -2, 3], scores=[0.5, -1.5])
    found, reference = read_gguf(path), GGUFReader(path)
    assert found.values["words"] == words
    assert found.values["numbers"].tolist() == [1, -2, 3]
    assert found.values["scores"].tolist() == [0.5, -1.5]
    assert (found.values["half"], found.values["yes"], found.values["general.architecture"]) == (0.5, True, "llama")
    assert list(found.tensors) == [tensor.name for tensor in reference.tensors]
    for tensor in reference.tensors:
        ours = found.tensors[tensor.name]
        assert ours.shape == tuple(tensor.shape[::-1])
        assert int(ours.kind) == int(tensor.tensor_type)
        assert ours.data.shape[:-1] == ours.shape[:-1]
        assert ours.data.tobytes() == tensor.data.tobytes()


def test_tensors_are_views_of_the_mapped_file(tmp_path: Path) -> None:
    """Guards against a copy of all weights, and against views that outlive their mapping."""
    first = read_gguf(write(tmp_path / "a.gguf"))
    matrix, other = first.tensors["Q8_0"].data, first.tensors["F16"].data
    assert not matrix.flags.owndata
    assert not matrix.flags.writeable
    assert matrix.ctypes.data % 32 == other.ctypes.data % 32 == 0
    content = matrix.tobytes()
    del first, other
    assert matrix.tobytes() == content


@pytest.mark.parametrize(("number", "called"), [(31, "Q4_0_4_4"), (4, "Q4_2"), (99, "99, which is not known")])
def test_an_unknown_type_is_refused_by_name(number: int, called: str, tmp_path: Path) -> None:
    """Guards against "not a complete file, download it again" for a whole file of a type that is not known."""
    path = write(tmp_path / "a.gguf")
    content, name = bytearray(path.read_bytes()), b"Q8_0"
    place = content.index(name, content.index(b"Q5_1")) + len(name) + 4 + 3 * 8
    content[place] = number
    path.write_bytes(content)
    with pytest.raises(ModelError, match=rf"tensor Q8_0 is of type {called}.*; take a file of a common type"):
        read_gguf(path)


def test_a_file_that_may_not_be_opened_is_not_called_incomplete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against gigabytes that are downloaded again because another user owns a whole file."""
    path = write(tmp_path / "a.gguf")

    def refuse(*given: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ModelError, match=r"a\.gguf: cannot be read: Permission denied; check its permissions"):
        read_gguf(path)


def test_texts_that_lead_out_of_the_file_are_refused(tmp_path: Path) -> None:
    """Guards against a text whose length leads beyond the end of the file, read as a shorter one."""
    path = write(tmp_path / "a.gguf", words=["first", "last"])
    content = path.read_bytes()
    place = content.index(b"last") - 8
    for length in (2**20, 2**63 + 5):
        path.write_bytes(content[:place] + length.to_bytes(8, "little") + content[place + 8 :])
        with pytest.raises(ModelError, match="the texts of words extend beyond the file"):
            read_gguf(path)


def test_the_reader_needs_neither_torch_nor_transformers() -> None:
    """Guards against seconds of imports before the first byte is read."""
    code = "import sys, outpace.models.loading.gguf; print({'torch', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
