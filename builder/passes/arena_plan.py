"""The arena pass: every intermediate of a step gets its place before the engine ever runs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import onnx_ir as ir

from aotllm.builder.passes.arena import ALIGNMENT, Lifetime, place, round_up
from aotllm.builder.passes.fuse import operands
from aotllm.builder.passes.fused_ops import (
    EMBEDDING,
    LINEAR_RESIDUAL,
    LM_HEAD,
    NORM_MOE,
    NORM_QKV_ROPE,
    NORM_SWIGLU,
    PAGED_ATTENTION,
)
from aotllm.builder.passes.kv_layout import CACHED
from aotllm.errors import Internal

BUFFER = "buffer"
"""Metadata of a value: index of its buffer"""
_ARENA = "arena"
_ROLES = {
    EMBEDDING: "hidden",
    NORM_QKV_ROPE: "query",
    PAGED_ATTENTION: "attention",
    LINEAR_RESIDUAL: "hidden",
    NORM_SWIGLU: "gated",
    NORM_MOE: "hidden",
}


@dataclass(frozen=True)
class ArenaLayout:
    """What a target's kernels want of buffers."""

    element_bytes: int = 4
    alignment: int = ALIGNMENT
    """Bytes; of each buffer's offset"""
    row_multiple: int = 1
    """A buffer has `max_num_tokens` rows rounded up to this: kernels may write whole tiles of rows"""
    gated_multiple: int = 1
    """What `norm_swiglu` makes is padded to a width of a multiple of this"""


@dataclass(frozen=True)
class Buffer:
    """`[rows, width]` at `offset` bytes; `ArenaLayout` says how many rows, and of what."""

    name: str
    width: int
    offset: int


@dataclass(frozen=True)
class ArenaPlan:
    """All buffers of a step and the bytes that they share."""

    bytes: int
    max_num_tokens: int
    buffers: tuple[Buffer, ...]


def plan_arena(model: ir.Model, max_num_tokens: int, layout: ArenaLayout | None = None) -> None:
    """Assigns the values of a fused `model` to buffers, in place; `arena_plan` and `buffer_index` read the result.

    A value lives from the op that makes it to the last one that reads it. `linear_residual` writes over its residual
    where nobody reads that one later. K and V (marked by `kv_layout`) and the logits have no buffer. Scratch memory
    inside an op is the runner's own. `norm_moe` has a buffer of its own for its output: its input is its residual.

    Args:
        model: fused, its K and V marked.
        max_num_tokens: tokens of a step, at most.
        layout: what the target wants of buffers; default: float32, rows as they are.

    Raises:
        Internal: a value that needs a buffer has no static width.
    """
    layout = layout or ArenaLayout()
    column_bytes = round_up(max_num_tokens, layout.row_multiple) * layout.element_bytes
    nodes = list(model.graph)
    steps = {node: step for step, node in enumerate(nodes)}
    owners = _owners(model, nodes, steps)
    lives: dict[ir.Value, tuple[int, int]] = {}
    for value, owner in owners.items():
        first, last = _life(value, steps)
        known_first, known_last = lives.get(owner, (first, last))
        lives[owner] = (min(first, known_first), max(last, known_last))
    widths = {owner: _buffer_width(owner, layout) for owner in lives}
    lifetimes = {owner: Lifetime(column_bytes * widths[owner], *life) for owner, life in lives.items()}
    placement = place(list(lifetimes.values()), layout.alignment)
    buffers: dict[Buffer, int] = {}
    places: dict[ir.Value, int] = {}
    for owner, offset in zip(lifetimes, placement.offsets, strict=True):
        producer = owner.producer()
        assert producer is not None
        buffer = Buffer(_ROLES[producer.op_type], widths[owner], offset)
        places[owner] = buffers.setdefault(buffer, len(buffers))
    for value, owner in owners.items():
        value.metadata_props[BUFFER] = str(places[owner])
    plan = ArenaPlan(placement.size, max_num_tokens, tuple(buffers))
    model.metadata_props[_ARENA] = json.dumps(asdict(plan))


def arena_plan(model: ir.Model) -> ArenaPlan:
    """What `plan_arena` decided."""
    record = json.loads(model.metadata_props[_ARENA])
    return ArenaPlan(record["bytes"], record["max_num_tokens"], tuple(Buffer(**b) for b in record["buffers"]))


def buffer_index(value: ir.Value) -> int:
    """Index of `value`'s buffer in the plan's list."""
    return int(value.metadata_props[BUFFER])


def _owners(model: ir.Model, nodes: list[ir.Node], steps: Mapping[ir.Node, int]) -> dict[ir.Value, ir.Value]:
    """Each value of the arena → the value whose buffer it uses: itself, or the one that it overwrites."""
    owners: dict[ir.Value, ir.Value] = {}
    for node in nodes:
        if node.op_type == LM_HEAD:
            continue
        for value in node.outputs:
            if value.metadata_props.get("storage") == CACHED:
                continue
            owners[value] = value
            if node.op_type == LINEAR_RESIDUAL:
                residual = operands(model, node)["residual"]
                overwritable = residual in owners and _life(residual, steps)[1] == steps[node]
                if overwritable and list(node.inputs).count(residual) == 1:
                    owners[value] = owners[residual]
    return owners


def _life(value: ir.Value, steps: Mapping[ir.Node, int]) -> tuple[int, int]:
    """First and last step at which `value` is needed."""
    producer = value.producer()
    assert producer is not None
    return steps[producer], max((steps[node] for node in value.consumers()), default=steps[producer])


def _buffer_width(value: ir.Value, layout: ArenaLayout) -> int:
    producer = value.producer()
    gated = producer is not None and producer.op_type == NORM_SWIGLU
    return round_up(_width(value), layout.gated_multiple if gated else 1)


def _width(value: ir.Value) -> int:
    width = value.shape[-1] if value.shape is not None else None
    if not isinstance(width, int):
        raise Internal(f"Value {value.name!r} of shape {value.shape} has no static width, so it cannot be planned.")
    return width
