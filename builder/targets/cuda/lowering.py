"""Lowering to the CUDA target: a fused, sharded and planned graph becomes one rank's plan, and the matrices of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from aotllm.builder.checkpoints.base import FP8_BLOCK
from aotllm.builder.config import ModelConfig
from aotllm.builder.passes import ArenaLayout, Partition, kv_layers, operands
from aotllm.builder.passes.arena import round_up
from aotllm.builder.passes.fused_ops import EMBEDDING, LINEAR_RESIDUAL, LM_HEAD, NORM_QKV_ROPE, NORM_SWIGLU
from aotllm.builder.targets.cuda.matrix import Matrix, RowMap, interleaved, stacked
from aotllm.builder.targets.cuda.plan import LinearRecord, Plan, TacticRecord
from aotllm.builder.targets.cuda.tactics import tactics_for
from aotllm.builder.targets.lowering import (
    DenseArray,
    DenseJob,
    Lowering,
    buffer_records,
    check_heads,
    checked_arena,
    engine_name,
    kv_record,
    matrix_shape,
    source_name,
    values_of,
)
from aotllm.builder.targets.plan import PLAN_VERSION, Op
from aotllm.errors import UnsupportedModel

HEAD_DIMS = (64, 96, 128, 256)
TILE = 32
"""Bytes of a row that the tensor cores take at a time, and what the width of gated values is a multiple of"""
_MULTIPLES = {"bf16": (16, 16), "fp8": (TILE, TILE), "fp8_block": (TILE, FP8_BLOCK)}
"""Format → what rows and columns of a matrix must be a multiple of"""


def arena_layout(formats: Iterable[str]) -> ArenaLayout:
    """What the kernels want of buffers, for an engine whose weights are in `formats`."""
    gated_multiple = FP8_BLOCK if "fp8_block" in formats else TILE
    return ArenaLayout(element_bytes=2, alignment=256, row_multiple=128, gated_multiple=gated_multiple)


@dataclass(frozen=True)
class Lowered:
    """What a rank's engine file is made of: the plan, and every tensor that the plan names exactly once."""

    plan: Plan
    matrices: Mapping[str, Matrix]
    """By name of the linear, whose tensor (and scales) it becomes"""
    dense_jobs: tuple[DenseJob, ...]


def lower(
    model: ir.Model,
    config: ModelConfig,
    partition: Partition,
    *,
    linear_format: Callable[[str], str],
    layout: ArenaLayout,
    sm: int,
    kv_dtype: str,
    tokens_per_block: int,
    max_seq_len: int,
    max_num_tokens: int,
    max_batch_size: int,
) -> Lowered:
    """The plan of one rank of `model` for the CUDA target. Reads no weight.

    Args:
        model: as `run_passes` left it, with `layout` and the partition's number of ranks.
        config: of the same checkpoint.
        partition: which rank.
        linear_format: canonical name of a matrix → format of the linear that it becomes part of.
        layout: from `arena_layout`.
        sm: compute capability, 80 | 89 | 90.
        kv_dtype: bf16 | fp8.
        tokens_per_block: tokens of a cache block: 16, 32, 64 or 128.
        max_seq_len: longest sequence of the engine, in tokens.
        max_num_tokens: tokens of a step, the same that `run_passes` planned the arena for.
        max_batch_size: sequences of a step.

    Raises:
        UnsupportedModel: the kernels do not take a size of the model.
        Internal: the graph was planned for other sizes, or holds an op that the target does not know.
    """
    arena, layers = checked_arena(model, max_num_tokens), kv_layers(model)
    for layer in layers:
        if layer.head_dim not in HEAD_DIMS:
            raise UnsupportedModel(
                f"Head size {layer.head_dim} is not supported by target cuda: it takes "
                f"{', '.join(map(str, HEAD_DIMS))}."
            )
        check_heads(layer, config, "cuda")
    lowering = _CudaLowering(model, partition, linear_format, layout)
    ops = [lowering.op(node) for node in model.graph]
    plan: Plan = {
        "version": PLAN_VERSION,
        "target": "cuda",
        "sm": sm,
        "tp": {"size": partition.size, "rank": partition.rank},
        "vocab_size": lowering.vocab_size,
        "hidden_size": config.hidden_size,
        "max_seq_len": max_seq_len,
        "max_num_tokens": max_num_tokens,
        "max_batch_size": max_batch_size,
        "arena_bytes": arena.bytes,
        "buffers": buffer_records(arena),
        "rope": lowering.rope,
        "kv": kv_record(kv_dtype, tokens_per_block, layers),
        "linears": lowering.linears,
        "tactics": _tactics(lowering.linears, ops, sm, max_num_tokens),
        "ops": ops,
    }
    return Lowered(plan, lowering.matrices, tuple(lowering.dense_jobs.values()))


