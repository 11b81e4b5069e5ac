"""The KV layout pass: which layer of the cache each attention reads and writes."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

import onnx_ir as ir

from aotllm.builder.graph.tracer import DOMAIN
from aotllm.builder.passes.fused_ops import NORM_QKV_ROPE, PAGED_ATTENTION
from aotllm.errors import Internal

LAYER = "layer"
"""Attribute that the pass adds to both ops of a layer"""
CACHED = "kv_cache"
"""Value of the metadata `storage` of K and V: they live in the cache, not in the arena"""
_LAYERS = "kv_layers"


@dataclass(frozen=True)
class KvLayer:
    """What the cache holds for one layer."""

    num_kv_heads: int
    head_dim: int
    window: int
    """Tokens that a query sees, itself included; 0 = all"""


def kv_layout(model: ir.Model) -> None:
    """Numbers the attentions of a fused `model` in place and records a `KvLayer` for each (`kv_layers` reads them).

    K and V stay edges of the graph, so that it still runs, but are marked as stored in the cache.

    Raises:
        Internal: an attention's Q, K and V are not exactly what one `norm_qkv_rope` makes, or others use K and V.
    """
    layers: list[KvLayer] = []
    for attention in model.graph:
        if attention.op_type != PAGED_ATTENTION:
            continue
        projection = _projection(attention)
        k, v = projection.outputs[1:]
        for node in (projection, attention):
            node.attributes.add(ir.AttrInt64(LAYER, len(layers)))
            _declare(model.functions[node.op_identifier()], LAYER)
        for value in (k, v):
            value.metadata_props["storage"] = CACHED
        num_kv_heads = attention.attributes["num_kv_heads"].as_int()
        window = attention.attributes["window"].as_int() if "window" in attention.attributes else 0
        layers.append(KvLayer(num_kv_heads, _width(k) // num_kv_heads, window))
    model.metadata_props[_LAYERS] = json.dumps([asdict(layer) for layer in layers])


def kv_layers(model: ir.Model) -> list[KvLayer]:
    """The records that `kv_layout` made, by layer."""
    return [KvLayer(**record) for record in json.loads(model.metadata_props[_LAYERS])]


def _projection(attention: ir.Node) -> ir.Node:
    """The node that makes Q, K and V for `attention`."""
    query = attention.inputs[0]
    projection = query.producer() if query is not None else None
    if projection is None or (projection.domain, projection.op_type) != (DOMAIN, NORM_QKV_ROPE):
        raise Internal(f"Q of {attention.name!r} does not come from a {NORM_QKV_ROPE}; run the fusion pass first.")
    if tuple(attention.inputs[:3]) != tuple(projection.outputs):
        raise Internal(f"Q, K and V of {attention.name!r} are not the outputs of {projection.name!r} in order.")
    for value in projection.outputs:
        if len(value.uses()) != 1:
            raise Internal(f"{value.name!r} has {len(value.uses())} users; only {attention.name!r} may read it.")
    return projection


def _declare(function: ir.Function, attribute: str) -> None:
    """Lets callers of `function` carry `attribute`, which its body does not use."""
    if attribute not in function.attributes:
        function.attributes.add(ir.Attr(attribute, ir.AttributeType.UNDEFINED, None))


def _width(value: ir.Value) -> int:
    assert value.shape is not None
    width = value.shape[-1]
    assert isinstance(width, int), f"{value.name} has no static width"
    return width
