"""What a rank holds of each weight of a sharded graph, by the op that reads it."""

from __future__ import annotations

from dataclasses import dataclass, field

import onnx_ir as ir

from aotllm.builder.passes import Partition, kv_layers, operands
from aotllm.builder.passes.fused_ops import EMBEDDING, LINEAR_RESIDUAL, LM_HEAD, NORM_QKV_ROPE, NORM_SWIGLU


@dataclass(frozen=True)
class WeightCuts:
    """Ranges of rows and columns; a weight that is not named is held whole."""

    rows: dict[ir.Value, range] = field(default_factory=dict)
    columns: dict[ir.Value, range] = field(default_factory=dict)
    gated: set[ir.Value] = field(default_factory=set)
    """Weights that read what `norm_swiglu` makes"""


def weight_cuts(model: ir.Model, part: Partition, vocabulary: range) -> WeightCuts:
    """The cuts for the rank of `part`.

    Args:
        model: fused, its layers numbered by `kv_layout`.
        part: which rank of how many.
        vocabulary: rows that the rank holds of embedding and head.
    """
    cuts, layers = WeightCuts(), kv_layers(model)

    def heads_of(node: ir.Node, heads: range) -> range:
        head_dim = layers[node.attributes["layer"].as_int()].head_dim
        return range(heads.start * head_dim, heads.stop * head_dim)

    for node in model.graph:
        inputs = operands(model, node)
        if node.op_type == NORM_QKV_ROPE:
            for letter, heads in (("q", part.heads), ("k", part.kv_heads), ("v", part.kv_heads)):
                cuts.rows[inputs[f"{letter}_weight"]] = heads_of(node, heads)
        elif node.op_type == NORM_SWIGLU:
            cuts.rows[inputs["gate_weight"]] = cuts.rows[inputs["up_weight"]] = part.neurons
        elif node.op_type == LINEAR_RESIDUAL:
            producer = inputs["x"].producer()
            assert producer is not None
            if producer.op_type == NORM_SWIGLU:
                cuts.columns[inputs["weight"]] = part.neurons
                cuts.gated.add(inputs["weight"])
            else:
                cuts.columns[inputs["weight"]] = heads_of(producer, part.heads)
        elif node.op_type in (EMBEDDING, LM_HEAD):
            cuts.rows[inputs["weight"]] = vocabulary
    return cuts
