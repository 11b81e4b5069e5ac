"""`Tracer`: records the ops that a model definition applies into an ONNX graph."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import onnx_ir as ir

OPSET = 24
"""First version of the standard operators with Swish; RMSNormalization, RotaryEmbedding and Attention are older."""
IR_VERSION = 11
"""First version of the file format whose checker and runtimes accept opset 24 and overloads of local functions"""
DOMAIN = "aotllm"
"""Domain of the ops that are not ONNX's own"""
TOKENS = "tokens"
"""Name of the one dynamic axis"""

Dim = int | str
Attribute = int | float | str | Sequence[int]


@dataclass(frozen=True)
class Tensor:
    """A traced value: what the functions of `aotllm.builder.graph.ops` take and return."""

    value: ir.Value
    tracer: Tracer = field(repr=False)

    @property
    def shape(self) -> tuple[Dim, ...]:
        """Sizes; the dynamic token axis is the string `tokens`."""
        assert self.value.shape is not None, f"{self.value.name} was traced without a shape"
        return tuple(d if isinstance(d, int) else str(d.value) for d in self.value.shape)

    @property
    def width(self) -> int:
        """Size of the last axis, which is never the dynamic one."""
        last = self.shape[-1]
        assert isinstance(last, int), f"{self.value.name} has no static last axis: {self.shape}"
        return last


class Tracer:
    """Collects nodes, inputs and initializers; `finish` makes them an `ir.Model`.

    Names are unique and speak: a node is named after its weight or its op, behind the scope it was traced in.
    """

    def __init__(self, name: str) -> None:
        self._graph = ir.Graph([], [], nodes=[], name=name, opset_imports={"": OPSET, DOMAIN: 1})
        self._constants: dict[tuple[str, Attribute], Tensor] = {}
        self._scope: tuple[str, ...] = ()
        self._uses: collections.Counter[str] = collections.Counter()

    @contextlib.contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Nodes traced inside carry `name` in front of their own and in their `namespace` metadata."""
        self._scope += (name,)
        try:
            yield
        finally:
            self._scope = self._scope[:-1]

    def input(self, name: str, shape: Sequence[Dim], dtype: ir.DataType) -> Tensor:
        """Declares a graph input."""
        value = ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(dtype))
        self._graph.inputs.append(value)
        return Tensor(value, self)

    def initializer(self, tensor: ir.TensorProtocol) -> Tensor:
        """The graph's initializer of that name; registered at the first call."""
        assert tensor.name, "an initializer needs a name"
        value = self._graph.initializers.get(tensor.name)
        if value is None:
            shape = ir.Shape(tensor.shape.numpy())
            value = ir.Value(name=tensor.name, shape=shape, type=ir.TensorType(tensor.dtype), const_value=tensor)
            self._graph.register_initializer(value)
        return Tensor(value, self)

    def constant(self, value: int | float | Sequence[int]) -> Tensor:
        """A small constant as a node, so that it may become part of a function's body. Floats are float32."""
        kind = {int: "value_int", float: "value_float"}.get(type(value), "value_ints")
        key: tuple[str, Attribute] = (kind, tuple(value) if isinstance(value, Sequence) else value)
        if key not in self._constants:
            shape = (len(value),) if isinstance(value, Sequence) else ()
            dtype = ir.DataType.FLOAT if kind == "value_float" else ir.DataType.INT64
            scope, self._scope = self._scope, ()  # shared by every scope
            self._constants[key] = self.emit("Constant", shape=shape, dtype=dtype, attributes={kind: key[1]})
            self._scope = scope
        return self._constants[key]

    def emit(
        self,
        op_type: str,
        *inputs: Tensor | None,
        shape: Sequence[Dim],
        dtype: ir.DataType = ir.DataType.FLOAT,
        attributes: Mapping[str, Attribute] | None = None,
        name: str | None = None,
    ) -> Tensor:
        """Appends a node of the standard domain with one output of `shape`; returns that output."""
        (output,) = self.emit_all(op_type, *inputs, shape=shape, dtypes=(dtype,), attributes=attributes, name=name)
        return output

    def emit_all(
        self,
        op_type: str,
        *inputs: Tensor | None,
        shape: Sequence[Dim],
        dtypes: Sequence[ir.DataType],
        attributes: Mapping[str, Attribute] | None = None,
        name: str | None = None,
    ) -> list[Tensor]:
        """Appends a node of the standard domain with an output of `shape` per type; returns these outputs."""
        namespace = ".".join(self._scope)
        name = self._unique(name or f"{namespace}.{op_type}".lstrip("."))
        node = ir.node(
            op_type,
            [None if tensor is None else tensor.value for tensor in inputs],
            attributes=dict(attributes or {}),
            outputs=[
                ir.Value(name=f"{name}:out{i or ''}", shape=ir.Shape(shape), type=ir.TensorType(dtype))
                for i, dtype in enumerate(dtypes)
            ],
            name=name,
            metadata_props={"namespace": namespace} if namespace else None,
        )
        self._graph.append(node)
        return [Tensor(output, self) for output in node.outputs]

    def finish(self, outputs: Mapping[str, Tensor], metadata: Mapping[str, str]) -> ir.Model:
        """The traced model. `outputs` gives the graph's outputs their names."""
        for name, tensor in outputs.items():
            tensor.value.name = name
            self._graph.outputs.append(tensor.value)
        return ir.Model(self._graph, ir_version=IR_VERSION, producer_name="aotllm", metadata_props=dict(metadata))

    def _unique(self, name: str) -> str:
        self._uses[name] += 1
        uses = self._uses[name]
        return name if uses == 1 else f"{name}_{uses}"
