"""Layers of the cache, numbered in the order of the model."""

from __future__ import annotations

import pytest

from aotllm.builder.models import trace
from aotllm.builder.passes import KvLayer, kv_layers
from aotllm.builder.passes.fuse import fuse
from aotllm.builder.passes.kv_layout import kv_layout
from aotllm.errors import Internal
from tests.builder.fakes import CONFIGS, UnreadableCheckpoint


def fused(name):
    model = trace(UnreadableCheckpoint(CONFIGS[name]), 64)
    fuse(model, 3)
    return model


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("llama", [KvLayer(2, 16, 0)] * 3),
        ("llama-yarn", [KvLayer(6, 16, 0)] * 3),
        ("mistral", [KvLayer(2, 16, 5)] * 3),
        ("gemma2", [KvLayer(2, 16, 5), KvLayer(2, 16, 0), KvLayer(2, 16, 5)]),
        ("gemma3", [KvLayer(2, 16, 5), KvLayer(2, 16, 5), KvLayer(2, 16, 0)]),
    ],
)
def test_layers_record_what_the_cache_holds(name, layers):
    model = fused(name)
    kv_layout(model)
    assert kv_layers(model) == layers


def test_both_ops_of_a_layer_carry_its_number():
    model = fused("gemma3")
    kv_layout(model)
    numbered = [(node.op_type, node.attributes["layer"].value) for node in model.graph if "layer" in node.attributes]
    assert numbered == [(op, layer) for layer in range(3) for op in ("norm_qkv_rope", "paged_attention")]


def test_keys_and_values_are_marked_as_cached_and_nothing_else_is():
    model = fused("llama")
    kv_layout(model)
    for node in model.graph:
        storage = [value.metadata_props.get("storage") for value in node.outputs]
        assert storage == ([None, "kv_cache", "kv_cache"] if node.op_type == "norm_qkv_rope" else [None])


def test_keys_and_values_swapped_are_refused():
    model = fused("llama")
    attention = next(node for node in model.graph if node.op_type == "paged_attention")
    _, k, v = attention.inputs[:3]
    attention.replace_input_with(1, v)
    attention.replace_input_with(2, k)
    with pytest.raises(Internal, match=r"'layers.0.paged_attention' are not the outputs of 'layers.0.norm_qkv_rope'"):
        kv_layout(model)


def test_a_second_reader_of_the_keys_is_refused():
    """It would read an arena buffer that does not exist."""
    model = fused("llama")
    first, second = [node for node in model.graph if node.op_type == "paged_attention"][:2]
    second.replace_input_with(1, first.inputs[1])
    with pytest.raises(Internal, match="has 2 users"):
        kv_layout(model)


def test_an_unfused_model_has_no_layers():
    model = trace(UnreadableCheckpoint(CONFIGS["llama"]), 64)
    kv_layout(model)
    assert kv_layers(model) == []