def _tactics(
    linears: Mapping[str, LinearRecord], ops: Sequence[Op], sm: int, max_num_tokens: int
) -> dict[str, list[TacticRecord]]:
    """Kernels of the linears that are multiplied by; an embedding's rows are only looked up."""
    multiplied = {op["linear"] for op in ops if "linear" in op and op["op"] != EMBEDDING}
    multiplied |= {op["gate_up"] for op in ops if "gate_up" in op}
    return {
        name: tactics_for(sm, record["format"], record["n"], record["k"], max_num_tokens)
        for name, record in linears.items()
        if name in multiplied
    }


class _CudaLowering(Lowering):
    """A linear is one matrix in one format; each weight and bias is cut to what the rank holds of it."""

    target = "cuda"

    def __init__(
        self, model: ir.Model, partition: Partition, linear_format: Callable[[str], str], layout: ArenaLayout
    ) -> None:
        super().__init__(model)
        self._multiple = layout.gated_multiple
        self._partition = partition
        self._linear_format = linear_format
        self._rows: dict[ir.Value, range] = {}
        self._columns: dict[ir.Value, range] = {}
        self._gated: set[ir.Value] = set()  # weights that read what `norm_swiglu` makes
        self._vocabulary = partition.vocabulary(self._vocabulary_multiple())
        """Tokens of the rank, those that do not exist included"""
        self.linears: dict[str, LinearRecord] = {}
        self.matrices: dict[str, Matrix] = {}
        for node in model.graph:
            self._cut(node, operands(model, node))

    def linear(self, *weights: ir.Value, name: str | None = None) -> str:
        """See `Lowering`. Columns beyond those of the weight are zeros, as wide as the buffer that they meet."""
        name = name or engine_name(source_name(weights[0]))
        if name not in self.linears:
            counts = [matrix_shape(weight)[0] for weight in weights]
            rows = stacked([self._rows_of(weight) for weight in weights], counts)
            self._add(name, weights, rows)
        return name

    def gate_and_up(self, inputs: Mapping[str, ir.Value]) -> Op:
        """One linear, the rows of gate and up in turns of 8."""
        gate, up = inputs["gate_weight"], inputs["up_weight"]
        name = engine_name(source_name(gate)).removesuffix("gate") + "gate_up"
        taken, width = self._rows_of(gate), round_up(len(self._rows_of(gate)), self._multiple)
        rows = interleaved(taken, matrix_shape(gate)[0], width)
        self._add(name, (gate, up), rows, is_interleaved=True)
        biases = [inputs.get("gate_bias"), inputs.get("up_bias")]
        bias = self._rows_of_vectors(f"{name}.bias", (gate, up), biases, rows) if any(biases) else None
        return {"gate_up": name, "gate_up_bias": bias}

    def _embedding(self, node: ir.Node, inputs: dict[str, ir.Value]) -> Op:
        record = super()._embedding(node, inputs)
        if self._partition.size > 1:
            record["vocab_begin"] = self._rows_of(inputs["weight"]).start
        return record

    def _linear_residual(self, node: ir.Node, inputs: dict[str, ir.Value]) -> Op:
        return {**super()._linear_residual(node, inputs), "all_reduce": True if self._partition.size > 1 else None}

    def _lm_head(self, node: ir.Node, inputs: dict[str, ir.Value]) -> Op:
        record = super()._lm_head(node, {name: value for name, value in inputs.items() if name != "bias"})
        bias, taken, size = inputs.get("bias"), self._rows_of(inputs["weight"]), record["vocab_size"]
        record["vocab_size"] = self.vocab_size
        if bias is None and size == self.vocab_size:
            return record
        if record["softcap"] and size < self.vocab_size:
            raise UnsupportedModel(
                f"A vocabulary of {size} tokens would be padded to {self.vocab_size} on {self._partition.size} ranks; "
                "target cuda cannot do that where logits are capped. Use fewer ranks, or pad the checkpoint."
            )
        tensor = f"{record['linear']}.logit_bias"
        self.dense_jobs[tensor] = DenseJob(tensor, lambda: _logit_bias(bias, taken, size))
        return {**record, "bias": tensor}

    @property
    def vocab_size(self) -> int:
        """Of the engine: the model's, padded where the kernels need it."""
        return len(self._vocabulary) * self._partition.size

    def _vocabulary_multiple(self) -> int:
        """What a rank's share of the vocabulary is a multiple of, by the head's format."""
        head = next(node for node in self._model.graph if node.op_type == LM_HEAD)
        fmt = self._linear_format(source_name(operands(self._model, head)["weight"]))
        return FP8_BLOCK if fmt == "fp8_block" else _MULTIPLES[fmt][0]

    def _cut(self, node: ir.Node, inputs: dict[str, ir.Value]) -> None:
        """Notes what the rank holds of the weights of an op."""
        part = self._partition
        if node.op_type == NORM_QKV_ROPE:
            head_dim = self._layers[node.attributes["layer"].as_int()].head_dim
            for letter, heads in (("q", part.heads), ("k", part.kv_heads), ("v", part.kv_heads)):
                self._rows[inputs[f"{letter}_weight"]] = range(heads.start * head_dim, heads.stop * head_dim)
        elif node.op_type == NORM_SWIGLU:
            self._rows[inputs["gate_weight"]] = self._rows[inputs["up_weight"]] = part.neurons
        elif node.op_type == LINEAR_RESIDUAL:
            producer = inputs["x"].producer()
            assert producer is not None
            if producer.op_type == NORM_SWIGLU:
                self._columns[inputs["weight"]] = part.neurons
                self._gated.add(inputs["weight"])
            else:
                head_dim = self._layers[producer.attributes["layer"].as_int()].head_dim
                self._columns[inputs["weight"]] = range(part.heads.start * head_dim, part.heads.stop * head_dim)
        elif node.op_type in (EMBEDDING, LM_HEAD):
            self._rows[inputs["weight"]] = self._vocabulary

    def _rows_of(self, weight: ir.Value) -> range:
        return self._rows.get(weight, range(matrix_shape(weight)[0]))

    def _add(self, name: str, weights: Sequence[ir.Value], rows: RowMap, is_interleaved: bool = False) -> None:
        """Enters the linear `name` of the given rows of `weights`."""
        columns = self._columns.get(weights[0], range(matrix_shape(weights[0])[1]))
        k = round_up(len(columns), self._multiple) if weights[0] in self._gated else len(columns)
        sources = tuple(source_name(weight) for weight in weights)
        fmt = self._common_format(name, sources)
        matrix = Matrix(sources, tuple(matrix_shape(w)[0] for w in weights), rows, columns, k, is_interleaved)
        _check_matrix(name, matrix, fmt)
        self.matrices[name] = matrix
        self.linears[name] = {"n": len(rows), "k": k, "format": fmt, "tensor": name}
        if fmt != "bf16":
            self.linears[name]["scales"] = f"{name}.scales"

    def _common_format(self, name: str, sources: Sequence[str]) -> str:
        formats = [self._linear_format(source) for source in sources]
        if len(set(formats)) > 1:
            pairs = ", ".join(f"{source} in {fmt}" for source, fmt in zip(sources, formats, strict=True))
            raise UnsupportedModel(f"Matrix {name} is made of {pairs}; target cuda needs one format for all of them.")
        return formats[0]

    def _concatenated(self, tensor: str, weights: Sequence[ir.Value], biases: Sequence[ir.Value | None]) -> str | None:
        if all(bias is None for bias in biases):
            return None
        return self._rows_of_vectors(tensor, weights, biases, self.matrices[tensor.removesuffix(".bias")].rows)

    def _rows_of_vectors(
        self, tensor: str, weights: Sequence[ir.Value], biases: Sequence[ir.Value | None], rows: RowMap
    ) -> str:
        """Name of the bias that has for each row of a linear the entry of its matrix's bias, else zero."""

        def compute() -> DenseArray:
            whole = [
                values_of(bias) if bias is not None else np.zeros(matrix_shape(weight)[0], np.float32)
                for weight, bias in zip(weights, biases, strict=True)
            ]
            return np.concatenate([*whole, np.zeros(1, np.float32)])[rows]  # row -1 is the zero at the end

        self.dense_jobs.setdefault(tensor, DenseJob(tensor, compute))
        return tensor


