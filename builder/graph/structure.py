"""Saving a graph without its weights, for Netron and `aotllm inspect`."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir

from aotllm.builder.graph.weights import CheckpointStack, CheckpointTensor

WEIGHTS_LOCATION = "weights"
"""File that the saved graph says its weights are in. There is none: an engine holds them packed, under other names."""


def save_structure(model: ir.Model, path: Path | str) -> None:
    """Writes `model` as ONNX without its weights: their names, types and shapes stay, their data is marked external.

    Reads no weight. Initializers that are not the checkpoint's (rotary frequencies) are small and stay.
    """
    weights = {
        v: v.const_value
        for v in model.graph.initializers.values()
        if isinstance(v.const_value, (CheckpointTensor, CheckpointStack))
    }
    try:
        for value, tensor in weights.items():
            value.const_value = _absent(tensor)
        proto = ir.to_proto(model)
    finally:
        for value, tensor in weights.items():
            value.const_value = tensor
    Path(path).write_bytes(proto.SerializeToString())


def _absent(tensor: CheckpointTensor | CheckpointStack) -> ir.ExternalTensor:
    return ir.ExternalTensor(WEIGHTS_LOCATION, None, None, tensor.dtype, shape=tensor.shape, name=tensor.name or "")
