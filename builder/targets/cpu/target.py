"""The CPU target: from a checkpoint to the programs of its ranks."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from aotllm.builder.checkpoints.base import FLOAT_STORAGE, INT_STORAGE, Checkpoint, TensorInfo
from aotllm.builder.checkpoints.expected import EMBEDDING, LM_HEAD
from aotllm.builder.models import trace
from aotllm.builder.numerics import F32, stored_values
from aotllm.builder.options import BuildOptions
from aotllm.builder.passes import Partition, cut_stages, run_passes
from aotllm.builder.targets.cpu.lowering import PackJob, lower
from aotllm.builder.targets.cpu.packing import (
    column_step,
    integer_format,
    pack_integers,
    pack_quantized,
    pack_segment,
    panel_bytes,
    quantized_format,
    segment_format,
    segment_nbytes,
    stored_columns,
)
from aotllm.builder.targets.cpu.packing_formats import BLOCK, BLOCK_FORMATS, PANEL_ROWS
from aotllm.builder.targets.lowering import weight_bytes
from aotllm.builder.targets.program import CompiledModel, RankProgram, TensorJob, ready
from aotllm.engines.rank_file import TensorSpec
from aotllm.errors import UnsupportedModel

_PART_WEIGHTS = 1 << 23
REQUIRES = ("avx2", "fma", "f16c", "bmi2")


def compile_cpu(checkpoint: Checkpoint, options: BuildOptions) -> CompiledModel:
    """Traces, fuses, shards and lowers the model. Of its weights only the small ones are read.

    Raises:
        CheckpointError, UnsupportedModel: the model cannot be read, or the target cannot run it.
    """
    config, limits = checkpoint.config, options.shape_limits()
    max_seq_len = options.max_seq_len or config.max_position_embeddings
    graph = trace(checkpoint, max_seq_len)
    run_passes(graph, config, max_num_tokens=limits.max_num_tokens, tp=options.tp)
    formats: dict[str, _SourceFormat] = {}

    def format_of(source: str) -> str:
        if source not in formats:
            formats[source] = _source_format(checkpoint, checkpoint.tensors()[source], options)
        return formats[source].fmt

    def nbytes(source: str, n: int, k: int) -> int:
        return segment_nbytes(format_of(source), n, k)

    ranks = []
    stages = cut_stages(graph, options.pp, lambda weight: weight_bytes(weight, nbytes))
    for stage, rank in itertools.product(stages, range(options.tp)):
        lowered = lower(
            graph,
            config,
            partition=Partition(config, options.tp, rank),
            stage=stage,
            max_seq_len=max_seq_len,
            max_num_tokens=limits.max_num_tokens,
            max_batch_size=limits.max_batch_size,
            kv_dtype=_kv_dtype(checkpoint, options),
            tokens_per_block=limits.tokens_per_block,
            segment_format=format_of,
        )
        packed = [_segment_job(checkpoint, job, formats[job.source]) for job in lowered.pack_jobs]
        ranks.append(RankProgram(lowered.plan, (*packed, *(ready(j.tensor, j.compute()) for j in lowered.dense_jobs))))
    return CompiledModel(graph, tuple(ranks), REQUIRES)


@dataclass(frozen=True)
class _SourceFormat:
    """What a matrix of the checkpoint becomes."""

    fmt: str
    quantized: bool
    """By the build; else `fmt` holds the checkpoint's values, narrowed to `--dtype` where they are floats"""


def _source_format(checkpoint: Checkpoint, tensor: TensorInfo, options: BuildOptions) -> _SourceFormat:
    """Weights that take no more as they are than quantized stay as they are."""
    stored = _stored_format(checkpoint, tensor, options.dtype)
    wanted = _wanted_format(tensor.name, options)
    k = tensor.shape[1]
    if wanted is None or (k % BLOCK == 0 and panel_bytes(stored, k) <= panel_bytes(wanted, k)):
        return _SourceFormat(stored, False)
    if k % BLOCK:
        raise UnsupportedModel(
            f"Tensor {tensor.name} has {k} columns; --quantize on target cpu takes multiples of {BLOCK}. "
            "Leave --quantize out."
        )
    return _SourceFormat(wanted, True)


