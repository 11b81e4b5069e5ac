"""Patterns over graphs: what a group of nodes that becomes one fused op looks like.

A pattern is matched backwards from the value that the group computes. It names what it finds: values at the group's
border (`Bind`) become the fused op's inputs, attributes (`Op.capture`) its attributes, and the alternatives taken
(`Maybe`, `OneOf`) its variant. Tracing emits each op in one form, so operand order is significant.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import onnx_ir as ir


@dataclass(frozen=True)
class Match:
    """What has been found so far. Patterns return extended copies, so that a failed alternative leaves no trace."""

    values: Mapping[str, ir.Value] = field(default_factory=dict)
    """Border values by name"""
    attributes: Mapping[str, ir.Attr] = field(default_factory=dict)
    """Captured attributes by their name on the fused op"""
    nodes: Mapping[ir.Node, Mapping[str, str]] = field(default_factory=dict)
    """Nodes of the group, inputs before users → captured attributes: name on the node → name on the fused op"""
    variant: tuple[str, ...] = ()
    """Names of the optional parts that are there and of the alternatives taken, in order of the pattern"""


class Pattern(Protocol):
    """Anything that matches a value (None: an absent optional input)."""

    def match(self, value: ir.Value | None, found: Match) -> Match | None:
        """`found` extended by what `value` brings, or None where it does not fit."""
        ...


@dataclass(frozen=True)
class Bind:
    """Any value; the same name must meet the same value wherever it stands in the pattern."""

    name: str
    weight: bool = False
    """Whether the value must be an initializer"""

    def match(self, value: ir.Value | None, found: Match) -> Match | None:
        """See `Pattern`."""
        if value is None or (self.weight and value.const_value is None):
            return None
        known = found.values.get(self.name)
        if known is None:
            return replace(found, values={**found.values, self.name: value})
        return found if known is value else None


@dataclass(frozen=True, init=False)
class Op:
    """A node of the standard domain, its inputs by pattern.

    Inputs and attributes that the pattern does not mention must be absent: they would change what the node means.
    """

    op_type: str
    inputs: tuple[Pattern, ...]
    where: Mapping[str, Any]
    """Attributes that must have these values, or pass these predicates"""
    capture: Mapping[str, str]
    """Attributes that must be there and vary: name on the node → name on the fused op"""
    output: int
    """Which output of the node the value is"""
    outputs: int
    """How many outputs the node has"""

    def __init__(
        self,
        op_type: str,
        *inputs: Pattern,
        where: Mapping[str, Any] | None = None,
        capture: Mapping[str, str] | None = None,
        output: int = 0,
        outputs: int = 1,
    ) -> None:
        object.__setattr__(self, "op_type", op_type)
        object.__setattr__(self, "inputs", inputs)
        object.__setattr__(self, "where", where or {})
        object.__setattr__(self, "capture", capture or {})
        object.__setattr__(self, "output", output)
        object.__setattr__(self, "outputs", outputs)

    def match(self, value: ir.Value | None, found: Match) -> Match | None:
        """See `Pattern`."""
        node = value.producer() if value is not None else None
        if node is None or node.op_type != self.op_type or node.domain or len(node.outputs) != self.outputs:
            return None
        if value is not node.outputs[self.output]:
            return None
        captured = self._match_attributes(node, found)
        if captured is None or any(node.inputs[len(self.inputs) :]):
            return None
        result: Match | None = replace(found, attributes=captured)
        for i, pattern in enumerate(self.inputs):
            assert result is not None
            result = pattern.match(node.inputs[i] if i < len(node.inputs) else None, result)
            if result is None:
                return None
        assert result is not None
        return replace(result, nodes={**result.nodes, node: self.capture})

    def _match_attributes(self, node: ir.Node, found: Match) -> Mapping[str, ir.Attr] | None:
        """The attributes captured so far and this node's, or None where one differs from what it must be."""
        if node.attributes.keys() != self.where.keys() | self.capture.keys():
            return None
        for name, expected in self.where.items():
            actual = node.attributes[name].value
            if not (expected(actual) if callable(expected) else actual == expected):
                return None
        attributes = dict(found.attributes)
        for name, fused_name in self.capture.items():
            attribute = node.attributes[name]
            known = attributes.setdefault(fused_name, attribute)
            if known.value != attribute.value:
                return None
        return attributes


@dataclass(frozen=True)
class Maybe:
    """An optional input; where it is there, the variant says so."""

    variant: str
    pattern: Pattern

    def match(self, value: ir.Value | None, found: Match) -> Match | None:
        """See `Pattern`."""
        if value is None:
            return found
        result = self.pattern.match(value, found)
        return None if result is None else replace(result, variant=(*result.variant, self.variant))


@dataclass(frozen=True, init=False)
class OneOf:
    """The first alternative that fits; the variant says which (an empty name says nothing)."""

    alternatives: tuple[tuple[str, Pattern], ...]

    def __init__(self, *alternatives: tuple[str, Pattern]) -> None:
        object.__setattr__(self, "alternatives", alternatives)

    def match(self, value: ir.Value | None, found: Match) -> Match | None:
        """See `Pattern`."""
        for variant, pattern in self.alternatives:
            result = pattern.match(value, found)
            if result is not None:
                return replace(result, variant=(*result.variant, variant)) if variant else result
        return None
