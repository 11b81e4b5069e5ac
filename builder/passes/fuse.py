"""The fusion pass: groups of standard operators become the ops that targets implement.

Each fused op is a node of the domain `aotllm` and, per variant, a model-local function whose body is the group that it
replaced. The fused model is therefore an ordinary ONNX model that runs wherever the traced one does.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import onnx_ir as ir

from aotllm.builder.graph.tracer import DOMAIN, OPSET
from aotllm.builder.passes.fused_ops import (
    EMBEDDING,
    FUSED_OPS,
    LAYER_OPS,
    LM_HEAD,
    NORM_MOE,
    SPARSE_LAYER_OPS,
    FusedOp,
)
from aotllm.builder.passes.pattern import Match
from aotllm.errors import Internal

_Body = tuple[tuple[str, tuple[tuple[str, Any], ...]], ...]


def fuse(model: ir.Model, num_layers: int) -> None:
    """Fuses `model` in place: five ops per layer (four where it has experts) between `embedding` and `lm_head`.

    Raises:
        Internal: a node is left over, or the ops do not form `num_layers` layers.
    """
    fuser = _Fuser(model)
    for op in FUSED_OPS:
        fuser.apply(op)
        _remove_dead_nodes(model.graph)
    model.graph.sort()
    _name_nodes(model.graph)
    _check_fused(model.graph, num_layers)


def operands(model: ir.Model, node: ir.Node) -> dict[str, ir.Value]:
    """Inputs of a fused node by the names of its function's formal parameters."""
    function = model.functions[node.op_identifier()]
    pairs = zip(function.inputs, node.inputs, strict=True)
    return {str(formal.name): actual for formal, actual in pairs if actual is not None}


def _candidates(graph: ir.Graph, op: FusedOp) -> Iterator[Sequence[ir.Value]]:
    """Groups of values that may be `op`'s outputs."""
    for node in graph:
        if op.feeds is None:
            yield node.outputs[:1]
        elif node.op_type == op.feeds and node.domain == DOMAIN:
            yield [value for value in node.inputs[: len(op.outputs)] if value is not None]


def _match(op: FusedOp, values: Sequence[ir.Value]) -> Match | None:
    found: Match | None = Match()
    for value, (_, pattern) in zip(values, op.outputs, strict=True):
        if found is not None and (value.uses() or value.is_graph_output()):
            found = pattern.match(value, found)
        else:
            return None
    return found


class _Fuser:
    """Rewrites a model, one kind of fused op after the other."""

    def __init__(self, model: ir.Model) -> None:
        self._model = model
        self._bodies: dict[ir.OperatorIdentifier, _Body] = {}

    def apply(self, op: FusedOp) -> None:
        """Fuses every group that `op` stands for; larger ones first, which end further down the graph."""
        fused: set[ir.Node] = set()
        for values in reversed(list(_candidates(self._model.graph, op))):
            if values[0].producer() in fused:
                continue
            match = _match(op, values)
            if match is not None:
                self._replace(op, values, match)
                fused.update(match.nodes)

    def _replace(self, op: FusedOp, values: Sequence[ir.Value], match: Match) -> None:
        """Puts a fused node in the place of the group that computes `values`; the group dies when nobody needs it."""
        graph = self._model.graph
        last = values[-1].producer()
        assert last is not None
        outputs = [ir.Value(name=value.name, shape=value.shape, type=value.type) for value in values]
        node = ir.Node(
            DOMAIN,
            op.name,
            [match.values[name] for name in op.inputs if name in match.values],
            [ir.Attr(name, attribute.type, attribute.value) for name, attribute in sorted(match.attributes.items())],
            overload=self._overload(op, values, match),
            outputs=outputs,
            metadata_props=dict(last.metadata_props),
        )
        graph.insert_after(last, node)
        for old, new in zip(values, outputs, strict=True):
            old.name = None
            ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)

    def _overload(self, op: FusedOp, values: Sequence[ir.Value], match: Match) -> str:
        """The overload of `op` whose body is this group; made at the first need of it, named by the variant."""
        body = _body(match)
        variant = "_".join(match.variant)
        for i in itertools.count(1):
            overload = variant if i == 1 else f"{variant}_{i}".lstrip("_")
            identifier = (DOMAIN, op.name, overload)
            if self._bodies.setdefault(identifier, body) == body:
                break
        if identifier not in self._model.functions:
            self._model.functions[identifier] = _function(op, overload, match, values)
        return overload


