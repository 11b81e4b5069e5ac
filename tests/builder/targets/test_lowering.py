"""The plan means what the graph means: it is executed over one arena and compared with onnxruntime."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aotllm.builder.config import RopeConfig
from aotllm.builder.models import trace
from aotllm.builder.passes import arena_plan, run_passes
from aotllm.builder.targets.cpu.lowering import Lowered, lower
from aotllm.builder.targets.lowering import engine_name
from aotllm.builder.targets.plan import kv_bytes_per_token
from aotllm.errors import Internal, UnsupportedModel
from tests.builder.fakes import (
    CONFIGS,
    TINY,
    UnreadableCheckpoint,
    random_checkpoint,
    random_tokens,
    run_graph,
)
from tests.builder.plan_interpreter import PlanInterpreter

LIMITS = {"max_seq_len": 64, "max_num_tokens": 32, "max_batch_size": 4, "tokens_per_block": 16}


def lower_with_limits(model, config, kv_dtype="f32", segment_format=lambda name: "f32"):
    return lower(model, config, segment_format=segment_format, kv_dtype=kv_dtype, **LIMITS)


def lowered(checkpoint, **options):
    model = trace(checkpoint, LIMITS["max_seq_len"])
    run_passes(model, checkpoint.config, max_num_tokens=LIMITS["max_num_tokens"])
    return lower_with_limits(model, checkpoint.config, **options)


def interpreter_of(result, checkpoint):
    tensors = {job.tensor: checkpoint.read(job.source) for job in result.pack_jobs}
    tensors |= {job.tensor: job.compute() for job in result.dense_jobs}
    plan = json.loads(json.dumps(result.plan))  # as an engine carries it
    return PlanInterpreter(plan, tensors, num_blocks=16)


def interpreter(checkpoint, kv_dtype="f32"):
    return interpreter_of(lowered(checkpoint, kv_dtype=kv_dtype), checkpoint)


@pytest.mark.parametrize("name", CONFIGS)
def test_plan_computes_what_the_graph_computes(name):
    config = CONFIGS[name]
    checkpoint = random_checkpoint(config)
    tokens = random_tokens(config, 30)
    expected = run_graph(trace(checkpoint, LIMITS["max_seq_len"]), tokens)
    actual = interpreter(checkpoint).step([tokens], [0], [[7, 3]], ["all"])
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=2e-5)


@st.composite
def configs(draw):
    """Models of any architecture whose sizes have nothing in common."""
    base = draw(st.sampled_from(sorted(CONFIGS.values(), key=lambda config: config.architecture)))
    num_kv_heads, head_dim = draw(st.integers(1, 3)), 8 * draw(st.integers(1, 4))
    num_layers = draw(st.integers(1, 3))
    return replace(
        base,
        vocab_size=draw(st.integers(3, 70)),
        hidden_size=draw(st.integers(6, 50)),
        intermediate_size=draw(st.integers(6, 90)),
        num_layers=num_layers,
        num_heads=num_kv_heads * draw(st.integers(1, 3)),
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rope=RopeConfig(rotary_dim=draw(st.sampled_from([None, 8, head_dim]))),
        layer_windows=tuple(draw(st.lists(st.integers(0, 12), min_size=num_layers, max_size=num_layers))),
        qkv_bias=draw(st.booleans()) or base.architecture == "qwen2",
        attention_out_bias=draw(st.booleans()),
        mlp_bias=draw(st.booleans()),
        tie_word_embeddings=draw(st.booleans()),
        hidden_act=draw(st.sampled_from(["silu", "gelu_tanh"])),
        embedding_scale=draw(st.sampled_from([1.0, 3.0])),
        attn_logit_softcap=draw(st.sampled_from([0.0, 2.0])),
        final_logit_softcap=draw(st.sampled_from([0.0, 2.0])),
        dense_layers=tuple(draw(st.sets(st.integers(0, 3)))),
        num_experts_per_tok=draw(st.integers(1, 5)),
        moe_intermediate_size=draw(st.integers(3, 50)),
        rms_norm_weight_offset=draw(st.sampled_from([0.0, 1.0])),
    )


@settings(max_examples=25, deadline=None)
@given(configs(), st.integers(1, 30), st.integers(0, 2**32 - 1))
def test_plan_of_any_model_computes_what_its_graph_computes(config, num_tokens, seed):
    checkpoint, tokens = random_checkpoint(config, seed), random_tokens(config, num_tokens, seed)
    expected = run_graph(trace(checkpoint, LIMITS["max_seq_len"]), tokens)
    actual = interpreter(checkpoint).step([tokens], [0], [[7, 3]], ["all"])
    # Norms of a few values magnify rounding where these are all small; faults of structure are as large as the logits.
    np.testing.assert_allclose(actual, expected, rtol=0, atol=5e-3)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3"])
def test_chunks_and_batches_do_not_change_what_is_computed(name):
    """Sequences that share steps, arrive in chunks and have their blocks anywhere."""
    config = CONFIGS[name]
    checkpoint = random_checkpoint(config)
    first, second = random_tokens(config, 34, seed=2), random_tokens(config, 9, seed=3)
    graph = trace(checkpoint, LIMITS["max_seq_len"])
    engine = interpreter(checkpoint)
    tables = [[5, 1, 9], [0]]
    assert engine.step([first[:20]], [0], tables[:1], ["none"]).shape == (0, config.vocab_size)
    mixed = engine.step([first[20:33], second[:8]], [20, 0], tables, ["last", "all"])
    last = engine.step([first[33:], second[8:]], [33, 8], tables, ["last", "last"])
    actual = np.concatenate([mixed[:1], last[:1], mixed[1:], last[1:]])
    expected = np.concatenate([run_graph(graph, first)[32:], run_graph(graph, second)])
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize(("kv_dtype", "most"), [("bf16", 5e-2), ("int16", 2e-2)])
def test_a_cache_rounds_keys_and_values_only(kv_dtype, most):
    config = CONFIGS["qwen3"]
    checkpoint = random_checkpoint(config)
    tokens = random_tokens(config, 20)
    expected = run_graph(trace(checkpoint, LIMITS["max_seq_len"]), tokens)
    error = np.abs(interpreter(checkpoint, kv_dtype).step([tokens], [0], [[0, 1]], ["all"]) - expected).max()
    assert 1e-5 < error < most


@pytest.mark.parametrize("name", CONFIGS)
def test_jobs_cover_every_tensor_of_plan_and_checkpoint_once(name):
    checkpoint = random_checkpoint(CONFIGS[name])
    result = lowered(checkpoint)
    jobs = [job.tensor for job in (*result.pack_jobs, *result.dense_jobs)]
    assert len(jobs) == len(set(jobs))
    assert set(jobs) == named_tensors(result)
    routers = {name for name in checkpoint.tensors() if name.endswith(".mlp.gate.weight")}
    matrices = {n for n, info in checkpoint.tensors().items() if len(info.shape) == 2} - routers
    assert {job.source for job in result.pack_jobs} == matrices
    assert all(checkpoint.read(job.source).shape == (job.n, job.k) for job in result.pack_jobs)
    assert all(job.compute().dtype == np.float32 for job in result.dense_jobs)


def named_tensors(result: Lowered) -> set[str]:
    """Every tensor that a plan names, by the format's field names."""
    names = {segment["tensor"] for linear in result.plan["linears"].values() for segment in linear["segments"]}
    names |= {record["inv_freq"] for record in result.plan["rope"]}
    fields = ("norm", "bias", "q_norm", "k_norm", "post_norm", "gate_bias", "up_bias", "router")
    return names | {op[field] for op in result.plan["ops"] for field in fields if field in op}


