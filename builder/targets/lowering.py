"""Lowering, as far as it is the same for all targets: fused nodes become op records, and name what they need."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from aotllm.builder.config import ModelConfig
from aotllm.builder.graph.weights import CheckpointStack, CheckpointTensor
from aotllm.builder.passes import KvLayer, Partition, Stage, arena_plan, buffer_index, kv_layers, operands
from aotllm.builder.passes.arena_plan import ArenaPlan
from aotllm.builder.passes.fused_ops import (
    EMBEDDING,
    LINEAR_RESIDUAL,
    LM_HEAD,
    NORM_MOE,
    NORM_QKV_ROPE,
    NORM_SWIGLU,
    PAGED_ATTENTION,
)
from aotllm.builder.targets.plan import BufferRecord, KvRecord, Op, RopeRecord, StageRecord
from aotllm.errors import Internal, UnsupportedModel

DenseArray = npt.NDArray[np.float32]


@dataclass(frozen=True)
class DenseJob:
    """A float32 tensor of the engine; `compute` reads the checkpoint."""

    tensor: str
    compute: Callable[[], DenseArray]


def engine_name(source: str) -> str:
    """What a checkpoint's tensor is called in an engine.

    `model.layers.3.self_attn.q_proj.weight` → `layers.3.q`, `model.norm.weight` → `final_norm`,
    `model.layers.3.mlp.up_proj.bias` → `layers.3.up.bias`, `model.layers.3.mlp.gate.weight` → `layers.3.router`,
    `model.layers.3.mlp.experts.7.up_proj.weight` → `layers.3.experts.7.up`.
    """
    if source.endswith(".mlp.gate.weight"):
        source = source.replace(".mlp.gate.", ".router.")
    name = source.removeprefix("model.").removesuffix(".weight")
    name = {"embed_tokens": "embedding", "norm": "final_norm"}.get(name, name)
    return name.replace("self_attn.", "").replace("mlp.", "").replace("_proj", "")


class Lowering(ABC):
    """Turns nodes into op records and collects what they refer to. Reads no weight.

    A target says how a matrix is stored (`linear`), and may change the records of ops that it runs in another way.
    """

    target: str

    def __init__(self, model: ir.Model, partition: Partition) -> None:
        self._model = model
        self._partition = partition
        self._layers = kv_layers(model)
        self.rope: list[RopeRecord] = []
        self.dense_jobs: dict[str, DenseJob] = {}
        self._lower: Mapping[str, Callable[[ir.Node, dict[str, ir.Value]], Op]] = {
            EMBEDDING: self._embedding,
            NORM_QKV_ROPE: self._norm_qkv_rope,
            PAGED_ATTENTION: self._paged_attention,
            LINEAR_RESIDUAL: self._linear_residual,
            NORM_SWIGLU: self._norm_swiglu,
            NORM_MOE: self._norm_moe,
            LM_HEAD: self._lm_head,
        }

    @abstractmethod
    def rows_of(self, weight: ir.Value) -> range:
        """Rows of a matrix that the rank holds."""

    @abstractmethod
    def linear(self, *weights: ir.Value, name: str | None = None) -> str:
        """Name of the linear made of `weights`, one under the other; packed once however often it is named."""

    def op(self, node: ir.Node) -> Op:
        """The record of a fused node."""
        lower = self._lower.get(node.op_type)
        if lower is None:
            raise Internal(
                f"Target {self.target} has no op {node.op_type!r} ({node.name!r}); it has {', '.join(self._lower)}."
            )
        record = {"op": node.op_type, **lower(node, operands(self._model, node))}
        return {field: value for field, value in record.items() if value is not None}

    def _embedding(self, node: ir.Node, inputs: dict[str, ir.Value]) -> Op:
        return {
            "out": buffer_index(node.outputs[0]),
            "linear": self.linear(inputs["weight"]),
            "scale": attribute(node, "scale", 1.0),
            "vocab_begin": self.rows_of(inputs["weight"]).start if self._partition.size > 1 else None,
        }

    def _norm_qkv_rope(self, node: ir.Node, inputs: dict[str, ir.Value]) -> Op:
        layer = attribute(node, "layer")
        weights = [inputs[f"{letter}_weight"] for letter in "qkv"]
        biases = [inputs.get(f"{letter}_bias") for letter in "qkv"]
        linear = self.linear(*weights, name=f"layers.{layer}.qkv")
        return {
            "layer": layer,
            "in": buffer_index(inputs["x"]),
            "out": buffer_index(node.outputs[0]),
            "eps": attribute(node, "eps"),
            "norm": self.dense(inputs["norm"]),
            "linear": linear,
            "bias": self._concatenated(f"{linear}.bias", weights, biases),
            "q_norm": self.dense(inputs.get("q_norm")),
            "k_norm": self.dense(inputs.get("k_norm")),
            "num_heads": attribute(node, "num_heads"),
            "num_kv_heads": attribute(node, "num_kv_heads"),
            "head_dim": self._layers[layer].head_dim,
            "rope": self._rope_index(inputs["inv_freq"], attribute(node, "attention_factor")),
            "qk_norm_eps": attribute(node, "qk_norm_eps", None),
        }

    def _paged_attention(self, node: ir.Node, inputs: dict[str, ir.Value]) -> Op:
        layer = attribute(node, "layer")
        return {
            "layer": layer,
            "in": buffer_index(inputs["q"]),
            "out": buffer_index(node.outputs[0]),
            "num_heads": attribute(node, "num_heads"),
            **asdict(self._layers[layer]),
            "scale": attribute(node, "scale"),
            "softcap": attribute(node, "softcap"),
        }

    def _linear_residual(self, node: ir.Node, inputs: dict[str, ir.Value]) -> Op:
        return {
            "in": buffer_index(inputs["x"]),
            "residual": buffer_index(inputs["residual"]),
            "out": buffer_index(node.outputs[0]),
            "linear": self.linear(inputs["weight"]),
            "bias": self.dense(inputs.get("bias")),
            "post_norm": self.dense(inputs.get("post_norm")),
            "eps": attribute(node, "eps", None),
            "all_reduce": True if self._partition.size > 1 else None,
        }

    def _norm_swiglu(self, node: ir.Node, inputs: dict[str, ir.Value]) -> Op:
        return {
            "in": buffer_index(inputs["x"]),
            "out": buffer_index(node.outputs[0]),
            "eps": attribute(node, "eps"),
            "norm": self.dense(inputs["norm"]),
            **self.gate_and_up(inputs),
            "activation": self._activation(node),
        }

    @abstractmethod
    def gate_and_up(self, inputs: Mapping[str, ir.Value]) -> Op:
        """The fields of `norm_swiglu` that name its matrices and their biases."""

    def _norm_moe(self, node: ir.Node, inputs: dict[str, ir.Value]) -> Op:
        (top_k,) = attribute(node, "top_k")
        body = self._model.functions[node.op_identifier()]
        x = buffer_index(inputs["x"])
        return {
            "in": x,
            "residual": x,
            "out": buffer_index(node.outputs[0]),
            "eps": attribute(node, "eps"),
            "norm": self.dense(inputs["norm"]),
            "router": self.dense(inputs["router"]),
            "num_experts": matrix_shape(inputs["router"])[0],
            "top_k": int(top_k),
            "normalize": any(inner.op_type == "ReduceSum" for inner in body),
            **self.experts(inputs),
            "activation": self._activation(node),
        }

    def experts(self, inputs: Mapping[str, ir.Value]) -> Op:
        """The fields of `norm_moe` that name its matrices.

        Args:
            inputs: the initializers `gate_weight` and `up_weight` `[experts, neurons, width]` and `down_weight`
                `[experts, width, neurons]`; `stack_sources` tells what they are made of.

        Raises:
            UnsupportedModel: the target has no mixtures of experts.
        """
        raise UnsupportedModel(
            f"Target {self.target} has no kernels for mixtures of experts; build the model for target cpu."
        )

    def _lm_head(self, node: ir.Node, inputs: dict[str, ir.Value]) -> Op:
        return {
            "in": buffer_index(inputs["x"]),
            "eps": attribute(node, "eps"),
            "norm": self.dense(inputs["norm"]),
            "linear": self.linear(inputs["weight"]),
            "softcap": attribute(node, "softcap", 0.0),
            "vocab_size": matrix_shape(inputs["weight"])[0],
            "bias": self.dense(inputs.get("bias"), self.rows_of(inputs["weight"])),
        }

    def _activation(self, node: ir.Node) -> str:
        """The one activation in the body of the node's function."""
        names = {"Swish": "silu", "Gelu": "gelu_tanh"}
        body = self._model.functions[node.op_identifier()]
        return next(names[inner.op_type] for inner in body if inner.op_type in names)

    def dense(self, value: ir.Value | None, rows: range | None = None) -> str | None:
        """Name of the float32 tensor that holds initializer `value`, or `rows` of it; None for an absent one."""
        if value is None:
            return None
        tensor = engine_name(str(value.name))
        self.dense_jobs.setdefault(tensor, DenseJob(tensor, lambda: values_of(value, rows)))
        return tensor

    def _concatenated(self, tensor: str, weights: Sequence[ir.Value], biases: Sequence[ir.Value | None]) -> str | None:
        """Name of the bias of a linear of several matrices; zeros where one has none, None where none has one."""
        if all(bias is None for bias in biases):
            return None

        def compute() -> DenseArray:
            return np.concatenate(
                [
                    values_of(bias, self.rows_of(weight))
                    if bias is not None
                    else np.zeros(len(self.rows_of(weight)), np.float32)
                    for weight, bias in zip(weights, biases, strict=True)
                ]
            )

        self.dense_jobs.setdefault(tensor, DenseJob(tensor, compute))
        return tensor

    def _rope_index(self, inv_freq: ir.Value, attention_factor: float) -> int:
        name = self.dense(inv_freq)
        assert name is not None
        record: RopeRecord = {"inv_freq": name, "attention_factor": attention_factor}
        if record not in self.rope:
            self.rope.append(record)
        return self.rope.index(record)


