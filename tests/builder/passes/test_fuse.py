"""Fusion changes the form of a model and nothing else; what it does not know, it names."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from aotllm.builder.config import RopeConfig
from aotllm.builder.graph import ops
from aotllm.builder.models import registry, trace
from aotllm.builder.models.decoder import embed, head, pre_norm_layers
from aotllm.builder.passes import operands
from aotllm.builder.passes.fuse import fuse
from aotllm.errors import Internal
from tests.builder.fakes import CONFIGS, TINY, UnreadableCheckpoint, random_checkpoint, random_tokens, run_graph

LAYER = ["norm_qkv_rope", "paged_attention", "linear_residual", "norm_swiglu", "linear_residual"]
SPARSE_LAYER = [*LAYER[:3], "norm_moe"]


def fused(config, checkpoint_type=UnreadableCheckpoint) -> ir.Model:
    model = trace(checkpoint_type(config), 64)
    fuse(model, config.num_layers)
    return model


@pytest.mark.parametrize("name", CONFIGS)
def test_fused_model_computes_the_same_bits(name):
    config = CONFIGS[name]
    model = trace(random_checkpoint(config), 64)
    tokens = random_tokens(config, 30)
    before = run_graph(model, tokens)
    fuse(model, config.num_layers)
    onnx.checker.check_model(ir.to_proto(model), full_check=True)
    np.testing.assert_array_equal(run_graph(model, tokens), before)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_layer_is_five_ops_or_four_with_experts(name):
    config = CONFIGS[name]
    model = fused(config)
    layers = [SPARSE_LAYER if config.has_experts(layer) else LAYER for layer in range(3)]
    assert [node.op_type for node in model.graph] == ["embedding", *itertools.chain(*layers), "lm_head"]
    assert {node.domain for node in model.graph} == {"aotllm"}


def test_ops_are_named_by_layer():
    names = [node.name for node in fused(TINY).graph]
    assert names[:6] == [
        "embedding",
        "layers.0.norm_qkv_rope",
        "layers.0.paged_attention",
        "layers.0.linear_residual",
        "layers.0.norm_swiglu",
        "layers.0.linear_residual_2",
    ]
    assert names[-2:] == ["layers.2.linear_residual_2", "lm_head"]


def test_ops_name_their_operands():
    model = fused(CONFIGS["qwen2"])
    node = next(node for node in model.graph if node.name == "layers.1.norm_qkv_rope")
    prefix = "model.layers.1.self_attn"
    assert {name: value.name for name, value in operands(model, node).items() if value.const_value is not None} == {
        "norm": "model.layers.1.input_layernorm.weight",
        **{f"{letter}_{kind}": f"{prefix}.{letter}_proj.{kind}" for letter in "qkv" for kind in ("weight", "bias")},
        "inv_freq": "rope.0.inv_freq",
    }
    assert {name: attribute.value for name, attribute in node.attributes.items()} == {
        "attention_factor": 1.0,
        "eps": 1e-5,
        "num_heads": 6,
        "num_kv_heads": 2,
        "rotary_dim": 16,
    }


@pytest.mark.parametrize(
    ("name", "variants"),
    [
        ("llama", {"": 6, "silu": 1}),
        ("llama-attention-biases", {"": 4, "silu": 1, "bias": 1, "q_bias_k_bias_v_bias": 1}),
        ("qwen3", {"": 4, "silu": 1, "q_norm_k_norm": 1}),
        ("gemma2", {"": 2, "scale": 1, "window": 1, "gelu_tanh": 1, "post_norm": 1, "softcap": 1}),
        ("mixtral", {"": 5, "normalized_silu": 1}),
        ("qwen3-moe", {"": 4, "q_norm_k_norm": 1, "silu": 2}),
    ],
)
def test_there_is_one_function_per_variant_whatever_the_number_of_layers(name, variants):
    expected = Counter(variants)
    if name == "llama":
        expected[""] = 5
    for num_layers in (3, 9):
        config = replace(CONFIGS[name], num_layers=num_layers, layer_windows=CONFIGS[name].layer_windows * 3)
        assert Counter(overload for _, _, overload in fused(config).functions) == expected


def test_bodies_that_differ_in_more_than_the_variant_get_functions_of_their_own():
    """Layers of different head sizes reshape differently."""
    model = trace(random_checkpoint(CONFIGS["qwen3"]), 64)
    tokens = random_tokens(TINY, 9)
    reshape = next(node for node in model.graph if node.name.startswith("layers.1") and node.op_type == "Reshape")
    split = ir.node("Constant", [], attributes={"value_ints": (0, -1, 8)})
    split.outputs[0].name = "split"
    model.graph.insert_before(reshape, split)
    reshape.replace_input_with(1, split.outputs[0])
    norm = model.graph.initializers["model.layers.1.self_attn.q_norm.weight"]
    norm.const_value, norm.shape = ir.Tensor(np.float32([2] * 8), name=norm.name), ir.Shape([8])
    expected = run_graph(model, tokens)
    fuse(model, 3)
    overloads = [overload for _, op, overload in model.functions if op == "norm_qkv_rope"]
    assert sorted(overloads) == ["q_norm_k_norm", "q_norm_k_norm_2"]
    np.testing.assert_array_equal(run_graph(model, tokens), expected)


def two_layers(name):
    """A traced model with one layer of each kind: enough for tests that break every node in turn."""
    config = replace(CONFIGS[name], num_layers=2, layer_windows=(5, 0))
    return trace(UnreadableCheckpoint(config), 64)


@pytest.mark.parametrize("name", ["llama-all-biases", "gemma2", "gemma3", "mixtral", "qwen3-moe"])
def test_whichever_node_is_unknown_the_pass_refuses(name):
    """Each node in turn becomes an op that no pattern has: nothing may be left over, or fused without it."""
    for i in range(len(two_layers(name).graph)):
        model = two_layers(name)
        model.graph[i].op_type = "Unknown"
        with pytest.raises(Internal, match="left .* over"):
            fuse(model, 2)


@pytest.mark.parametrize("name", ["llama-all-biases", "gemma2", "gemma3", "mixtral", "qwen3-moe"])
def test_an_attribute_that_no_pattern_knows_is_refused(name):
    for i in range(len(two_layers(name).graph)):
        model = two_layers(name)
        model.graph[i].attributes.add(ir.AttrInt64("unknown", 1))
        with pytest.raises(Internal, match="left .* over"):
            fuse(model, 2)


@pytest.mark.parametrize(
    ("op_type", "attribute", "other"),
    [
        ("Gemm", "transB", 0),
        ("RMSNormalization", "axis", 1),
        ("Gelu", "approximate", "none"),
        ("Cast", "to", 11),
        ("Softmax", "axis", 0),
        ("TopK", "axis", 0),
        ("TopK", "largest", 0),
        ("TopK", "sorted", 0),
        ("ReduceSum", "keepdims", 0),
        ("ScatterElements", "axis", 0),
        ("Einsum", "equation", "th,eih->tih"),
    ],
)
def test_attributes_that_the_fused_ops_imply_must_have_that_value(op_type, attribute, other):
    config = CONFIGS["gemma3" if op_type in ("Gemm", "RMSNormalization", "Gelu", "Cast") else "mixtral"]
    model = trace(UnreadableCheckpoint(config), 64)
    node = next(node for node in model.graph if node.op_type == op_type)
    (node.attributes[attribute],) = ir.convenience.convert_attributes({attribute: other})
    with pytest.raises(Internal, match="left .* over"):
        fuse(model, 3)


def test_leftovers_are_named(monkeypatch):
    def definition(d):
        x = pre_norm_layers(d, embed(d))
        with x.tracer.scope("extra"):
            return head(d, ops.softcap(x, 2.0))

    monkeypatch.setitem(registry._DEFINITIONS, "llama", definition)
    with pytest.raises(Internal, match=r"left Div 'extra.Div' over \(4 nodes in all\)"):
        fused(TINY)


def test_a_layer_too_few_is_refused():
    model = trace(UnreadableCheckpoint(TINY), 64)
    with pytest.raises(Internal, match="Op 16 of the fused graph is lm_head 'lm_head', expected norm_qkv_rope"):
        fuse(model, 4)


def test_layers_share_what_is_computed_once():
    """Masks and rotary tables are traced once per variant; no fused op depends on another for them."""
    config = replace(CONFIGS["gemma3"], rope_local=RopeConfig(theta=1e3))
    model = trace(UnreadableCheckpoint(config), 64)
    assert Counter(node.op_type for node in model.graph)["Cos"] == 2
    fuse(model, 3)
    for node in model.graph:
        sources = [value for value in node.inputs if value.producer() is None]
        others = [value.producer().op_type for value in node.inputs if value.producer() is not None]
        assert all(value.const_value is not None or value.is_graph_input() for value in sources)
        assert len(others) <= {"paged_attention": 3, "linear_residual": 2}.get(node.op_type, 1)


def test_the_two_outputs_of_top_k_are_not_taken_for_each_other():
    """Weights in the place of indices."""
    model = trace(UnreadableCheckpoint(CONFIGS["qwen3-moe"]), 64)
    top_k = next(node for node in model.graph if node.op_type == "TopK")
    scatter = next(node for node in model.graph if node.op_type == "ScatterElements")
    scatter.replace_input_with(1, top_k.outputs[0])
    with pytest.raises(Internal, match="left .* over"):
        fuse(model, 3)
