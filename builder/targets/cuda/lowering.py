"""Lowering to the CUDA target: a fused, sharded and planned graph becomes one rank's plan, and the matrices of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from aotllm.builder.checkpoints.base import FP8_BLOCK
from aotllm.builder.config import ModelConfig
from aotllm.builder.passes import ArenaLayout, Partition, Stage, kv_layers, operands
from aotllm.builder.passes.arena import round_up
from aotllm.builder.passes.fused_ops import EMBEDDING, LM_HEAD, NORM_MOE, NORM_SWIGLU
from aotllm.builder.targets.cuda.integers import COLUMNS, INT_FORMATS, ROWS, SMALL_GROUP, common_group
from aotllm.builder.targets.cuda.matrix import Matrix, RowMap, interleaved, repeated, stacked
from aotllm.builder.targets.cuda.plan import LinearRecord, Plan, TacticRecord
from aotllm.builder.targets.cuda.tactics import tactics_for
from aotllm.builder.targets.cuts import weight_cuts
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
    stack_sources,
    stage_record,
    values_of,
)
from aotllm.builder.targets.plan import PLAN_VERSION, Op
from aotllm.errors import UnsupportedModel

HEAD_DIMS = (64, 96, 128, 256)
TILE = 32
"""Bytes of a row that the tensor cores take at a time, and what the width of gated values is a multiple of"""
_MULTIPLES = {
    "bf16": (16, 16),
    "fp8": (TILE, TILE),
    "fp8_block": (TILE, FP8_BLOCK),
    "int8": (TILE, TILE),
    "int4": (TILE, TILE),
}
"""Format → what rows and columns of a matrix must be a multiple of"""
_WAYS_OUT = {
    "bf16": "Target cpu takes it.",
    "fp8": "Leave --fp8 out, or build from a checkpoint in bf16.",
    "fp8_block": "Build from the model's checkpoint in bf16, which --fp8 quantizes by rows.",
    "int8": "Leave --quantize out, or build from a checkpoint in bf16.",
    "int4": "Leave --quantize out, or build from a checkpoint in bf16.",
}
"""Format → what to do with a model of one rank whose sizes the kernels do not take"""
_EXPERT_FORMATS = {"fp8_block": "bf16"}
"""Format → that of experts, where it is another one: the kernels that gather rows have no scales per block"""
EXPERTS_SM = 90
MAX_EXPERTS, MAX_TOP_K = 512, 16
"""Of a layer, and of a token"""


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
    source_group: Callable[[str], int | None],
    layout: ArenaLayout,
    sm: int,
    kv_dtype: str,
    tokens_per_block: int,
    max_seq_len: int,
    max_num_tokens: int,
    max_batch_size: int,
    stage: Stage | None = None,
) -> Lowered:
    """The plan of one rank of `model` for the CUDA target. Reads no weight.

    Args:
        model: as `run_passes` left it, with `layout` and the partition's number of ranks.
        config: of the same checkpoint.
        partition: which rank.
        linear_format: canonical name of a matrix → format of the linear that it becomes part of.
        source_group: canonical name of a matrix → columns that share a scale where it becomes int4 or int8; None =
            all of a row, and no zeros.
        layout: from `arena_layout`.
        sm: compute capability, 80 | 89 | 90.
        kv_dtype: bf16 | fp8.
        tokens_per_block: tokens of a cache block: 16, 32, 64 or 128.
        max_seq_len: longest sequence of the engine, in tokens.
        max_num_tokens: tokens of a step, the same that `run_passes` planned the arena for.
        max_batch_size: sequences of a step.
        stage: which ops; default: all.

    Raises:
        UnsupportedModel: the kernels do not take a size of the model.
        Internal: the graph was planned for other sizes, or holds an op that the target does not know.
    """
    arena, layers = checked_arena(model, max_num_tokens), kv_layers(model)
    for layer in layers:
        if layer.head_dim not in HEAD_DIMS:
            raise UnsupportedModel(
                f"Head size {layer.head_dim} is not supported by target cuda: it takes "
                f"{', '.join(map(str, HEAD_DIMS))}; target cpu takes any multiple of 8."
            )
        check_heads(layer, config, "cuda")
    if sm != EXPERTS_SM and any(node.op_type == NORM_MOE for node in model.graph):
        raise UnsupportedModel(
            f"Mixtures of experts need SM {EXPERTS_SM} on target cuda, the engine is for SM {sm}; build it with "
            f"--sm {EXPERTS_SM}."
        )
    lowering = _CudaLowering(model, partition, linear_format, source_group, layout)
    ops = [lowering.op(node) for node in (stage.nodes if stage is not None else model.graph)]
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
    if stage is not None and stage.size > 1:
        plan["pp"] = stage_record(stage)
    return Lowered(plan, lowering.matrices, tuple(lowering.dense_jobs.values()))


def _tactics(
    linears: Mapping[str, LinearRecord], ops: Sequence[Op], sm: int, max_num_tokens: int
) -> dict[str, list[TacticRecord]]:
    """Kernels of the linears that are multiplied by; an embedding's rows are only looked up, experts have their own."""
    multiplied = {op["linear"] for op in ops if "linear" in op and op["op"] != EMBEDDING}
    multiplied |= {op["gate_up"] for op in ops if op["op"] == NORM_SWIGLU}
    return {
        name: tactics_for(sm, record["format"], record["n"], record["k"], max_num_tokens)
        for name, record in linears.items()
        if name in multiplied
    }