def checked_arena(model: ir.Model, max_num_tokens: int) -> ArenaPlan:
    """The arena of `model`. Raises Internal where it was planned for another step size."""
    arena = arena_plan(model)
    if arena.max_num_tokens != max_num_tokens:
        raise Internal(f"The arena is planned for {arena.max_num_tokens} tokens a step, not for {max_num_tokens}.")
    return arena


def buffer_records(arena: ArenaPlan) -> list[BufferRecord]:
    """The plan's buffers."""
    return [{"name": b.name, "width": b.width, "offset": b.offset} for b in arena.buffers]


def stage_record(stage: Stage) -> StageRecord:
    """What the plan says of its stage."""
    record: StageRecord = {
        "size": stage.size,
        "rank": stage.index,
        "layers": (stage.layers.start, stage.layers.stop),
    }
    if stage.entering is not None:
        record["entering"] = buffer_index(stage.entering)
    if stage.leaving is not None:
        record["leaving"] = buffer_index(stage.leaving)
    return record


def kv_record(dtype: str, tokens_per_block: int, layers: Sequence[KvLayer]) -> KvRecord:
    """The plan's cache."""
    return {
        "dtype": dtype,
        "tokens_per_block": tokens_per_block,
        "layers": [{"num_kv_heads": v.num_kv_heads, "head_dim": v.head_dim, "window": v.window} for v in layers],
    }