def _stored_format(checkpoint: Checkpoint, tensor: TensorInfo, dtype: str) -> str:
    if tensor.storage in INT_STORAGE:
        rows = range(tensor.shape[0])
        return integer_format(checkpoint.integers(tensor.name, rows, with_codes=False), tensor.storage)
    return segment_format(tensor.storage, dtype)


def _wanted_format(source: str, options: BuildOptions) -> str | None:
    """None where nothing is quantized. The embedding and the head have 8 bits: the head decides which token wins."""
    quantization = options.quantization()
    if quantization is None:
        return None
    kept = {EMBEDDING} if options.quantize_lm_head else {EMBEDDING, LM_HEAD}
    method = "int8" if source in kept else quantization.method
    return quantized_format(method, quantization.group or BLOCK, quantization.symmetric)


def _segment_job(checkpoint: Checkpoint, job: PackJob, form: _SourceFormat) -> TensorJob:
    _check_columns(job, checkpoint.tensors()[job.source], form)
    spec = TensorSpec("U8", (segment_nbytes(form.fmt, job.n, job.k),))
    step = max(PANEL_ROWS, _PART_WEIGHTS // job.k // PANEL_ROWS * PANEL_ROWS)
    parts = tuple(
        partial(_pack, checkpoint, job, form, job.rows[first : first + step]) for first in range(0, job.n, step)
    )
    return TensorJob(job.tensor, spec, parts, form.fmt)


def _check_columns(job: PackJob, info: TensorInfo, form: _SourceFormat) -> None:
    """Raises UnsupportedModel where a rank's share begins or ends within a block of the checkpoint, or a group."""
    if form.quantized:
        step: int = BLOCK_FORMATS[form.fmt].span
    else:
        step = info.shape[1] if info.storage in INT_STORAGE else column_step(info.storage)
    if job.columns.start % step == 0 and (job.columns.stop % step == 0 or job.columns.stop == info.shape[1]):
        return
    if form.quantized:
        raise UnsupportedModel(
            f"Tensor {job.source} would be quantized in groups of {step} columns; a rank's share of {job.k} of its "
            f"{info.shape[1]} columns would cut them. Use fewer ranks (--tp) or smaller groups (--quantize-group)."
        )
    raise UnsupportedModel(
        f"Tensor {job.source} is stored as {info.storage}, in blocks of {step} columns; a rank's share of {job.k} of "
        f"its {info.shape[1]} columns would cut them. Use fewer ranks (--tp), or a checkpoint in another format."
    )


def _pack(checkpoint: Checkpoint, job: PackJob, form: _SourceFormat, taken: range) -> npt.NDArray[Any]:
    storage, fmt = checkpoint.tensors()[job.source].storage, form.fmt
    if form.quantized:
        values = _values(checkpoint, job.source, taken)[:, job.columns.start : job.columns.stop]
        return pack_quantized(np.ascontiguousarray(values), job.source, fmt)
    if storage in INT_STORAGE:
        return pack_integers(checkpoint.integers(job.source, taken), job.source, fmt)
    rows = stored_columns(checkpoint.read_stored(job.source)[taken.start : taken.stop], storage, job.columns)
    return pack_segment(rows, storage, len(taken), job.k, fmt)


def _values(checkpoint: Checkpoint, source: str, rows: range) -> F32:
    """Whole rows, exactly."""
    storage = checkpoint.tensors()[source].storage
    if storage in INT_STORAGE:
        return checkpoint.integers(source, rows).values()
    return stored_values(checkpoint.read_stored(source)[rows.start : rows.stop], storage)


def _kv_dtype(checkpoint: Checkpoint, options: BuildOptions) -> str:
    if options.kv_cache_dtype != "auto":
        return options.kv_cache_dtype
    if options.quantize is not None:
        return "int16"
    storages = {t.storage for t in checkpoint.tensors().values() if len(t.shape) > 1}
    dtypes = {options.dtype if s in FLOAT_STORAGE and options.dtype != "auto" else s for s in storages}
    return "f32" if dtypes == {"f32"} else "int16"