class _CudaLowering(Lowering):
    """A linear is one matrix in one format; each weight and bias is cut to what the rank holds of it."""

    target = "cuda"

    def __init__(
        self,
        model: ir.Model,
        partition: Partition,
        linear_format: Callable[[str], str],
        source_group: Callable[[str], int | None],
        layout: ArenaLayout,
    ) -> None:
        super().__init__(model, partition)
        self._multiple = layout.gated_multiple
        self._linear_format = linear_format
        self._source_group = source_group
        self._vocabulary = partition.vocabulary(self._vocabulary_multiple())
        """Tokens of the rank, those that do not exist included"""
        self._cuts = weight_cuts(model, partition, self._vocabulary)
        self.linears: dict[str, LinearRecord] = {}
        self.matrices: dict[str, Matrix] = {}

    def linear(self, *weights: ir.Value, name: str | None = None) -> str:
        """See `Lowering`. Columns beyond those of the weight are zeros, as wide as the buffer that they meet."""
        name = name or engine_name(source_name(weights[0]))
        if name not in self.linears:
            counts = [matrix_shape(weight)[0] for weight in weights]
            rows = stacked([self.rows_of(weight) for weight in weights], counts)
            self._add(name, weights, rows)
        return name

    def gate_and_up(self, inputs: Mapping[str, ir.Value]) -> Op:
        """One linear, the rows of gate and up in turns of 8."""
        gate, up = inputs["gate_weight"], inputs["up_weight"]
        name = engine_name(source_name(gate)).removesuffix("gate") + "gate_up"
        taken, width = self.rows_of(gate), round_up(len(self.rows_of(gate)), self._multiple)
        rows = interleaved(taken, matrix_shape(gate)[0], width)
        self._add(name, (gate, up), rows, is_interleaved=True)
        biases = [inputs.get("gate_bias"), inputs.get("up_bias")]
        bias = self._rows_of_vectors(f"{name}.bias", (gate, up), biases, rows) if any(biases) else None
        return {"gate_up": name, "gate_up_bias": bias}

    def experts(self, inputs: Mapping[str, ir.Value]) -> Op:
        """Two linears of all experts: `gate_up`, in each the rows of gate and up in turns of 8, and `down`."""
        gate, up, down = (stack_sources(inputs[f"{part}_weight"]) for part in ("gate", "up", "down"))
        shape = inputs["gate_weight"].shape
        assert shape is not None
        experts, neurons, hidden = shape.numpy()
        if experts > MAX_EXPERTS:
            raise UnsupportedModel(
                f"Target cuda takes up to {MAX_EXPERTS} experts in a layer, the model has {experts}."
            )
        taken = self._partition.expert_neurons
        width = round_up(len(taken), self._multiple)
        stem = engine_name(str(inputs["gate_weight"].name)).removesuffix("gate")
        pairs = tuple(source for both in zip(gate, up, strict=True) for source in both)
        rows = repeated(interleaved(taken, neurons, width), experts, 2 * neurons)
        both = Matrix(pairs, (neurons,) * len(pairs), rows, range(hidden), hidden, is_interleaved=True)
        self._enter(f"{stem}gate_up", both, hidden, _EXPERT_FORMATS)
        whole = repeated(np.arange(hidden), experts, hidden)
        self._enter(f"{stem}down", Matrix(down, (hidden,) * experts, whole, taken, width), neurons, _EXPERT_FORMATS)
        if self.linears[f"{stem}gate_up"]["format"] != self.linears[f"{stem}down"]["format"]:
            raise UnsupportedModel(f"Matrices {stem}* are in several formats; target cuda needs one for all of them.")
        if self.linears[f"{stem}down"]["format"] in INT_FORMATS and hidden % ROWS:
            raise UnsupportedModel(
                f"Matrices {stem}* are integers and the model's width is {hidden}; target cuda takes multiples of "
                f"{ROWS}: build it from a checkpoint that is not quantized, without --quantize."
            )
        return {"gate_up": f"{stem}gate_up", "down": f"{stem}down"}

    def _norm_moe(self, node: ir.Node, inputs: dict[str, ir.Value]) -> Op:
        record = super()._norm_moe(node, inputs)
        if record["top_k"] > MAX_TOP_K:
            raise UnsupportedModel(
                f"Target cuda takes up to {MAX_TOP_K} experts for a token, the model wants {record['top_k']}."
            )
        return {**record, "all_reduce": True if self._partition.size > 1 else None}

    def _lm_head(self, node: ir.Node, inputs: dict[str, ir.Value]) -> Op:
        record = super()._lm_head(node, {name: value for name, value in inputs.items() if name != "bias"})
        bias, taken, size = inputs.get("bias"), self.rows_of(inputs["weight"]), record["vocab_size"]
        record["vocab_size"] = self.vocab_size
        if bias is None and size == self.vocab_size:
            return record
        if record["softcap"] and size < self.vocab_size:
            way_out = "use fewer ranks" if self._partition.size > 1 else "take target cpu"
            raise UnsupportedModel(
                f"A vocabulary of {size} tokens would be padded to {self.vocab_size} with --tp {self._partition.size}; "
                f"target cuda cannot do that where logits are capped. Pad the checkpoint, or {way_out}."
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

    def rows_of(self, weight: ir.Value) -> range:
        """See `Lowering`."""
        return self._cuts.rows.get(weight, range(matrix_shape(weight)[0]))

    def _add(self, name: str, weights: Sequence[ir.Value], rows: RowMap, is_interleaved: bool = False) -> None:
        """Enters the linear `name` of the given rows of `weights`."""
        columns = self._cuts.columns.get(weights[0], range(matrix_shape(weights[0])[1]))
        k = round_up(len(columns), self._multiple) if weights[0] in self._cuts.gated else len(columns)
        sources = tuple(source_name(weight) for weight in weights)
        counts = tuple(matrix_shape(weight)[0] for weight in weights)
        self._enter(name, Matrix(sources, counts, rows, columns, k, is_interleaved), matrix_shape(weights[0])[1])

    def _enter(self, name: str, matrix: Matrix, source_k: int, formats: Mapping[str, str] | None = None) -> None:
        """Enters the linear `name`.

        Args:
            name: of the linear.
            matrix: its rows and columns.
            source_k: columns of its sources.
            formats: format of the sources → that of the linear, where it is another one.
        """
        fmt = self._common_format(name, matrix.sources)
        fmt = (formats or {}).get(fmt, fmt)
        _check_matrix(name, matrix, fmt, self._partition.size)
        self.matrices[name] = matrix
        self.linears[name] = {"n": matrix.n, "k": matrix.k, "format": fmt, "tensor": name}
        if fmt != "bf16":
            self.linears[name]["scales"] = f"{name}.scales"
        group = self._group(name, matrix.sources, matrix, source_k) if fmt in INT_FORMATS else None
        if group is not None:
            self.linears[name].update({"zeros": f"{name}.zeros", "group": group})

    def _group(self, name: str, sources: Sequence[str], matrix: Matrix, k: int) -> int | None:
        """Columns of the engine that share scale and zero; None = all of a row."""
        groups = {self._source_group(source) for source in sources}
        if groups == {None}:
            return None
        allowed = (COLUMNS, SMALL_GROUP) if self.linears[name]["format"] == "int4" else (SMALL_GROUP,)
        found = [common_group(group or k, k, matrix.columns, allowed) for group in groups]
        if None in found:
            raise UnsupportedModel(
                f"Matrix {name}: the columns {matrix.columns.start} to {matrix.columns.stop} of a rank begin inside a "
                f"group of {min(group or k for group in groups)}; target cuda takes groups of whole multiples of "
                f"{SMALL_GROUP} columns. Use fewer ranks."
            )
        return min(group for group in found if group is not None)

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


def _check_matrix(name: str, matrix: Matrix, fmt: str, ranks: int) -> None:
    """Raises UnsupportedModel for sizes that the kernels do not take."""
    way_out = "Use fewer ranks." if ranks > 1 else _WAYS_OUT[fmt]
    n_multiple, k_multiple = _MULTIPLES[fmt]
    if matrix.n % n_multiple or matrix.k % k_multiple:
        raise UnsupportedModel(
            f"Matrix {name} is [{matrix.n}, {matrix.k}] on each rank; target cuda takes rows in multiples of "
            f"{n_multiple} and columns in multiples of {k_multiple} in {fmt}. {way_out}"
        )
    if fmt == "fp8_block" and (matrix.columns.start % FP8_BLOCK or matrix.scale_blocks() is None):
        raise UnsupportedModel(
            f"Matrix {name}: the share of a rank, or one of the matrices that it is made of, does not end where "
            f"a block of {FP8_BLOCK} x {FP8_BLOCK} weights does, so that one would need two scales. {way_out}"
        )


def _logit_bias(bias: ir.Value | None, taken: range, vocab_size: int) -> DenseArray:
    """The rank's part of the head's bias; -inf for tokens that do not exist, so that nothing ever chooses them."""
    whole = np.full(max(taken.stop, vocab_size), -np.inf, np.float32)
    whole[:vocab_size] = values_of(bias) if bias is not None else 0
    return whole[taken.start : taken.stop]
