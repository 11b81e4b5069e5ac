"""Names, constants and initializers of the tracer."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from aotllm.builder.graph import Tracer, ops
from aotllm.builder.graph.tracer import TOKENS


def input_of(tracer: Tracer):
    return tracer.input("x", (TOKENS, 4), ir.DataType.FLOAT)


def test_nodes_are_named_after_weight_or_op_in_their_scope():
    tracer = Tracer("test")
    x = input_of(tracer)
    weight = tracer.initializer(ir.Tensor(np.eye(4, dtype=np.float32), name="model.layers.0.up_proj.weight"))
    with tracer.scope("layers"), tracer.scope("0"):
        y = ops.add(x, x)
        z = ops.add(ops.linear(y, weight), y)
    ops.add(z, z)
    model = tracer.finish({"y": z}, {})
    names = {node.name: node.metadata_props.get("namespace") for node in model.graph}
    assert names == {
        "layers.0.Add": "layers.0",
        "model.layers.0.up_proj": "layers.0",
        "layers.0.Add_2": "layers.0",
        "Add": None,
    }


def test_constants_and_initializers_are_shared():
    tracer = Tracer("test")
    tensor = ir.Tensor(np.zeros(3, np.float32), name="w")
    assert tracer.initializer(tensor).value is tracer.initializer(tensor).value
    assert tracer.constant(2).value is tracer.constant(2).value
    assert tracer.constant((0, 2)).value is tracer.constant([0, 2]).value
    assert tracer.constant(2.0).value is not tracer.constant(2).value
    assert [str(tracer.constant(c).value.dtype) for c in (2, 2.0, (2,))] == ["INT64", "FLOAT", "INT64"]


def test_shapes_name_the_dynamic_axis():
    tensor = input_of(Tracer("test"))
    assert tensor.shape == (TOKENS, 4)
    assert tensor.width == 4