def check_heads(layer: KvLayer, config: ModelConfig, target: str) -> None:
    """Raises UnsupportedModel where query heads do not share KV heads evenly."""
    if config.num_heads % layer.num_kv_heads:
        raise UnsupportedModel(
            f"{config.num_heads} query heads cannot share {layer.num_kv_heads} KV heads evenly; target {target} needs "
            "a multiple."
        )


_REQUIRED = object()


def attribute(node: ir.Node, name: str, default: Any = _REQUIRED) -> Any:
    """An attribute's value; the default where the node has none."""
    if name in node.attributes:
        return node.attributes[name].value
    if default is _REQUIRED:
        raise Internal(f"{node.op_type} {node.name!r} has no attribute {name!r}.")
    return default


def source_name(weight: ir.Value) -> str:
    """Canonical name of the checkpoint's tensor behind an initializer."""
    tensor = weight.const_value
    if not isinstance(tensor, CheckpointTensor):
        raise Internal(f"Matrix {weight.name!r} does not come from the checkpoint, so it cannot be packed.")
    return tensor.source


def stack_sources(weight: ir.Value) -> tuple[str, ...]:
    """Canonical names of the matrices, one per expert, behind an initializer `[experts, n, k]`."""
    stack = weight.const_value
    if not isinstance(stack, CheckpointStack):
        raise Internal(f"{weight.name!r} is no stack of matrices of the checkpoint, so it cannot be packed.")
    return stack.sources


def matrix_shape(weight: ir.Value) -> tuple[int, int]:
    """`n, k` of an initializer."""
    assert weight.shape is not None
    n, k = weight.shape.numpy()
    return n, k


def weight_bytes(weight: ir.Value, nbytes: Callable[[str, int, int], int]) -> int:
    """Bytes of a matrix, or a stack of them, in an engine; `nbytes` tells them of the checkpoint's matrix of that name
    with n rows, k columns."""
    if isinstance(weight.const_value, CheckpointStack):
        _, n, k = weight.const_value.shape.numpy()
        return sum(nbytes(source, n, k) for source in weight.const_value.sources)
    return nbytes(source_name(weight), *matrix_shape(weight))


def values_of(value: ir.Value, rows: range | None = None) -> DenseArray:
    """The data of an initializer, or `rows` of it; reads the checkpoint."""
    assert value.const_value is not None
    values = np.ascontiguousarray(value.const_value.numpy(), dtype=np.float32)
    return values if rows is None else values[rows.start : rows.stop]