def _check_matrix(name: str, matrix: Matrix, fmt: str) -> None:
    """Raises UnsupportedModel for sizes that the kernels do not take."""
    n_multiple, k_multiple = _MULTIPLES[fmt]
    if matrix.n % n_multiple or matrix.k % k_multiple:
        raise UnsupportedModel(
            f"Matrix {name} is [{matrix.n}, {matrix.k}] on each rank; target cuda takes rows in multiples of "
            f"{n_multiple} and columns in multiples of {k_multiple} in {fmt}."
        )
    if fmt == "fp8_block" and (matrix.columns.start % FP8_BLOCK or matrix.scale_blocks() is None):
        raise UnsupportedModel(
            f"Matrix {name}: the share of a rank, or one of the matrices that it is made of, does not end where "
            f"a block of {FP8_BLOCK} x {FP8_BLOCK} weights does, so that one would need two scales; use fewer ranks."
        )


def _logit_bias(bias: ir.Value | None, taken: range, vocab_size: int) -> DenseArray:
    """The rank's part of the head's bias; -inf for tokens that do not exist, so that nothing ever chooses them."""
    whole = np.full(max(taken.stop, vocab_size), -np.inf, np.float32)
    whole[:vocab_size] = values_of(bias) if bias is not None else 0
    return whole[taken.start : taken.stop]
