"""Writing a rank's file: many threads make the same bytes as one, in bounded memory, and errors come through."""

from __future__ import annotations

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from safetensors.numpy import load_file

from aotllm.builder.rank_writer import _packed, write_rank
from aotllm.builder.targets.program import RankProgram, TensorJob, ready
from aotllm.engines.rank_file import TensorSpec, read_header
from aotllm.errors import CheckpointError


def program(parts_per_tensor=7, on_part=lambda i: None):
    """Three tensors in parts; the second one's scales are filled by its parts."""
    scales = np.zeros(parts_per_tensor, np.float32)

    def part(value, i):
        def make():
            on_part(i)
            scales[i] = i
            return np.full((i + 1, 3), value + i, np.uint8)

        return make

    size = 3 * sum(range(1, parts_per_tensor + 1))
    jobs = [
        TensorJob(name, TensorSpec("U8", (size,)), tuple(part(value, i) for i in range(parts_per_tensor)), "bf16")
        for name, value in (("a", 10), ("b", 100), ("c", 200))
    ]
    late = TensorJob("b.scales", TensorSpec("F32", scales.shape), (lambda: scales,), "bf16", in_order=True)
    return RankProgram({"version": 1}, (*jobs[:2], late, jobs[2], ready("norm", np.ones(5, np.float32))))


@pytest.mark.parametrize("num_threads", [1, 2, 16])
def test_the_file_does_not_depend_on_threads(num_threads, tmp_path):
    done = []
    digest = write_rank(tmp_path / "r", program(), lambda: done.append(1), num_threads)
    tensors = load_file(tmp_path / "r")
    rows = np.concatenate([np.full(3 * (i + 1), 100 + i, np.uint8) for i in range(7)])
    np.testing.assert_array_equal(tensors["b"], rows)
    np.testing.assert_array_equal(tensors["b.scales"], np.arange(7, dtype=np.float32))
    np.testing.assert_array_equal(tensors["norm"], np.ones(5))
    assert json.loads(read_header(tmp_path / "r")["__metadata__"]["plan"]) == {"version": 1}
    assert digest == hashlib.sha256((tmp_path / "r").read_bytes()).hexdigest()
    assert len(done) == 4


def test_parts_ahead_are_bounded():
    made = []
    pool = ThreadPoolExecutor(2)
    results = _packed(program(20, made.append).tensors, pool, ahead=4)
    next(results)
    pool.shutdown()  # waits for what was handed out
    assert len(made) == 1 + 4


def test_an_error_in_a_part_ends_the_build(tmp_path):
    def fail(i):
        if i == 5:
            raise CheckpointError("damaged")

    with pytest.raises(CheckpointError, match="damaged"):
        write_rank(tmp_path / "r", program(on_part=fail), lambda: None, num_threads=2)
