"""CUDA engines of tiny models: the files that a build writes mean what the graph means, on one rank and on several."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from aotllm.builder.config import ModelConfig
from aotllm.builder.models import trace
from aotllm.builder.options import BuildOptions
from aotllm.builder.rank_writer import write_rank
from aotllm.builder.targets.cuda.target import compile_cuda
from aotllm.errors import InvalidRequest, UnsupportedModel
from tests.builder.cuda_plan_interpreter import PipelineInterpreter, ShardedInterpreter, open_ranks
from tests.builder.fakes import (
    CONFIGS,
    MemoryCheckpoint,
    UnreadableCheckpoint,
    random_checkpoint,
    random_tokens,
    run_graph,
)

LIMITS = {"max_seq_len": 64, "max_num_tokens": 40, "max_batch_size": 4, "tokens_per_block": 16}


def cuda_config(name: str, **sizes: int) -> ModelConfig:
    """The tiny model with sizes that the kernels take; neurons and (but for capped logits) vocabulary stay ragged."""
    fitting = {"hidden_size": 64, "head_dim": 64, "num_heads": 4, "num_kv_heads": 2}
    if CONFIGS[name].final_logit_softcap:
        fitting["vocab_size"] = 128
    return replace(CONFIGS[name], **{**fitting, **sizes})


def in_bf16(checkpoint: MemoryCheckpoint) -> MemoryCheckpoint:
    """The checkpoint with matrices that bf16 holds exactly."""
    arrays = {
        name: (a.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32) if a.ndim == 2 else a
        for name, a in checkpoint.arrays.items()
    }
    return MemoryCheckpoint(checkpoint.config, arrays)


def engine(checkpoint, folder, tp=1, pp=1, **options):
    compiled = compile_cuda(checkpoint, BuildOptions(target="cuda", tp=tp, pp=pp, **LIMITS, **options))
    for rank, program in enumerate(compiled.ranks):
        write_rank(folder / f"rank{rank}.engine", program, lambda: None)
    ranks = open_ranks(folder, tp * pp, num_blocks=16)
    if pp > 1:
        return PipelineInterpreter(ranks, tp)
    return ShardedInterpreter(ranks) if tp > 1 else ranks[0]


@pytest.mark.parametrize("name", CONFIGS)
def test_engine_computes_what_the_graph_computes(name, tmp_path):
    config = cuda_config(name)
    checkpoint = in_bf16(random_checkpoint(config))
    tokens = random_tokens(config, 30)
    expected = run_graph(trace(checkpoint, LIMITS["max_seq_len"]), tokens)
    actual = engine(checkpoint, tmp_path).step([tokens], [0], [[7, 3]], ["all"])
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=5e-5)


@pytest.mark.parametrize("quantize", [None, "fp8"])
@pytest.mark.parametrize("tp", [2, 4, 8])
@pytest.mark.parametrize("name", ["llama-all-biases", "qwen2", "qwen3", "gemma2", "gemma3", "mixtral", "qwen3-moe"])
def test_ranks_together_compute_what_one_computes(name, tp, quantize, tmp_path):
    """Also where there are fewer KV heads than ranks, and shares of neurons and tokens that have to be padded."""
    config = cuda_config(name, num_heads=8, intermediate_size=8 * 37, moe_intermediate_size=8 * 21)
    checkpoint, tokens = random_checkpoint(config), random_tokens(config, 20)
    (tmp_path / "one").mkdir()
    one = engine(checkpoint, tmp_path / "one", quantize=quantize)
    many = engine(checkpoint, tmp_path, tp, quantize=quantize)
    for step in (([tokens[:13]], [0], [[2, 5]], ["all"]), ([tokens[13:]], [13], [[2, 5]], ["last"])):
        np.testing.assert_allclose(many.step(*step), one.step(*step), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("pp", "tp"), [(2, 1), (3, 1), (2, 2)])
@pytest.mark.parametrize("name", ["llama-all-biases", "qwen2", "gemma2", "gemma3"])
def test_stages_compute_what_the_graph_computes(name, pp, tp, tmp_path):
    """The residual stream goes from each stage to the next; tied weights are on the first and the last."""
    config = cuda_config(name)
    checkpoint, tokens = in_bf16(random_checkpoint(config)), random_tokens(config, 30)
    expected = run_graph(trace(checkpoint, LIMITS["max_seq_len"]), tokens)
    stages = engine(checkpoint, tmp_path, tp, pp)
    first = stages.step([tokens[:17]], [0], [[7, 3]], ["all"])
    rest = stages.step([tokens[17:]], [17], [[7, 3]], ["all"])
    np.testing.assert_allclose(np.concatenate([first, rest]), expected, rtol=1e-4, atol=5e-5)
    held = [set(rank.plan["linears"]) for stage in stages.stages for rank in stage.ranks[:1]]
    assert "embedding" in held[0]
    assert not held[1] & held[0] - {"embedding"}
    assert ("lm_head" in held[-1]) is not config.tie_word_embeddings


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3-moe"])
def test_fp8_engine_is_close_to_the_graph(name, tmp_path):
    config = cuda_config(name)
    checkpoint, tokens = random_checkpoint(config), random_tokens(config, 20)
    expected = run_graph(trace(checkpoint, LIMITS["max_seq_len"]), tokens)
    actual = engine(checkpoint, tmp_path, quantize="fp8").step([tokens], [0], [[0, 1]], ["all"])
    error = np.linalg.norm(actual - expected) / np.linalg.norm(expected)
    assert 1e-3 < error < 0.2


def formats(name: str, **options):
    config = cuda_config(name)
    compiled = compile_cuda(UnreadableMatrices(config), BuildOptions(target="cuda", **LIMITS, **options))
    return {name: record["format"] for name, record in compiled.ranks[0].plan["linears"].items()}


class UnreadableMatrices(UnreadableCheckpoint):
    """Norms, biases and routers can be read, matrices of linears cannot."""

    def read(self, name):
        assert len(self.tensors()[name].shape) == 1 or name.endswith(".mlp.gate.weight"), f"{name} was read"
        return np.zeros(self.tensors()[name].shape, np.float32)


@pytest.mark.parametrize(
    ("name", "options", "bf16"),
    [
        ("llama", {}, {"embedding", "lm_head", "rest"}),
        ("llama", {"quantize": "fp8"}, {"embedding", "lm_head"}),
        ("llama", {"quantize": "fp8", "quantize_lm_head": True}, {"embedding"}),
        ("gemma3", {"quantize": "fp8", "quantize_lm_head": True}, {"embedding"}),
    ],
)
def test_what_fp8_applies_to(name, options, bf16):
    for linear, fmt in formats(name, **options).items():
        kind = linear if linear in ("embedding", "lm_head") else "rest"
        assert fmt == ("bf16" if kind in bf16 else "fp8"), linear


@pytest.mark.parametrize(
    ("excluded", "is_bf16"),
    [
        ("0", lambda layer, matrix: layer == 0),
        ("down", lambda layer, matrix: matrix == "down"),
        ("-1,o", lambda layer, matrix: layer == 2 or matrix == "o"),
        ("gate_up,qkv", lambda layer, matrix: matrix in ("gate_up", "qkv")),
    ],
)
def test_what_fp8_leaves_out(excluded, is_bf16):
    for name, fmt in formats("llama", quantize="fp8", quantize_exclude=excluded).items():
        parts = name.split(".")
        assert fmt == ("bf16" if len(parts) == 1 or is_bf16(int(parts[1]), parts[2]) else "fp8"), name


def test_experts_that_are_excluded():
    found = formats("mixtral", quantize="fp8", quantize_exclude="0")
    assert [found[f"layers.{layer}.experts.down"] for layer in (0, 1)] == ["bf16", "fp8"]
    with pytest.raises(UnsupportedModel, match=r"layers.0.experts.\* are in several formats"):
        formats("mixtral", quantize="fp8", quantize_exclude="down")


def test_nothing_is_left_to_quantize():
    with pytest.raises(InvalidRequest, match="none is left .* would be bf16: .*--quantize-exclude"):
        formats("llama", quantize="fp8", quantize_exclude="0,1,2")


def test_compiling_reads_no_matrix_and_plans_are_json():
    compiled = compile_cuda(UnreadableMatrices(cuda_config("gemma3")), BuildOptions(target="cuda", **LIMITS))
    plan = json.loads(json.dumps(compiled.ranks[0].plan))
    assert plan["target"] == "cuda"
    assert plan["sm"] == 90
    assert plan["tp"] == {"size": 1, "rank": 0}
    assert compiled.requires == ("sm_90a",)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_plan_names_every_tensor_of_its_file_once(name):
    compiled = compile_cuda(
        UnreadableMatrices(cuda_config(name)), BuildOptions(target="cuda", quantize="fp8", **LIMITS)
    )
    (program,) = compiled.ranks
    plan = program.plan
    named = {record[field] for record in plan["linears"].values() for field in ("tensor", "scales") if field in record}
    named |= {record["inv_freq"] for record in plan["rope"]}
    fields = ("norm", "bias", "q_norm", "k_norm", "post_norm", "gate_up_bias", "router")
    named |= {op[field] for op in plan["ops"] for field in fields if field in op}
    tensors = [job.tensor for job in program.tensors]
    assert len(tensors) == len(set(tensors))
    assert set(tensors) == named


@pytest.mark.parametrize(
    ("name", "vocab_size", "tp", "quantize", "padded"),
    [
        ("llama", 96, 1, None, 96),
        ("llama", 97, 1, None, 112),
        ("llama", 96, 2, None, 96),
        ("llama", 98, 2, None, 128),
        ("llama", 80, 1, "fp8", 96),
        ("gemma3", 97, 1, None, 112),
        ("gemma3", 96, 2, "fp8", 96),
    ],
)
def test_vocabularies_are_padded_as_little_as_can_be(name, vocab_size, tp, quantize, padded):
    options = BuildOptions(target="cuda", tp=tp, quantize=quantize, quantize_lm_head=quantize is not None, **LIMITS)
    config = cuda_config(name, vocab_size=vocab_size, intermediate_size=96)
    for rank, program in enumerate(compile_cuda(UnreadableMatrices(config), options).ranks):
        plan, head = program.plan, program.plan["ops"][-1]
        assert plan["vocab_size"] == head["vocab_size"] == padded
        assert {plan["linears"][op["linear"]]["n"] for op in (plan["ops"][0], head)} == {padded // tp}
        assert ("bias" in head) == (padded > vocab_size)
        if padded > vocab_size:
            (bias,) = (job.parts[0]() for job in program.tensors if job.tensor == head["bias"])
            tokens = np.arange(rank * padded // tp, (rank + 1) * padded // tp)
            np.testing.assert_array_equal(bias, np.where(tokens < vocab_size, 0, -np.inf))


def test_buffers_are_aligned_and_have_whole_tiles_of_rows():
    compiled = compile_cuda(UnreadableMatrices(cuda_config("llama")), BuildOptions(target="cuda", **LIMITS))
    plan = compiled.ranks[0].plan
    assert {buffer["name"]: buffer["width"] for buffer in plan["buffers"]} == {
        "hidden": 64,
        "query": 256,
        "attention": 256,
        "gated": 96,  # 80 neurons
    }
    for buffer in plan["buffers"]:
        assert buffer["offset"] % 256 == 0
        assert buffer["offset"] + 128 * buffer["width"] * 2 <= plan["arena_bytes"]


@pytest.mark.parametrize(
    ("sizes", "options", "message"),
    [
        ({"head_dim": 80}, {}, "Head size 80 .*64, 96, 128, 256; target cpu"),
        ({"hidden_size": 72}, {}, r"embedding is \[112, 72\].*columns in multiples of 16 in bf16. Target cpu takes it"),
        ({"hidden_size": 80}, {"quantize": "fp8"}, "multiples of 32 in fp8. Leave --fp8 out"),
        ({"hidden_size": 72}, {"tp": 2}, "multiples of 16 in bf16. Use fewer ranks"),
        ({}, {"tp": 3}, "tp=3: 4 query heads cannot be dealt out evenly; .*--tp 2"),
        ({"num_heads": 8, "intermediate_size": 84}, {"tp": 8}, "84 neurons .*--tp 4"),
        ({"num_heads": 12, "num_kv_heads": 6, "intermediate_size": 96}, {"tp": 4}, "6 KV heads .*--tp 3"),
    ],
)
def test_sizes_that_the_target_cannot_take_are_refused(sizes, options, message):
    checkpoint = UnreadableMatrices(cuda_config("llama", **sizes))
    with pytest.raises(UnsupportedModel, match=message):
        compile_cuda(checkpoint, BuildOptions(target="cuda", **LIMITS, **options))


def test_capped_logits_cannot_be_padded():
    checkpoint = UnreadableMatrices(cuda_config("gemma2", vocab_size=97))
    with pytest.raises(UnsupportedModel, match="97 tokens would be padded to 112 with --tp 1;.*capped. .*target cpu"):
        compile_cuda(checkpoint, BuildOptions(target="cuda", **LIMITS))


class BlockExperts(UnreadableMatrices):
    """Experts are FP8 with a scale per block."""

    def tensors(self):
        infos = super().tensors()
        return {k: replace(info, storage="fp8_block") if ".experts." in k else info for k, info in infos.items()}


def test_experts_in_blocks_become_bf16():
    """The kernels that gather rows have no scales per block."""
    sizes = {"hidden_size": 128, "moe_intermediate_size": 128}
    compiled = compile_cuda(BlockExperts(cuda_config("qwen3-moe", **sizes)), BuildOptions(target="cuda", **LIMITS))
    linears = compiled.ranks[0].plan["linears"]
    assert {linears[f"layers.0.experts.{part}"]["format"] for part in ("gate_up", "down")} == {"bf16"}


def test_experts_need_sm_90():
    with pytest.raises(UnsupportedModel, match="need SM 90 on target cuda, the engine is for SM 80"):
        compile_cuda(UnreadableMatrices(cuda_config("mixtral")), BuildOptions(target="cuda", sm=80, **LIMITS))


def test_experts_have_no_tactics():
    """Their kernels are chosen by how many rows an expert has."""
    checkpoint = UnreadableMatrices(cuda_config("qwen3-moe"))
    plan = compile_cuda(checkpoint, BuildOptions(target="cuda", **LIMITS)).ranks[0].plan
    assert set(plan["linears"]) - set(plan["tactics"]) == {
        "embedding",
        *(f"layers.{layer}.experts.{part}" for layer in (0, 2) for part in ("gate_up", "down")),
    }


@pytest.mark.parametrize(
    ("sizes", "tp", "message"),
    [
        ({"num_experts": 513}, 1, "up to 512 experts in a layer, the model has 513"),
        ({"num_experts": 20, "num_experts_per_tok": 17}, 1, "up to 16 experts for a token, the model wants 17"),
        ({"moe_intermediate_size": 21}, 2, "21 neurons of an expert cannot be dealt out evenly"),
    ],
)
def test_mixtures_that_the_target_cannot_take_are_refused(sizes, tp, message):
    checkpoint = UnreadableMatrices(cuda_config("mixtral", **sizes))
    with pytest.raises(UnsupportedModel, match=message):
        compile_cuda(checkpoint, BuildOptions(target="cuda", tp=tp, **LIMITS))
