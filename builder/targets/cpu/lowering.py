"""Lowering to the CPU target: a fused and planned graph becomes a rank's plan, and the list of what the plan names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from aotllm.builder.config import ModelConfig
from aotllm.builder.passes import KvLayer, Partition, Stage, kv_layers
from aotllm.builder.targets.cpu.plan import LinearRecord, Plan, SegmentRecord
from aotllm.builder.targets.cuts import weight_cuts
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
    stack_sources,
    stage_record,
)
from aotllm.builder.targets.plan import PLAN_VERSION, Op
from aotllm.errors import UnsupportedModel

_MAX_HEAD_DIM = 512
_HEAD_DIM_STEP = 8


@dataclass(frozen=True)
class PackJob:
    """A segment to pack: rows and columns of matrix `source` of the checkpoint become tensor `tensor` of the engine."""

    tensor: str
    source: str
    rows: range
    columns: range

    @property
    def n(self) -> int:
        """Rows of the segment."""
        return len(self.rows)

    @property
    def k(self) -> int:
        """Columns of the segment."""
        return len(self.columns)


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
    partition: Partition | None = None,
    stage: Stage | None = None,
) -> Lowered:
    """The plan of one rank of `model` for the CPU target. Reads no weight.

    Args:
        model: as `run_passes` left it, with the partition's number of ranks.
        config: of the same checkpoint.
        segment_format: canonical name of a matrix → format of its packed segment.
        kv_dtype: f32 | bf16 | int16 | int8.
        tokens_per_block: tokens of a cache block, a multiple of 16.
        max_seq_len: longest sequence of the engine, in tokens.
        max_num_tokens: tokens of a step, the same that `run_passes` planned the arena for.
        max_batch_size: sequences of a step.
        partition: which rank; default: the only one.
        stage: which ops; default: all.

    Raises:
        UnsupportedModel: the kernels do not take the model's head size.
        Internal: the graph was planned for other sizes, or holds an op that the target does not know.
    """
    arena, layers, partition = checked_arena(model, max_num_tokens), kv_layers(model), partition or Partition(config)
    for layer in layers:
        _check_layer(layer, config)
    lowering = _CpuLowering(model, partition, segment_format)
    ops = [lowering.op(node) for node in (stage.nodes if stage is not None else model.graph)]
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
    if partition.size > 1:
        plan["tp"] = {"size": partition.size, "rank": partition.rank}
    if stage is not None and stage.size > 1:
        plan["pp"] = stage_record(stage)
    return Lowered(plan, tuple(lowering.pack_jobs.values()), tuple(lowering.dense_jobs.values()))


class _CpuLowering(Lowering):
    """Matrices are made of segments, which may differ in format; each is cut to what the rank holds of it."""

    target = "cpu"

    def __init__(self, model: ir.Model, partition: Partition, segment_format: Callable[[str], str]) -> None:
        super().__init__(model, partition)
        self._segment_format = segment_format
        self._cuts = weight_cuts(model, partition, partition.tokens)
        self.linears: dict[str, LinearRecord] = {}
        self.pack_jobs: dict[str, PackJob] = {}

    def gate_and_up(self, inputs: Mapping[str, ir.Value]) -> Op:
        """Two linears."""
        return {
            "gate": self.linear(inputs["gate_weight"]),
            "up": self.linear(inputs["up_weight"]),
            "gate_bias": self.dense(inputs.get("gate_bias"), self.rows_of(inputs["gate_weight"])),
            "up_bias": self.dense(inputs.get("up_bias"), self.rows_of(inputs["up_weight"])),
        }

    def experts(self, inputs: Mapping[str, ir.Value]) -> Op:
        """Three linears, each with a segment per expert."""
        if self._partition.size > 1:
            raise UnsupportedModel(
                f"Mixtures of experts run on one rank on target cpu, tp is {self._partition.size}; leave --tp out."
            )
        return {part: self._stack(inputs[f"{part}_weight"]) for part in ("gate", "up", "down")}

    def rows_of(self, weight: ir.Value) -> range:
        """See `Lowering`."""
        return self._cuts.rows.get(weight, range(matrix_shape(weight)[0]))

    def linear(self, *weights: ir.Value, name: str | None = None) -> str:
        """See `Lowering`."""
        sources = [source_name(weight) for weight in weights]
        name = name or engine_name(sources[0])
        columns = self._cuts.columns.get(weights[0], range(matrix_shape(weights[0])[1]))
        self._add(name, sources, [self.rows_of(weight) for weight in weights], columns)
        return name

    def _stack(self, weight: ir.Value) -> str:
        assert weight.shape is not None
        _, n, k = weight.shape.numpy()
        name, sources = engine_name(str(weight.name)), stack_sources(weight)
        self._add(name, sources, [range(n)] * len(sources), range(k))
        return name

    def _add(self, name: str, sources: Sequence[str], rows: Sequence[range], columns: range) -> None:
        """Enters the linear `name` of the given matrices, one under the other."""
        segments: list[SegmentRecord] = []
        for source, taken in zip(sources, rows, strict=True):
            tensor = engine_name(source)
            self.pack_jobs.setdefault(tensor, PackJob(tensor, source, taken, columns))
            segments.append({"n": len(taken), "format": self._segment_format(source), "tensor": tensor})
        self.linears[name] = {"n": sum(map(len, rows)), "k": len(columns), "segments": segments}


def _check_layer(layer: KvLayer, config: ModelConfig) -> None:
    if layer.head_dim % _HEAD_DIM_STEP or layer.head_dim > _MAX_HEAD_DIM:
        raise UnsupportedModel(
            f"Head size {layer.head_dim} is not supported by target cpu: it takes multiples of {_HEAD_DIM_STEP} up to "
            f"{_MAX_HEAD_DIM}."
        )
    check_heads(layer, config, "cpu")
