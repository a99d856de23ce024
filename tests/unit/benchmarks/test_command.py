"""The command behind `make peers`, on a tiny model and the peers that need no environment of their own."""

import json
from pathlib import Path

import pytest

from benchmarks.peers.__main__ import main
from outpace.lib.errors import InvalidRequest
from tests.unit.models.tiny import save_tiny_model, write_tiny_gguf


@pytest.mark.thorough
def test_a_race_leaves_records_a_table_and_a_chart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards against runners that do not fit the protocol, and against a contender that is missing without a reason."""
    model = str(save_tiny_model(tmp_path / "model", max_position_embeddings=2048))
    options = {"model": model, "max_new_tokens": 6, "threads": 1, "folder": tmp_path, "constraints": tmp_path}
    main(**options, workload=["builtin:2"], peers="transformers,vllm", out=tmp_path / "out")  # type: ignore[arg-type]
    records = [json.loads(line) for line in (tmp_path / "out" / "records.jsonl").read_text().splitlines()]
    raced = [record["method"] for record in records if record["index"] == 1]
    missing = json.loads((tmp_path / "out" / "chart.json").read_text())["missing"]
    assert raced[:2] == ["outpace/bfloat16/plain", "outpace/bfloat16/default"]
    assert {"transformers/bfloat16/plain", "transformers/bfloat16/lookup"} <= set(raced)
    assert "no draft model" in missing["transformers/bfloat16/assisted"]
    assert "no pinned versions" in missing["vllm"]
    for record in records:
        if record["peer"] == "outpace":
            assert record["equal_to_own_plain"], record["method"]
        assert 1 <= record["new_tokens"] <= 6
        assert record["memory_mb"] > 50
    printed = capsys.readouterr().out
    assert printed.strip() == (tmp_path / "out" / "table.md").read_text().strip()
    assert all(f"`{name}`" in printed for name in raced)
    with pytest.raises(InvalidRequest, match="holds the records of a race"):
        main(**options, workload=["builtin:2"], peers="transformers,vllm", out=tmp_path / "out")  # type: ignore[arg-type]


@pytest.mark.thorough
def test_a_gguf_file_is_raced_as_it_is(tmp_path: Path) -> None:
    """Guards against weights that are converted before a race on a file, and against speeds without a read test."""
    model, out = str(write_tiny_gguf(tmp_path / "tiny.gguf")), tmp_path / "out"
    options = {"model": model, "max_new_tokens": 6, "threads": 1, "folder": tmp_path, "constraints": tmp_path}
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"id": "1", "dataset": "set", "raw": True, "turns": ["hello all"]}))
    main(**options, workload=[str(prompts)], peers="llama.cpp", out=out)  # type: ignore[arg-type]
    records = [json.loads(line) for line in (out / "records.jsonl").read_text().splitlines()]
    assert [record["method"] for record in records] == ["outpace/GGUF/plain", "outpace/GGUF/default"]
    assert all(record["equal_to_own_plain"] for record in records)
    chart = json.loads((out / "chart.json").read_text())
    assert all(row["share"] > 0 for row in chart["rows"])
    assert "no pinned versions" in chart["missing"]["llama.cpp"]
