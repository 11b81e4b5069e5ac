"""Pipeline parallelism: which layers of a fused graph each stage runs.

Stages run one after the other; between two of them goes the residual stream, `[tokens, hidden_size]`. The first has the
embedding, the last the final norm and the head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from aotllm.builder.passes.fuse import operands
from aotllm.builder.passes.fused_ops import EMBEDDING, NORM_QKV_ROPE
from aotllm.errors import Internal, UnsupportedModel


@dataclass(frozen=True)
class Stage:
    """A run of ops of the graph: stage `index` of `size`."""

    index: int
    size: int
    nodes: tuple[ir.Node, ...]
    layers: range
    entering: ir.Value | None
    """The residual stream as the stage before leaves it; None for the first stage"""
    leaving: ir.Value | None
    """What goes on to the next stage; None for the last one"""


def cut_stages(model: ir.Model, size: int, weight_bytes: Callable[[ir.Value], int]) -> list[Stage]:
    """Cuts a fused `model` into `size` stages of nearly equal cost, which is the weights that a step reads.

    All layers count with their matrices, the head counts for the last stage; rows of the embedding are only looked up.

    Args:
        model: as `run_passes` left it; it is not changed.
        size: stages.
        weight_bytes: bytes that a matrix takes in the engine.

    Raises:
        UnsupportedModel: there are fewer layers than stages.
        Internal: more than the residual stream goes from one layer to the next.
    """
    nodes = list(model.graph)
    firsts = [i for i, node in enumerate(nodes) if node.op_type == NORM_QKV_ROPE]
    if size > len(firsts):
        raise UnsupportedModel(
            f"pp={size}: the model has {len(firsts)} layers and each stage needs one; use --pp {len(firsts)} at most"
        )
    bounds = [0, *_bounds(model, nodes, firsts, size, weight_bytes), len(firsts)]
    streams = [None, *(_stream(nodes, firsts[layer]) for layer in bounds[1:-1]), None]
    places = [0, *(firsts[layer] for layer in bounds[1:-1]), len(nodes)]
    return [
        Stage(
            index=i,
            size=size,
            nodes=tuple(nodes[places[i] : places[i + 1]]),
            layers=range(bounds[i], bounds[i + 1]),
            entering=streams[i],
            leaving=streams[i + 1],
        )
        for i in range(size)
    ]


def _bounds(
    model: ir.Model, nodes: list[ir.Node], firsts: list[int], size: int, weight_bytes: Callable[[ir.Value], int]
) -> tuple[int, ...]:
    """The first layers of all stages but the first."""
    if size == 1:
        return ()
    ends = [*firsts[1:], len(nodes)]
    costs = [_cost(model, nodes[begin:end], weight_bytes) for begin, end in zip(firsts, ends, strict=True)]
    return _even_cuts(costs, size)


def _cost(model: ir.Model, nodes: Sequence[ir.Node], weight_bytes: Callable[[ir.Value], int]) -> int:
    matrices = {
        value
        for node in nodes
        if node.op_type != EMBEDDING
        for value in operands(model, node).values()
        if value.const_value is not None and value.shape is not None and len(value.shape) > 1
    }
    return sum(weight_bytes(value) for value in matrices)


def _even_cuts(costs: Sequence[int], size: int) -> tuple[int, ...]:
    """Where to cut `costs` into `size` runs, none empty, such that the sum of the squares of their sums is least."""
    sums = [0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    # For the first 0, 1, … costs: their unevenness in `runs` runs, and the cuts.
    best: list[tuple[int, tuple[int, ...]]] = [(total**2, ()) for total in sums]
    for runs in range(2, size + 1):
        longer: list[tuple[int, tuple[int, ...]]] = [(0, ())] * runs  # too few costs for so many runs
        for end in range(runs, len(sums)):
            choices = ((best[cut][0] + (sums[end] - sums[cut]) ** 2, cut) for cut in range(runs - 1, end))
            unevenness, cut = min(choices)
            longer.append((unevenness, (*best[cut][1], cut)))
        best = longer
    return best[len(costs)][1]


def _stream(nodes: Sequence[ir.Node], place: int) -> ir.Value:
    """The one value that nodes from `place` on read and earlier ones make."""
    made = {value for node in nodes[:place] for value in node.outputs}
    read = {value: None for node in nodes[place:] for value in node.inputs if value is not None and value in made}
    if len(read) != 1:
        names = ", ".join(repr(value.name) for value in read) or "nothing"
        raise Internal(
            f"Between layers goes the residual stream and no other value, but before op {place} it is {names}."
        )
    return next(iter(read))
