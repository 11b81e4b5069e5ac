"""What patterns match, and what they say about it."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from aotllm.builder.passes.pattern import Bind, Match, Maybe, OneOf, Op


def value(name: str, array=None) -> ir.Value:
    return ir.Value(name=name, const_value=None if array is None else ir.Tensor(np.float32(array), name=name))


def apply(op_type: str, *inputs: ir.Value | None, domain: str = "", **attributes) -> ir.Value:
    return ir.node(op_type, inputs, attributes=attributes, domain=domain).outputs[0]


X, Y, W = value("x"), value("y"), value("w", [1.0])


def test_bind_takes_any_value_but_the_same_one_everywhere():
    square = Op("Mul", Bind("a"), Bind("a"))
    assert square.match(apply("Mul", X, X), Match()).values == {"a": X}
    assert square.match(apply("Mul", X, Y), Match()) is None


def test_weights_are_initializers():
    assert Bind("w", weight=True).match(W, Match()).values == {"w": W}
    assert Bind("w", weight=True).match(X, Match()) is None


@pytest.mark.parametrize(
    "found",
    [
        X,  # no node at all
        apply("Sub", X, Y),  # another op
        apply("Add", Y, X),  # another order
        apply("Add", X, Y, domain="custom"),  # another domain
        apply("Add", X, Y, W),  # an input too many
        apply("Add", X),  # one too few
        apply("Add", X, None),
        apply("Add", X, Y, axis=1),  # an attribute that the pattern does not know
        None,
    ],
)
def test_op_takes_exactly_its_own_form(found):
    pattern = Op("Add", Bind("x"), Bind("y"))
    start = Match(values={"x": X, "y": Y})
    assert pattern.match(apply("Add", X, Y), start) is not None
    assert pattern.match(found, start) is None


def test_where_fixes_attributes_by_value_or_predicate():
    fixed = Op("Cast", Bind("x"), where={"to": 1})
    assert fixed.match(apply("Cast", X, to=1), Match()) is not None
    assert fixed.match(apply("Cast", X, to=2), Match()) is None
    assert fixed.match(apply("Cast", X), Match()) is None
    positive = Op("Cast", Bind("x"), where={"to": lambda to: to > 0})
    assert positive.match(apply("Cast", X, to=7), Match()) is not None
    assert positive.match(apply("Cast", X, to=0), Match()) is None


def test_capture_needs_one_value_per_name():
    inner = Op("Elu", Bind("x"), capture={"alpha": "a"})
    outer = Op("Elu", inner, capture={"alpha": "a"})
    match = outer.match(apply("Elu", apply("Elu", X, alpha=2.0), alpha=2.0), Match())
    assert {name: attribute.value for name, attribute in match.attributes.items()} == {"a": 2.0}
    assert outer.match(apply("Elu", apply("Elu", X, alpha=2.0), alpha=3.0), Match()) is None
    assert inner.match(apply("Elu", X), Match()) is None


def test_maybe_says_whether_the_input_is_there():
    pattern = Op("Gemm", Bind("x"), Maybe("bias", Bind("b", weight=True)))
    assert pattern.match(apply("Gemm", X, W), Match()).variant == ("bias",)
    assert pattern.match(apply("Gemm", X), Match()).variant == ()
    assert pattern.match(apply("Gemm", X, None), Match()).variant == ()
    assert pattern.match(apply("Gemm", X, Y), Match()) is None  # there, but no weight


def test_one_of_takes_the_first_alternative_and_forgets_failed_ones():
    scaled = Op("Mul", Op("Neg", Bind("scaled")), Bind("factor", weight=True))
    pattern = OneOf(("scaled", scaled), ("plain", Op("Mul", Bind("a"), Bind("b"))), ("", Bind("other")))
    match = pattern.match(apply("Mul", apply("Neg", X), W), Match())
    assert (match.variant, set(match.values)) == (("scaled",), {"scaled", "factor"})
    match = pattern.match(apply("Mul", apply("Neg", X), Y), Match())
    assert (match.variant, set(match.values)) == (("plain",), {"a", "b"})
    assert pattern.match(Y, Match()).variant == ()


def test_nodes_come_inputs_first_and_once():
    shared = apply("Neg", X)
    root = apply("Mul", apply("Abs", shared), shared)
    pattern = Op("Mul", Op("Abs", Op("Neg", Bind("x"))), Op("Neg", Bind("x")))
    assert [node.op_type for node in pattern.match(root, Match()).nodes] == ["Neg", "Abs", "Mul"]
