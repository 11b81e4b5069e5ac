"""Lowering to the CPU target: a fused and planned graph becomes the plan, and the list of tensors that it names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import onnx_ir as ir

from aotllm.builder.config import ModelConfig
from aotllm.builder.passes import KvLayer, kv_layers
from aotllm.builder.targets.cpu.plan import LinearRecord, Plan, SegmentRecord
from aotllm.builder.targets.lowering import (
    DenseJob,
    Lowering,
    buffer_records,
    check_heads,
    checked_arena,
    engine_name,
    kv_record,
    matrix_shape,
    source_name,
)
from aotllm.builder.targets.plan import PLAN_VERSION, Op
from aotllm.errors import UnsupportedModel

_MAX_HEAD_DIM = 512
_HEAD_DIM_STEP = 8


@dataclass(frozen=True)
class PackJob:
    """A segment to pack: matrix `source` `[n, k]` of the checkpoint becomes tensor `tensor` of the engine."""

    tensor: str
    source: str
    n: int
    k: int


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
    arena, layers = checked_arena(model, max_num_tokens), kv_layers(model)
    for layer in layers:
        _check_layer(layer, config)
    lowering = _CpuLowering(model, segment_format)
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
        "buffers": buffer_records(arena),
        "rope": lowering.rope,
        "kv": kv_record(kv_dtype, tokens_per_block, layers),
        "linears": lowering.linears,
        "ops": ops,
    }
    return Lowered(plan, tuple(lowering.pack_jobs.values()), tuple(lowering.dense_jobs.values()))


class _CpuLowering(Lowering):
    """Matrices are made of segments, which may differ in format."""

    target = "cpu"

    def __init__(self, model: ir.Model, segment_format: Callable[[str], str]) -> None:
        super().__init__(model)
        self._segment_format = segment_format
        self.linears: dict[str, LinearRecord] = {}
        self.pack_jobs: dict[str, PackJob] = {}

    def gate_and_up(self, inputs: Mapping[str, ir.Value]) -> Op:
        """Two linears."""
        return {
            "gate": self.linear(inputs["gate_weight"]),
            "up": self.linear(inputs["up_weight"]),
            "gate_bias": self.dense(inputs.get("gate_bias")),
            "up_bias": self.dense(inputs.get("up_bias")),
        }

    def linear(self, *weights: ir.Value, name: str | None = None) -> str:
        """See `Lowering`."""
        sources = [source_name(weight) for weight in weights]
        name = name or engine_name(sources[0])
        segments: list[SegmentRecord] = []
        for source, weight in zip(sources, weights, strict=True):
            n, k = matrix_shape(weight)
            tensor = engine_name(source)
            self.pack_jobs.setdefault(tensor, PackJob(tensor, source, n, k))
            segments.append({"n": n, "format": self._segment_format(source), "tensor": tensor})
        rows = sum(segment["n"] for segment in segments)
        self.linears[name] = {"n": rows, "k": matrix_shape(weights[0])[1], "segments": segments}
        return name


def _check_layer(layer: KvLayer, config: ModelConfig) -> None:
    if layer.head_dim % _HEAD_DIM_STEP or layer.head_dim > _MAX_HEAD_DIM:
        raise UnsupportedModel(
            f"Head size {layer.head_dim} is not supported by target cpu: it takes multiples of {_HEAD_DIM_STEP} up to "
            f"{_MAX_HEAD_DIM}."
        )
    check_heads(layer, config, "cpu")