def _body(match: Match) -> _Body:
    """What tells two groups of one variant apart: their ops, and the attributes that are not captured."""
    return tuple(
        (node.op_type, tuple((a.name, a.value) for a in node.attributes.values() if a.name not in captured))
        for node, captured in match.nodes.items()
    )


def _function(op: FusedOp, overload: str, match: Match, values: Sequence[ir.Value]) -> ir.Function:
    """The function whose body is a copy of the matched group; captured attributes become the function's."""
    copies: dict[ir.Value, ir.Value] = {
        match.values[name]: ir.Value(name=name) for name in op.inputs if name in match.values
    }
    inputs = list(copies.values())
    body = []
    for i, (node, captured) in enumerate(match.nodes.items()):
        attributes = [
            ir.RefAttr(name, captured[name], attribute.type) if name in captured else attribute
            for name, attribute in node.attributes.items()
        ]
        results = [ir.Value(name=f"{node.op_type.lower()}_{i}{'_' * j}") for j in range(len(node.outputs))]
        arguments = [None if value is None else copies[value] for value in node.inputs]
        body.append(ir.Node("", node.op_type, arguments, attributes, outputs=results, name=f"{node.op_type}_{i}"))
        copies.update(zip(node.outputs, results, strict=True))
    outputs = [copies[value] for value in values]
    for (name, _), output in zip(op.outputs, outputs, strict=True):
        output.name = f"{name}_out" if name in op.inputs else name
    return ir.Function(
        DOMAIN,
        op.name,
        overload,
        graph=ir.Graph(inputs, outputs, nodes=body, opset_imports={"": OPSET}),
        attributes=[ir.Attr(name, ir.AttributeType.UNDEFINED, None) for name in sorted(match.attributes)],
    )


def _name_nodes(graph: ir.Graph) -> None:
    """`layers.3.norm_swiglu`; layers have two `linear_residual`s, so the second one is numbered."""
    seen: collections.Counter[str] = collections.Counter()
    for node in graph:
        name = f"{node.metadata_props.get('namespace', '')}.{node.op_type}".lstrip(".")
        seen[name] += 1
        if node.domain == DOMAIN:
            node.name = name if seen[name] == 1 else f"{name}_{seen[name]}"


def _remove_dead_nodes(graph: ir.Graph) -> None:
    for node in reversed(graph):
        if not any(output.uses() or output.is_graph_output() for output in node.outputs):
            graph.remove(node, safe=True)


def _check_fused(graph: ir.Graph, num_layers: int) -> None:
    leftovers = [node for node in graph if node.domain != DOMAIN]
    if leftovers:
        node = min(leftovers, key=lambda node: node.op_type == "Constant")  # the first that says something
        raise Internal(
            f"The fusion pass left {node.op_type} {node.name!r} over ({len(leftovers)} nodes in all). Every node of a "
            f"model must belong to one of {', '.join(op.name for op in FUSED_OPS)}: the definition composes ops in a "
            "way that no pattern knows."
        )
    nodes = list(graph)
    expected = [EMBEDDING]
    for _ in range(num_layers):
        fork = len(expected) + SPARSE_LAYER_OPS.index(NORM_MOE)
        has_experts = fork < len(nodes) and nodes[fork].op_type == NORM_MOE
        expected += SPARSE_LAYER_OPS if has_experts else LAYER_OPS
    expected.append(LM_HEAD)
    for i, node in enumerate(nodes):
        if i >= len(expected) or node.op_type != expected[i]:
            wanted = expected[i] if i < len(expected) else "the end"
            raise Internal(f"Op {i} of the fused graph is {node.op_type} {node.name!r}, expected {wanted}.")
    if len(nodes) != len(expected):
        raise Internal(f"The fused graph has {len(nodes)} ops, expected {len(expected)} for {num_layers} layers.")
