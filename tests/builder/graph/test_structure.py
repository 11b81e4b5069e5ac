"""A saved structure is small, reads no weight, and is a valid ONNX file with everything but the weights' data."""

from __future__ import annotations

from dataclasses import replace

import onnx
import onnx_ir as ir
import pytest

from aotllm.builder.graph import save_structure
from aotllm.builder.models import trace
from aotllm.builder.passes import run_passes
from tests.builder.fakes import CONFIGS, TINY, UnreadableCheckpoint, random_checkpoint, random_tokens, run_graph


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_structure_has_all_but_the_data(name, fused, tmp_path):
    config = CONFIGS[name]
    model = trace(UnreadableCheckpoint(config), 64)
    if fused:
        run_passes(model, config, max_num_tokens=32)
    path = tmp_path / "graph.onnx"
    save_structure(model, path)
    assert [file.name for file in tmp_path.iterdir()] == ["graph.onnx"]
    (tmp_path / "weights").touch()  # the checker wants the file that external data is in to exist
    onnx.checker.check_model(path, full_check=True)
    proto = onnx.load(path, load_external_data=False)
    assert [node.name for node in proto.graph.node] == [node.name for node in model.graph]
    assert {tensor.name: tuple(tensor.dims) for tensor in proto.graph.initializer} == {
        name: tuple(value.shape) for name, value in model.graph.initializers.items()
    }
    inline = {tensor.name for tensor in proto.graph.initializer if not tensor.external_data}
    assert inline == {name for name in model.graph.initializers if name.startswith("rope.")}
    assert not any(tensor.raw_data for tensor in proto.graph.initializer if tensor.external_data)


def test_structure_of_a_large_model_is_small(tmp_path):
    config = replace(TINY, vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_layers=32)
    model = trace(UnreadableCheckpoint(config), 64)
    run_passes(model, config, max_num_tokens=512)
    save_structure(model, tmp_path / "graph.onnx")
    assert (tmp_path / "graph.onnx").stat().st_size < 300_000


def test_saving_leaves_the_model_as_it_was(tmp_path):
    config = CONFIGS["gemma3"]
    model = trace(random_checkpoint(config), 64)
    tokens = random_tokens(config, 8)
    before = run_graph(model, tokens)
    save_structure(model, tmp_path / "graph.onnx")
    assert (run_graph(model, tokens) == before).all()


def test_structure_can_be_read_back(tmp_path):
    """As `inspect` does: ops, shapes and the passes' annotations are there."""
    config = CONFIGS["mistral"]
    model = trace(UnreadableCheckpoint(config), 64)
    run_passes(model, config, max_num_tokens=32)
    save_structure(model, tmp_path / "graph.onnx")
    loaded = ir.load(tmp_path / "graph.onnx")
    assert loaded.metadata_props == model.metadata_props
    assert [node.op_identifier() for node in loaded.graph] == [node.op_identifier() for node in model.graph]
    assert set(loaded.functions) == set(model.functions)
