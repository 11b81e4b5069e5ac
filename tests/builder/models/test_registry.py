"""From a checkpoint to a graph: which architectures, what is read, what is refused."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace

import onnx
import onnx_ir as ir
import pytest

from aotllm.builder.models import known_architectures, model_definition, trace
from aotllm.errors import CheckpointError, UnsupportedModel
from tests.builder.fakes import CONFIGS, TINY, UnreadableCheckpoint, random_checkpoint

KNOWN = ["gemma2", "gemma3", "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe"]


def test_known_architectures_are_sorted_and_have_definitions():
    assert known_architectures() == KNOWN
    assert all(callable(model_definition(architecture)) for architecture in KNOWN)
    assert {config.architecture for config in CONFIGS.values()} == set(KNOWN)  # the other tests cover them all


@pytest.mark.parametrize("architecture", ["mamba", "Llama", ""])
def test_an_unknown_architecture_is_refused_with_the_known_ones(architecture):
    with pytest.raises(UnsupportedModel, match=f"{architecture!r} .*{', '.join(KNOWN)}"):
        trace(UnreadableCheckpoint(replace(TINY, architecture=architecture)), 64)


def test_an_unknown_activation_is_refused_with_the_known_ones():
    with pytest.raises(UnsupportedModel, match="'relu2' is not implemented; known ones: silu, gelu_tanh"):
        trace(UnreadableCheckpoint(replace(TINY, hidden_act="relu2")), 64)


@pytest.mark.parametrize("name", CONFIGS)
def test_traced_graph_is_valid_standard_onnx(name):
    model = trace(random_checkpoint(CONFIGS[name]), 64)
    onnx.checker.check_model(ir.to_proto(model), full_check=True)
    assert {node.domain for node in model.graph} == {""}
    assert [(value.name, str(value.dtype), str(value.shape)) for value in model.graph.inputs] == [
        ("input_ids", "INT64", "[tokens]"),
        ("positions", "INT64", "[tokens]"),
    ]
    (logits,) = model.graph.outputs
    assert (logits.name, str(logits.dtype), str(logits.shape)) == ("logits", "FLOAT", "[tokens,97]")
    names = [node.name for node in model.graph]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("name", CONFIGS)
def test_traced_shapes_are_those_that_onnx_infers(name):
    model = trace(random_checkpoint(CONFIGS[name]), 64)
    traced = {value.name: value for node in model.graph for value in node.outputs}
    bare = ir.to_proto(model)
    del bare.graph.value_info[:]
    inferred = onnx.shape_inference.infer_shapes(bare, strict_mode=True, data_prop=True)
    assert len(inferred.graph.value_info) == len(traced) - 1  # all but the graph's output
    for info in inferred.graph.value_info:
        dims = [d.dim_value if d.HasField("dim_value") else None for d in info.type.tensor_type.shape.dim]
        value = traced[info.name]
        assert info.type.tensor_type.elem_type == value.dtype
        assert len(dims) == len(value.shape)
        for inferred_dim, traced_dim in zip(dims, value.shape, strict=True):
            assert inferred_dim is None or inferred_dim == traced_dim, info.name


def test_tracing_reads_no_weight_and_takes_little_memory():
    """The sizes of an 8B model: 32 GB as float32."""
    config = replace(
        TINY,
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        max_position_embeddings=131072,
    )
    checkpoint = UnreadableCheckpoint(config)
    tracemalloc.start()
    try:
        model = trace(checkpoint, 8192)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert sum(value.const_value.nbytes for value in model.graph.initializers.values()) > 30e9
    assert peak < 20e6


@pytest.mark.parametrize("name", ["llama-all-biases", "qwen2", "gemma3"])
def test_every_tensor_is_needed(name):
    """Whichever tensor is missing, the error names it; none is silently done without."""
    complete = random_checkpoint(CONFIGS[name])
    for tensor in complete.arrays:
        checkpoint = random_checkpoint(CONFIGS[name])
        del checkpoint.arrays[tensor]
        with pytest.raises(CheckpointError, match=f"no tensor '{tensor}'"):
            trace(checkpoint, 64)


@pytest.mark.parametrize("name", ["llama-all-biases", "gemma3"])
def test_every_shape_is_checked(name):
    complete = random_checkpoint(CONFIGS[name])
    for tensor, array in complete.arrays.items():
        checkpoint = random_checkpoint(CONFIGS[name])
        checkpoint.arrays[tensor] = array[:-1]
        with pytest.raises(CheckpointError, match=rf"'{tensor}' has shape \[{len(array) - 1}.*asks for \[{len(array)}"):
            trace(checkpoint, 64)
