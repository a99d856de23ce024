"""A page of metrics to the counts of speculation."""

import pytest

from outpace.endpoint.server import SpeculationCounts, read_counts
from outpace.lib.errors import ModelError

PAGE = """# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 20.0
# HELP vllm:spec_decode_num_draft_tokens_total Number of draft tokens.
# TYPE vllm:spec_decode_num_draft_tokens_total counter
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 100.0
vllm:spec_decode_num_draft_tokens_total{engine="1",model_name="m"} 10.0
# HELP vllm:spec_decode_num_draft_tokens_created Number of draft tokens.
# TYPE vllm:spec_decode_num_draft_tokens_created gauge
vllm:spec_decode_num_draft_tokens_created{engine="0",model_name="m"} 1.795414135e+09
# HELP vllm:spec_decode_num_accepted_tokens_total Number of accepted tokens.
# TYPE vllm:spec_decode_num_accepted_tokens_total counter
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 15.0
# HELP vllm:spec_decode_num_accepted_tokens_per_pos_total Accepted tokens per draft position.
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos_total counter
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 5.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 10.0
"""
"""As vLLM writes it, and a second engine."""


def test_counts_are_read_from_vllms_page() -> None:
    """Guards against times of creation taken for counts, and engines or positions left out."""
    assert read_counts(PAGE) == SpeculationCounts(110, 15, (10, 5))


def test_growth() -> None:
    """Guards against positions that are there only later."""
    assert SpeculationCounts(9, 5, (4, 1)) - SpeculationCounts(2, 1, (1,)) == SpeculationCounts(7, 4, (3, 1))


def test_no_speculation_and_no_metrics() -> None:
    """Guards against an acceptance of nothing where nothing is told, and a traceback for another page."""
    assert read_counts("# TYPE up gauge\nup 1.0\n") is None
    with pytest.raises(ModelError, match="not in Prometheus's text format"):
        read_counts("<html>sign in</html>")
