"""Saving a graph without its weights, for Netron and `aotllm inspect`."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir

WEIGHTS_LOCATION = "weights"
"""File that the saved graph says its weights are in. There is none: an engine holds them packed, under other names."""


def save_structure(model: ir.Model, path: Path | str) -> None:
    """Writes `model` as ONNX with every initializer left out: name, type and shape stay, data is marked external.

    Reads no weight. The file can be opened and checked, but not run.
    """
    initializers = model.graph.initializers.values()
    tensors = [value.const_value for value in initializers]
    try:
        for value, tensor in zip(initializers, tensors, strict=True):
            if tensor is not None:
                value.const_value = _absent(tensor)
        proto = ir.to_proto(model)
    finally:
        for value, tensor in zip(initializers, tensors, strict=True):
            value.const_value = tensor
    Path(path).write_bytes(proto.SerializeToString())


def _absent(tensor: ir.TensorProtocol) -> ir.ExternalTensor:
    return ir.ExternalTensor(
        WEIGHTS_LOCATION, None, None, tensor.dtype, shape=ir.Shape(tensor.shape.numpy()), name=tensor.name or ""
    )
