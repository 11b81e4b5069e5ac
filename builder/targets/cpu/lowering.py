"""Lowering to the CPU target: a fused and planned graph becomes the plan, and the list of tensors that it names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from aotllm.builder.config import ModelConfig
from aotllm.builder.graph.weights import CheckpointTensor
from aotllm.builder.passes import KvLayer, arena_plan, buffer_index, kv_layers, operands
from aotllm.builder.passes.fused_ops import (
    EMBEDDING,
    LINEAR_RESIDUAL,
    LM_HEAD,
    NORM_QKV_ROPE,
    NORM_SWIGLU,
    PAGED_ATTENTION,
)
from aotllm.builder.targets.cpu.plan import PLAN_VERSION, LinearRecord, Op, Plan, RopeRecord, SegmentRecord
from aotllm.errors import Internal, UnsupportedModel

_MAX_HEAD_DIM = 512
_HEAD_DIM_STEP = 8

DenseArray = npt.NDArray[np.float32]


@dataclass(frozen=True)
class PackJob:
    """A segment to pack: matrix `source` `[n, k]` of the checkpoint becomes tensor `tensor` of the engine."""

    tensor: str
    source: str
    n: int
    k: int


@dataclass(frozen=True)
class DenseJob:
    """A float32 tensor of the engine; `compute` reads the checkpoint."""

    tensor: str
    compute: Callable[[], DenseArray]


@dataclass(frozen=True)
class Lowered:
    """What a rank's engine file is made of: the plan, and every tensor that the plan names exactly once."""

    plan: Plan
    pack_jobs: tuple[PackJob, ...]
    dense_jobs: tuple[DenseJob, ...]


def lower(
    model: ir.Model,
    config: ModelConfig,
    *,
    segment_format: Callable[[str], str],
    kv_dtype: str,
    tokens_per_block: int,
    max_seq_len: int,
    max_num_tokens: int,
    max_batch_size: int,
) -> Lowered:
    """The plan of `model` for the CPU target. Reads no weight.

    Args:
        model: as `run_passes` left it.
        config: of the same checkpoint.
        segment_format: canonical name of a matrix → format of its packed segment.
        kv_dtype: f32 | f16 | int8.
        tokens_per_block: tokens of a cache block, a multiple of 16.
        max_seq_len: longest sequence of the engine, in tokens.
        max_num_tokens: tokens of a step, the same that `run_passes` planned the arena for.
        max_batch_size: sequences of a step.

    Raises:
        UnsupportedModel: the kernels do not take the model's head size.
        Internal: the graph was planned for other sizes, or holds an op that the target does not know.
    """
    arena, layers = arena_plan(model), kv_layers(model)
    if arena.max_num_tokens != max_num_tokens:
        raise Internal(f"The arena is planned for {arena.max_num_tokens} tokens a step, not for {max_num_tokens}.")
    for layer in layers:
        _check_layer(layer, config)
    lowering = _Lowering(model, layers, segment_format)
    ops = [lowering.op(node) for node in model.graph]
    plan: Plan = {
        "version": PLAN_VERSION,
        "target": "cpu",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "max_seq_len": max_seq_len,
        "max_num_tokens": max_num_tokens,
        "max_batch_size": max_batch_size,
        "arena_bytes": arena.bytes,
        "buffers": [{"name": b.name, "width": b.width, "offset": b.offset} for b in arena.buffers],
        "rope": lowering.rope,
        "kv": {
            "dtype": kv_dtype,
            "tokens_per_block": tokens_per_block,
            "layers": [{"num_kv_heads": v.num_kv_heads, "head_dim": v.head_dim, "window": v.window} for v in layers],
        },
        "linears": lowering.linears,
        "ops": ops,
    }
    return Lowered(plan, tuple(lowering.pack_jobs.values()), tuple(lowering.dense_jobs.values()))


def engine_name(source: str) -> str:
    """What a checkpoint's tensor is called in an engine.

    `model.layers.3.self_attn.q_proj.weight` → `layers.3.q`, `model.norm.weight` → `final_norm`,
    `model.layers.3.mlp.up_proj.bias` → `layers.3.up.bias`.
    """
    name = source.removeprefix("model.").removesuffix(".weight")
    name = {"embed_tokens": "embedding", "norm": "final_norm"}.get(name, name)
    return name.replace("self_attn.", "").replace("mlp.", "").replace("_proj", "")


