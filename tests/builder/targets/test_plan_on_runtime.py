"""The C++ runner and the plan interpreter agree: both read the same format, and neither was made from the other."""

from __future__ import annotations

import json

import numpy as np
import pytest

from aotllm.builder.models import trace
from aotllm.builder.passes import run_passes
from aotllm.builder.targets.cpu.lowering import lower
from aotllm.builder.targets.cpu.packing import pack_segment, segment_nbytes
from aotllm.engines.rank_file import RankFileWriter, TensorSpec
from tests.builder.fakes import CONFIGS, random_checkpoint, random_tokens
from tests.builder.plan_interpreter import PlanInterpreter

runtime = pytest.importorskip("aotllm._runtime", reason="the compiled runtime is not built")

LIMITS = {"max_seq_len": 64, "max_num_tokens": 48, "max_batch_size": 4, "tokens_per_block": 16}
NUM_BLOCKS = 8


def runners(config, kv_dtype, path):
    """The same plan and weights in C++ and in numpy."""
    checkpoint = random_checkpoint(config)
    model = trace(checkpoint, LIMITS["max_seq_len"])
    run_passes(model, config, max_num_tokens=LIMITS["max_num_tokens"])
    lowered = lower(model, config, segment_format=lambda name: "f32", kv_dtype=kv_dtype, **LIMITS)
    dense = {job.tensor: job.compute() for job in lowered.dense_jobs}
    specs = {job.tensor: TensorSpec("U8", (segment_nbytes("f32", job.n, job.k),)) for job in lowered.pack_jobs}
    specs |= {name: TensorSpec("F32", array.shape) for name, array in dense.items()}
    with RankFileWriter(path, specs, {"plan": json.dumps(lowered.plan)}) as writer:
        for job in lowered.pack_jobs:
            writer.write(job.tensor, pack_segment(checkpoint.read(job.source), "f32", job.n, job.k, "f32"))
        for name, array in dense.items():
            writer.write(name, array)
        writer.close()
    tensors = {job.tensor: checkpoint.read(job.source) for job in lowered.pack_jobs} | dense
    cpp = runtime.CpuRunner(str(path), num_blocks=NUM_BLOCKS, num_threads=1)
    return cpp, PlanInterpreter(lowered.plan, tensors, NUM_BLOCKS)


KV_TOLERANCES = {"f32": 5e-5, "bf16": 2e-2, "int16": 5e-3, "int8": 5e-2}
"""The others round values that differ in the last bit of float32 to neighbours"""


@pytest.mark.parametrize("kv_dtype", KV_TOLERANCES)
@pytest.mark.parametrize("name", CONFIGS)
def test_runner_and_interpreter_agree(name, kv_dtype, tmp_path):
    """Two sequences that share steps, in chunks, with blocks anywhere."""
    config = CONFIGS[name]
    cpp, numpy = runners(config, kv_dtype, tmp_path / "rank0.engine")
    first, second = random_tokens(config, 34, seed=2), random_tokens(config, 9, seed=3)
    tables = [[5, 1, 7], [0]]
    for step in (
        ([first[:20]], [0], tables[:1], ["all"]),
        ([first[20:33], second[:8]], [20, 0], tables, ["last", "all"]),
        ([first[33:], second[8:]], [33, 8], tables, ["last", "last"]),
    ):
        np.testing.assert_allclose(cpp.step(*step), numpy.step(*step), atol=KV_TOLERANCES[kv_dtype])