@pytest.mark.parametrize("name", CONFIGS)
def test_lowering_reads_no_weight(name):
    lowered(UnreadableCheckpoint(CONFIGS[name]))


@pytest.mark.parametrize("name", ["llama-yarn", "gemma2", "gemma3"])
def test_every_number_in_the_graph_reaches_the_plan(name):
    """Each float in turn is changed: the plan follows the graph, or a pass refuses (an eps that ops share)."""
    config = CONFIGS[name]
    checkpoint, tokens = random_checkpoint(config), random_tokens(config, 9)
    original = run_graph(trace(checkpoint, 64), tokens)
    followed = Counter()
    for i, node in enumerate(trace(checkpoint, 64).graph):
        for attribute in [a for a in node.attributes.values() if a.type == ir.AttributeType.FLOAT and a.value]:
            model = trace(checkpoint, 64)
            model.graph[i].attributes.add(ir.AttrFloat32(attribute.name, attribute.value * 1.5 + 0.1))
            expected = run_graph(model, tokens)
            try:
                run_passes(model, config, max_num_tokens=LIMITS["max_num_tokens"])
            except Internal:
                assert node.op_type == "RMSNormalization"
                continue
            actual = interpreter_of(lower_with_limits(model, config), checkpoint).step([tokens], [0], [[0]], ["all"])
            np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=2e-5, err_msg=f"{node.name} {attribute.name}")
            assert np.abs(expected - original).max() > 4e-4  # the change shows
            followed[attribute.name] += 1
    assert {"epsilon", "scale"} <= followed.keys()