class _Lowering:
    """Turns nodes into op records and collects what they refer to."""

    def __init__(self, model: ir.Model, layers: Sequence[KvLayer], segment_format: Callable[[str], str]) -> None:
        self._model = model
        self._layers = layers
        self._segment_format = segment_format
        self.rope: list[RopeRecord] = []
        self.linears: dict[str, LinearRecord] = {}
        self.pack_jobs: dict[str, PackJob] = {}
        self.dense_jobs: dict[str, DenseJob] = {}
        self._lower = {
            EMBEDDING: self._embedding,
            NORM_QKV_ROPE: self._norm_qkv_rope,
            PAGED_ATTENTION: self._paged_attention,
            LINEAR_RESIDUAL: self._linear_residual,
            NORM_SWIGLU: self._norm_swiglu,
            LM_HEAD: self._lm_head,
        }

    def op(self, node: ir.Node) -> Op:
        """The record of a fused node."""
        lower = self._lower.get(node.op_type)
        if lower is None:
            raise Internal(f"Target cpu has no op {node.op_type!r} ({node.name!r}); it has {', '.join(self._lower)}.")
        record = {"op": node.op_type, **lower(node, operands(self._model, node))}
        return {field: value for field, value in record.items() if value is not None}

    def _embedding(self, node: ir.Node, inputs: dict[str, ir.Value]) -> Op:
        return {
            "out": buffer_index(node.outputs[0]),
            "linear": self._linear(inputs["weight"]),
            "scale": _attribute(node, "scale", 1.0),
        }

    def _norm_qkv_rope(self, node: ir.Node, inputs: dict[str, ir.Value]) -> Op:
        layer = _attribute(node, "layer")
        weights = [inputs[f"{letter}_weight"] for letter in "qkv"]
        biases = [inputs.get(f"{letter}_bias") for letter in "qkv"]
        linear = self._linear(*weights, name=f"layers.{layer}.qkv")
        return {
            "layer": layer,
            "in": buffer_index(inputs["x"]),
            "out": buffer_index(node.outputs[0]),
            "eps": _attribute(node, "eps"),
            "norm": self._dense(inputs["norm"]),
            "linear": linear,
            "bias": self._concatenated(f"{linear}.bias", weights, biases),
            "q_norm": self._dense(inputs.get("q_norm")),
            "k_norm": self._dense(inputs.get("k_norm")),
            "num_heads": _attribute(node, "num_heads"),
            "num_kv_heads": _attribute(node, "num_kv_heads"),
            "head_dim": self._layers[layer].head_dim,
            "rope": self._rope_index(inputs["inv_freq"], _attribute(node, "attention_factor")),
            "qk_norm_eps": _attribute(node, "qk_norm_eps", None),
        }

    def _paged_attention(self, node: ir.Node, inputs: dict[str, ir.Value]) -> Op:
        layer = _attribute(node, "layer")
        return {
            "layer": layer,
            "in": buffer_index(inputs["q"]),
            "out": buffer_index(node.outputs[0]),
            "num_heads": _attribute(node, "num_heads"),
            **asdict(self._layers[layer]),
            "scale": _attribute(node, "scale"),
            "softcap": _attribute(node, "softcap"),
        }

    def _linear_residual(self, node: ir.Node, inputs: dict[str, ir.Value]) -> Op:
        return {
            "in": buffer_index(inputs["x"]),
            "residual": buffer_index(inputs["residual"]),
            "out": buffer_index(node.outputs[0]),
            "linear": self._linear(inputs["weight"]),
            "bias": self._dense(inputs.get("bias")),
            "post_norm": self._dense(inputs.get("post_norm")),
            "eps": _attribute(node, "eps", None),
        }

    def _norm_swiglu(self, node: ir.Node, inputs: dict[str, ir.Value]) -> Op:
        return {
            "in": buffer_index(inputs["x"]),
            "out": buffer_index(node.outputs[0]),
            "eps": _attribute(node, "eps"),
            "norm": self._dense(inputs["norm"]),
            "gate": self._linear(inputs["gate_weight"]),
            "up": self._linear(inputs["up_weight"]),
            "gate_bias": self._dense(inputs.get("gate_bias")),
            "up_bias": self._dense(inputs.get("up_bias")),
            "activation": self._activation(node),
        }

    def _lm_head(self, node: ir.Node, inputs: dict[str, ir.Value]) -> Op:
        linear = self._linear(inputs["weight"])
        return {
            "in": buffer_index(inputs["x"]),
            "eps": _attribute(node, "eps"),
            "norm": self._dense(inputs["norm"]),
            "linear": linear,
            "softcap": _attribute(node, "softcap", 0.0),
            "vocab_size": self.linears[linear]["n"],
            "bias": self._dense(inputs.get("bias")),
        }

    def _activation(self, node: ir.Node) -> str:
        """The one activation in the body of the node's function."""
        names = {"Swish": "silu", "Gelu": "gelu_tanh"}
        body = self._model.functions[node.op_identifier()]
        return next(names[inner.op_type] for inner in body if inner.op_type in names)

    def _linear(self, *weights: ir.Value, name: str | None = None) -> str:
        """Name of the linear made of `weights`, one under the other; packed once however often it is named."""
        sources = [_source(weight) for weight in weights]
        name = name or engine_name(sources[0])
        segments: list[SegmentRecord] = []
        for source, weight in zip(sources, weights, strict=True):
            n, k = _shape(weight)
            tensor = engine_name(source)
            self.pack_jobs.setdefault(tensor, PackJob(tensor, source, n, k))
            segments.append({"n": n, "format": self._segment_format(source), "tensor": tensor})
        rows = sum(segment["n"] for segment in segments)
        self.linears[name] = {"n": rows, "k": _shape(weights[0])[1], "segments": segments}
        return name

    def _dense(self, value: ir.Value | None) -> str | None:
        """Name of the float32 tensor that holds initializer `value`; None for an absent one."""
        if value is None:
            return None
        tensor = engine_name(str(value.name))
        self.dense_jobs.setdefault(tensor, DenseJob(tensor, lambda: _data(value)))
        return tensor

    def _concatenated(self, tensor: str, weights: Sequence[ir.Value], biases: Sequence[ir.Value | None]) -> str | None:
        """Name of the bias of a linear of several matrices; zeros where one has none, None where none has one."""
        if all(bias is None for bias in biases):
            return None

        def compute() -> DenseArray:
            return np.concatenate(
                [
                    _data(bias) if bias is not None else np.zeros(_shape(weight)[0], np.float32)
                    for weight, bias in zip(weights, biases, strict=True)
                ]
            )

        self.dense_jobs.setdefault(tensor, DenseJob(tensor, compute))
        return tensor

    def _rope_index(self, inv_freq: ir.Value, attention_factor: float) -> int:
        name = self._dense(inv_freq)
        assert name is not None
        record: RopeRecord = {"inv_freq": name, "attention_factor": attention_factor}
        if record not in self.rope:
            self.rope.append(record)
        return self.rope.index(record)


