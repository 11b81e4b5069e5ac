"""The oracle notices: whatever is wrong in a plan, or in the arena, shows in its logits."""

from __future__ import annotations

import copy

import numpy as np
import pytest

from aotllm.builder.models import trace
from aotllm.builder.passes import run_passes
from aotllm.builder.targets.cpu.lowering import lower
from tests.builder.fakes import CONFIGS, random_checkpoint, random_tokens
from tests.builder.plan_interpreter import PlanInterpreter

LIMITS = {"max_seq_len": 64, "max_num_tokens": 16, "max_batch_size": 2, "tokens_per_block": 16}


def plan_and_tensors(name):
    checkpoint = random_checkpoint(CONFIGS[name])
    model = trace(checkpoint, 64)
    run_passes(model, checkpoint.config, max_num_tokens=16)
    result = lower(model, checkpoint.config, segment_format=lambda name: "f32", kv_dtype="f32", **LIMITS)
    tensors = {job.tensor: checkpoint.read(job.source) for job in result.pack_jobs}
    return result.plan, tensors | {job.tensor: job.compute() for job in result.dense_jobs}


def logits(plan, tensors):
    tokens = random_tokens(CONFIGS["llama"], 12)
    return PlanInterpreter(plan, tensors, num_blocks=2).step([tokens], [0], [[1]], ["all"])


def without(field):
    return lambda record: record.pop(field)


def times(field, factor):
    return lambda record: record.update({field: record[field] * factor})


def put(field, value):
    return lambda record: record.update({field: value})


@pytest.mark.parametrize(
    ("name", "op", "change"),
    [
        ("gemma3", "embedding", times("scale", 1.01)),
        ("gemma3", "norm_qkv_rope", times("eps", 1000)),
        ("gemma3", "norm_qkv_rope", times("qk_norm_eps", 1000)),
        ("gemma3", "norm_qkv_rope", without("q_norm")),
        ("gemma3", "norm_qkv_rope", without("k_norm")),
        ("gemma3", "norm_qkv_rope", put("rope", 1)),
        ("gemma3", "norm_qkv_rope", put("layer", 1)),
        ("qwen2", "norm_qkv_rope", without("bias")),
        ("gemma2", "paged_attention", times("scale", 1.1)),
        ("gemma2", "paged_attention", put("softcap", 0.0)),
        ("gemma2", "paged_attention", put("window", 0)),
        ("gemma2", "paged_attention", put("window", 6)),
        ("gemma2", "linear_residual", without("post_norm")),
        ("gemma2", "linear_residual", times("eps", 1000)),
        ("gemma2", "linear_residual", put("residual", 2)),
        ("llama-all-biases", "linear_residual", without("bias")),
        ("llama-all-biases", "norm_swiglu", without("gate_bias")),
        ("llama-all-biases", "norm_swiglu", without("up_bias")),
        ("llama-all-biases", "norm_swiglu", put("up", "layers.0.gate")),
        ("llama-all-biases", "norm_swiglu", put("activation", "gelu_tanh")),
        ("llama-all-biases", "norm_swiglu", put("norm", "layers.1.post_attention_layernorm")),
        ("gemma2", "lm_head", put("softcap", 0.0)),
        ("gemma2", "lm_head", times("eps", 1000)),
    ],
)
def test_a_wrong_field_shows(name, op, change):
    plan, tensors = plan_and_tensors(name)
    wrong = copy.deepcopy(plan)
    change(next(record for record in wrong["ops"] if record["op"] == op))
    with np.errstate(invalid="ignore"):
        try:
            difference = np.abs(logits(wrong, tensors) - logits(plan, tensors)).max()
        except ValueError:  # shapes that do not fit
            return
    assert not difference < 2e-4  # NaN shows, too


@pytest.mark.parametrize(
    ("moved", "onto"),
    [
        ("hidden", "query"),
        ("hidden", "attention"),
        ("query", "attention"),
        ("hidden", "gated"),
    ],
)
def test_buffers_that_overlap_show(moved, onto):
    plan, tensors = plan_and_tensors("llama")
    wrong = copy.deepcopy(plan)
    buffers = {buffer["name"]: buffer for buffer in wrong["buffers"]}
    buffers[moved]["offset"] = buffers[onto]["offset"]
    with np.errstate(all="ignore"):
        assert not np.abs(logits(wrong, tensors) - logits(plan, tensors)).max() < 1e-3


def test_what_nobody_wrote_is_not_a_number():
    plan, tensors = plan_and_tensors("llama")
    wrong = copy.deepcopy(plan)
    del wrong["ops"][0]
    with np.errstate(invalid="ignore"):
        assert np.isnan(logits(wrong, tensors)).all()


def test_keys_that_nobody_cached_are_not_numbers():
    plan, tensors = plan_and_tensors("llama")
    with np.errstate(invalid="ignore"):
        assert np.isnan(PlanInterpreter(plan, tensors, 2).step([[5]], [1], [[0]], ["last"])).all()