def test_plan_states_the_limits_and_five_ops_per_layer():
    plan = lowered(UnreadableCheckpoint(CONFIGS["gemma3"]), kv_dtype="int16").plan
    layer = ["norm_qkv_rope", "paged_attention", "linear_residual", "norm_swiglu", "linear_residual"]
    assert [op["op"] for op in plan["ops"]] == ["embedding", *layer * 3, "lm_head"]
    assert {key: plan[key] for key in ("max_seq_len", "max_num_tokens", "max_batch_size")} == {
        "max_seq_len": 64,
        "max_num_tokens": 32,
        "max_batch_size": 4,
    }
    assert plan["kv"] == {
        "dtype": "int16",
        "tokens_per_block": 16,
        "layers": [{"num_kv_heads": 2, "head_dim": 16, "window": window} for window in (5, 5, 0)],
    }
    assert [op["rope"] for op in plan["ops"] if op["op"] == "norm_qkv_rope"] == [0, 0, 1]


@pytest.mark.parametrize(("kv_dtype", "head_bytes"), [("f32", 64), ("bf16", 32), ("int16", 32 + 4), ("int8", 16 + 4)])
def test_bytes_of_the_cache_follow_its_type(kv_dtype, head_bytes):
    kv = lowered(UnreadableCheckpoint(CONFIGS["gemma3"]), kv_dtype=kv_dtype).plan["kv"]
    assert kv_bytes_per_token(kv) == 3 * 2 * 2 * head_bytes  # layers, K and V, heads of 16


def test_ops_have_exactly_the_fields_that_they_use():
    plan = lowered(UnreadableCheckpoint(CONFIGS["gemma2"])).plan
    assert plan["ops"][0] == {"op": "embedding", "out": 0, "linear": "embedding", "scale": 48**0.5}
    assert plan["ops"][1] == {
        "op": "norm_qkv_rope",
        "layer": 0,
        "in": 0,
        "out": 1,
        "eps": 1e-5,
        "norm": "layers.0.input_layernorm",
        "linear": "layers.0.qkv",
        "num_heads": 6,
        "num_kv_heads": 2,
        "head_dim": 16,
        "rope": 0,
    }
    assert plan["ops"][2] == {
        "op": "paged_attention",
        "layer": 0,
        "in": 1,
        "out": 2,
        "num_heads": 6,
        "num_kv_heads": 2,
        "head_dim": 16,
        "scale": 24**-0.5,
        "softcap": 5.0,
        "window": 5,
    }
    assert plan["ops"][3] == {
        "op": "linear_residual",
        "in": 2,
        "residual": 0,
        "out": 0,
        "linear": "layers.0.o",
        "post_norm": "layers.0.post_attention_layernorm",
        "eps": 1e-5,
    }
    assert plan["ops"][4] == {
        "op": "norm_swiglu",
        "in": 0,
        "out": 3,
        "eps": 1e-5,
        "norm": "layers.0.pre_feedforward_layernorm",
        "gate": "layers.0.gate",
        "up": "layers.0.up",
        "activation": "gelu_tanh",
    }
    assert plan["ops"][-1] == {
        "op": "lm_head",
        "in": 0,
        "eps": 1e-5,
        "norm": "final_norm",
        "linear": "embedding",
        "softcap": 3.0,
        "vocab_size": 97,
    }


