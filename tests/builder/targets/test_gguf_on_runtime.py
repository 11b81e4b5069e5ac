"""GGUF files with experts, from the file to logits: what the runner makes of blocks is what the weights stand for."""

from __future__ import annotations

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from aotllm.builder.checkpoints import open_checkpoint
from aotllm.builder.models import trace
from aotllm.builder.options import BuildOptions
from aotllm.builder.rank_writer import write_rank
from aotllm.builder.targets.cpu.target import compile_cpu
from tests.builder.checkpoints.tiny_models import make_model, write_gguf
from tests.builder.fakes import MemoryCheckpoint, random_tokens, run_graph

runtime = pytest.importorskip("aotllm._runtime", reason="the compiled runtime is not built")


@pytest.mark.parametrize(
    ("type_", "tolerance"), [(Type.F32, 1e-4), (Type.F16, 1e-4), (Type.Q8_0, 0.1), (Type.Q4_1, 0.1)]
)
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_logits_are_those_of_the_weights(name, type_, tolerance, tmp_path):
    """Activations of blocks have 8 bits, so that a token near the border of two experts may take another one there."""
    write_gguf(tmp_path / "model.gguf", make_model(name), matrix_type=type_)
    with open_checkpoint(tmp_path / "model.gguf") as checkpoint:
        options = BuildOptions(max_num_tokens=64, max_seq_len=64, kv_cache_dtype="f32")
        (program,) = compile_cpu(checkpoint, options).ranks
        write_rank(tmp_path / "rank0.engine", program, lambda: None)
        weights = MemoryCheckpoint(checkpoint.config, {t: checkpoint.read(t) for t in checkpoint.tensors()})
    formats = {s["format"] for linear in program.plan["linears"].values() for s in linear["segments"]}
    assert formats == {type_.name.lower()}
    tokens = random_tokens(weights.config, 40)
    expected = run_graph(trace(weights, 64), tokens)
    runner = runtime.CpuRunner(str(tmp_path / "rank0.engine"), num_blocks=4, num_threads=2)
    actual = runner.step([tokens], [0], [[2, 0, 3]], ["all"])
    errors = np.abs(actual - expected).max(axis=1) / expected.std()
    assert np.median(errors) < tolerance
    if tolerance < 0.01:
        assert errors.max() < tolerance
    assert (runner.step([tokens[:7]], [0], [[1]], ["all"]) == actual[:7]).all()
