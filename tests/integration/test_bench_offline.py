"""`aotllm bench throughput` and `latency` on real engines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from aotllm.cli import main
from tests.integration.stress import Models


@pytest.fixture(scope="module")
def engine(models: Models) -> Path:
    """A tiny random model on target cpu."""
    return models.engine("llama").path


def test_a_batch_at_a_depth(engine: Path, tmp_path: Path):
    file = tmp_path / "result.json"
    arguments = ["--batch-sizes", "1,2", "--depth", "0,32", "--input-len", "16", "--output-len", "8", "--repeats", "2"]
    assert main(["bench", "latency", str(engine), *arguments, "--threads", "1", "--json", str(file)]) == 0
    points = json.loads(file.read_text())
    assert [(point["batch_size"], point["depth"]) for point in points] == [(1, 0), (2, 0), (1, 32), (2, 32)]
    for point in points:
        # What was put into the cache before was found there, and was not computed again.
        assert point["total_cached_tokens"] == point["batch_size"] * point["depth"]
        assert point["total_input_tokens"] == point["batch_size"] * (point["depth"] + 16)
        assert point["total_output_tokens"] == point["batch_size"] * 8
        assert point["preemptions"] == 0
        assert point["prefill_throughput"]["min"] > 0
        # This model is so fast that all tokens may come at once, which has no rate.
        assert point["decode_throughput"] is None or point["decode_throughput"]["min"] > 0


def test_more_requests_than_run_at_a_time(engine: Path, tmp_path: Path):
    file = tmp_path / "result.json"
    arguments = ["--num-prompts", "9", "--input-len", "12", "--output-len", "6", "--range-ratio", "0.5"]
    assert main(["bench", "throughput", str(engine), *arguments, "--concurrency", "1,4", "--json", str(file)]) == 0
    one, four = json.loads(file.read_text())
    assert (one["completed"], four["completed"]) == (9, 9)
    assert (one["max_concurrent_requests"], four["max_concurrent_requests"]) == (1, 4)
    assert one["total_output_tokens"] == four["total_output_tokens"]
    assert one["total_cached_tokens"] == 0  # each run has a prefix cache of its own