def test_segments_keep_the_format_of_their_own_matrix():
    """Q4_K_M files store V in another type than Q and K."""
    checkpoint = UnreadableCheckpoint(CONFIGS["qwen3"])
    plan = lowered(checkpoint, segment_format=lambda name: "q6_k" if ".v_proj." in name else "q4_k").plan
    assert plan["linears"]["layers.1.qkv"] == {
        "n": 160,
        "k": 48,
        "segments": [
            {"n": 96, "format": "q4_k", "tensor": "layers.1.q"},
            {"n": 32, "format": "q4_k", "tensor": "layers.1.k"},
            {"n": 32, "format": "q6_k", "tensor": "layers.1.v"},
        ],
    }


@pytest.mark.parametrize(("name", "linears"), [("qwen2", {"embedding"}), ("qwen3", {"embedding", "lm_head"})])
def test_tied_embeddings_are_packed_once(name, linears):
    result = lowered(UnreadableCheckpoint(CONFIGS[name]))
    ends = {op["linear"] for op in result.plan["ops"] if op["op"] in ("embedding", "lm_head")}
    assert ends == linears
    assert {job.tensor for job in result.pack_jobs if not job.tensor.startswith("layers.")} == linears


def test_norm_weights_carry_their_offset():
    checkpoint = random_checkpoint(CONFIGS["gemma3"])
    jobs = {job.tensor: job for job in lowered(checkpoint).dense_jobs}
    for tensor, source in {
        "layers.2.input_layernorm": "model.layers.2.input_layernorm.weight",
        "layers.0.post_feedforward_layernorm": "model.layers.0.post_feedforward_layernorm.weight",
        "layers.1.k_norm": "model.layers.1.self_attn.k_norm.weight",
        "final_norm": "model.norm.weight",
    }.items():
        np.testing.assert_array_equal(jobs[tensor].compute(), checkpoint.read(source) + np.float32(1))


def test_qkv_biases_follow_the_segments():
    checkpoint = random_checkpoint(CONFIGS["qwen2"])
    jobs = {job.tensor: job for job in lowered(checkpoint).dense_jobs}
    parts = [checkpoint.read(f"model.layers.1.self_attn.{letter}_proj.bias") for letter in "qkv"]
    np.testing.assert_array_equal(jobs["layers.1.qkv.bias"].compute(), np.concatenate(parts))


@pytest.mark.parametrize("head_dim", [12, 520])
def test_head_sizes_that_the_kernels_lack_are_refused(head_dim):
    config = replace(TINY, head_dim=head_dim, num_layers=1)
    with pytest.raises(UnsupportedModel, match=f"Head size {head_dim} .*multiples of 8 up to 512"):
        lowered(UnreadableCheckpoint(config))


def test_an_arena_of_another_size_is_refused():
    checkpoint = UnreadableCheckpoint(TINY)
    model = trace(checkpoint, 64)
    run_passes(model, TINY, max_num_tokens=8)
    assert arena_plan(model).max_num_tokens == 8
    with pytest.raises(Internal, match="planned for 8 tokens a step, not for 32"):
        lower_with_limits(model, TINY)


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("model.embed_tokens.weight", "embedding"),
        ("lm_head.weight", "lm_head"),
        ("model.norm.weight", "final_norm"),
        ("model.layers.11.self_attn.q_proj.weight", "layers.11.q"),
        ("model.layers.11.self_attn.q_norm.weight", "layers.11.q_norm"),
        ("model.layers.0.mlp.down_proj.bias", "layers.0.down.bias"),
        ("model.layers.0.input_layernorm.weight", "layers.0.input_layernorm"),
        ("rope.1.inv_freq", "rope.1.inv_freq"),
    ],
)
def test_engine_names(source, name):
    assert engine_name(source) == name
