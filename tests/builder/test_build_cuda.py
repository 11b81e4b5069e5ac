"""`aotllm build --target cuda` from folder to folder, on a machine without a GPU: what CI does."""

from __future__ import annotations

import numpy as np
import pytest

from aotllm.builder.build import build
from aotllm.builder.checkpoints import open_checkpoint
from aotllm.builder.models import trace
from aotllm.builder.options import BuildOptions
from aotllm.engines import open_engine
from aotllm.engines.rank_file import read_header
from aotllm.errors import EngineIncompatible
from tests.aotllm.cli.command_line import CommandLine
from tests.builder.cuda_plan_interpreter import PipelineInterpreter, ShardedInterpreter, open_ranks
from tests.builder.fakes import run_graph
from tests.integration.engines import save_tiny_model

LLAMA = {
    "vocab_size": 270,
    "hidden_size": 128,
    "intermediate_size": 8 * 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 128,
    "eos_token_id": 2,
}
PROMPT = [5, 269, 0, 40, 41, 42, 100, 3, 9]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    save_tiny_model(folder, "LlamaForCausalLM", LLAMA, "bf16")
    return folder


@pytest.fixture(scope="module")
def sharded(model, tmp_path_factory):
    """`--tp 8 --fp8`."""
    folder = tmp_path_factory.mktemp("engines") / "sharded"
    return build(model, folder, BuildOptions(target="cuda", tp=8, quantize="fp8"))


def test_engine_of_one_rank(model, tmp_path):
    report = build(model, tmp_path / "e", BuildOptions(target="cuda", kv_cache_dtype="fp8"))
    manifest = report.manifest
    assert (manifest.target.name, manifest.target.requires) == ("cuda", ("sm_90a",))
    assert (manifest.precision.kv_cache_dtype, set(manifest.precision.weight_formats)) == ("fp8", {"bf16"})
    limits = manifest.limits
    assert (limits.max_batch_size, limits.max_num_tokens, limits.tokens_per_block) == (256, 8192, 64)
    assert manifest.memory.kv_per_token == 2 * 2 * 2 * 64  # layers, K and V, heads, bytes of a head
    with open_checkpoint(model) as checkpoint:
        expected = run_graph(trace(checkpoint, 128), PROMPT)
    (rank,) = open_ranks(tmp_path / "e", 1, num_blocks=2)
    np.testing.assert_allclose(rank.step([PROMPT], [0], [[1]], ["all"]), expected, rtol=1e-3, atol=1e-3)


def test_engine_of_eight_ranks(model, sharded):
    engine = open_engine(sharded.path, to_run=False)
    manifest = engine.manifest
    assert manifest.parallel.tp == 8
    assert manifest.memory.kv_per_token == 2 * 2 * 64 * 2  # one head on each rank
    files = [engine.rank_file(rank).name for rank in range(8)]
    assert [name for name in manifest.files if name.endswith(".engine")] == files
    assert [engine.plan(rank)["tp"]["rank"] for rank in range(8)] == list(range(8))
    assert manifest.memory.weights == sum(manifest.precision.weight_formats.values()) // 8
    with open_checkpoint(model) as checkpoint:
        expected = run_graph(trace(checkpoint, 128), PROMPT)
    actual = ShardedInterpreter(open_ranks(sharded.path, 8, num_blocks=2)).step([PROMPT], [0], [[1]], ["all"])
    assert actual.shape == expected.shape
    assert np.linalg.norm(actual - expected) < 0.15 * np.linalg.norm(expected)


def test_engine_of_two_stages_of_two_ranks(model, tmp_path, monkeypatch, capsys):
    report = build(model, tmp_path / "e", BuildOptions(target="cuda", tp=2, pp=2))
    manifest = report.manifest
    assert (manifest.parallel.tp, manifest.parallel.pp) == (2, 2)
    assert [name for name in manifest.files if name.endswith(".engine")] == [f"rank{i}.engine" for i in range(4)]
    assert manifest.memory.kv_per_token == 2 * 64 * 2  # one layer and one head on each rank
    assert manifest.memory.weights < sum(manifest.precision.weight_formats.values()) // 2
    with open_checkpoint(model) as checkpoint:
        expected = run_graph(trace(checkpoint, 128), PROMPT)
    ranks = open_ranks(report.path, 4, num_blocks=2)
    actual = PipelineInterpreter(ranks, tp=2).step([PROMPT], [0], [[1]], ["all"])
    np.testing.assert_allclose(actual, expected, rtol=1e-3, atol=1e-3)
    ids = {read_header(report.path / f"rank{i}.engine")["__metadata__"]["build"] for i in range(4)}
    assert len(ids) == 1
    table = CommandLine(monkeypatch, capsys)("inspect", report.path, "--json").json["ops"]
    assert [op["op"] for op in table] == ["embedding", *[op["op"] for op in table[1:6]] * 2, "lm_head"]
    assert [op["layer"] for op in table if op["layer"] is not None] == [0, 0, 1, 1]


def test_the_same_build_makes_the_same_files(model, sharded, tmp_path):
    again = build(model, tmp_path / "e", BuildOptions(target="cuda", tp=8, quantize="fp8"))
    assert again.manifest.digest() == sharded.manifest.digest()


def test_an_engine_can_be_verified_and_inspected_where_it_cannot_run(sharded, monkeypatch, capsys):
    monkeypatch.setattr("aotllm.engines.bundle.RUNNABLE_TARGETS", ("cpu",))
    with pytest.raises(EngineIncompatible, match="for target 'cuda', this installation runs cpu"):
        open_engine(sharded.path)
    aotllm = CommandLine(monkeypatch, capsys)
    assert aotllm("verify", sharded.path).code == 0
    table = aotllm("inspect", sharded.path, "--json").json["ops"]
    gated = next(op for op in table if op["op"] == "norm_swiglu")
    assert (gated["matrices"], gated["formats"]) == ([[128, 128]], ["fp8"])
    assert gated["weight_bytes"] == 128 * 128 + 4 * 128 + 4 * 128  # codes, scales, norm