def _check_layer(layer: KvLayer, config: ModelConfig) -> None:
    if layer.head_dim % _HEAD_DIM_STEP or layer.head_dim > _MAX_HEAD_DIM:
        raise UnsupportedModel(
            f"Head size {layer.head_dim} is not supported by target cpu: it takes multiples of {_HEAD_DIM_STEP} up to "
            f"{_MAX_HEAD_DIM}."
        )
    if config.num_heads % layer.num_kv_heads:
        raise UnsupportedModel(
            f"{config.num_heads} query heads cannot share {layer.num_kv_heads} KV heads evenly; target cpu needs a "
            "multiple."
        )


_REQUIRED = object()


def _attribute(node: ir.Node, name: str, default: Any = _REQUIRED) -> Any:
    """An attribute's value; the default where the node has none."""
    if name in node.attributes:
        return node.attributes[name].value
    if default is _REQUIRED:
        raise Internal(f"{node.op_type} {node.name!r} has no attribute {name!r}.")
    return default


def _source(weight: ir.Value) -> str:
    """Canonical name of the checkpoint's tensor behind an initializer."""
    tensor = weight.const_value
    if not isinstance(tensor, CheckpointTensor):
        raise Internal(f"Matrix {weight.name!r} does not come from the checkpoint, so it cannot be packed.")
    return tensor.source


def _shape(weight: ir.Value) -> tuple[int, int]:
    assert weight.shape is not None
    n, k = weight.shape.numpy()
    return n, k


def _data(value: ir.Value) -> DenseArray:
    assert value.const_value is not None
    return np.ascontiguousarray(value.const_value.numpy(), dtype=np.float32)
