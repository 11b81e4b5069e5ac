"""The CPU target: from a checkpoint to the programs of its ranks."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import numpy.typing as npt

from aotllm.builder.checkpoints.base import FLOAT_STORAGE, INT_STORAGE, Checkpoint, TensorInfo
from aotllm.builder.models import trace
from aotllm.builder.options import BuildOptions
from aotllm.builder.passes import Partition, cut_stages, run_passes
from aotllm.builder.targets.cpu.lowering import PackJob, lower
from aotllm.builder.targets.cpu.packing import (
    column_step,
    integer_format,
    pack_integers,
    pack_segment,
    segment_format,
    segment_nbytes,
    stored_columns,
)
from aotllm.builder.targets.cpu.packing_formats import PANEL_ROWS
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
    tensors = checkpoint.tensors()

    def format_of(source: str) -> str:
        return _format(checkpoint, tensors[source], options.dtype)

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
        formats = {s["tensor"]: s["format"] for linear in lowered.plan["linears"].values() for s in linear["segments"]}
        packed = [_segment_job(checkpoint, job, formats[job.tensor]) for job in lowered.pack_jobs]
        ranks.append(RankProgram(lowered.plan, (*packed, *(ready(j.tensor, j.compute()) for j in lowered.dense_jobs))))
    return CompiledModel(graph, tuple(ranks), REQUIRES)


def _format(checkpoint: Checkpoint, tensor: TensorInfo, dtype: str) -> str:
    if tensor.storage in INT_STORAGE:
        rows = range(tensor.shape[0])
        return integer_format(checkpoint.integers(tensor.name, rows, with_codes=False), tensor.storage)
    return segment_format(tensor.storage, dtype)


def _segment_job(checkpoint: Checkpoint, job: PackJob, fmt: str) -> TensorJob:
    _check_columns(job, checkpoint.tensors()[job.source])
    spec = TensorSpec("U8", (segment_nbytes(fmt, job.n, job.k),))
    step = max(PANEL_ROWS, _PART_WEIGHTS // job.k // PANEL_ROWS * PANEL_ROWS)
    parts = tuple(
        partial(_pack, checkpoint, job, fmt, job.rows[first : first + step]) for first in range(0, job.n, step)
    )
    return TensorJob(job.tensor, spec, parts, fmt)


def _check_columns(job: PackJob, info: TensorInfo) -> None:
    """Raises UnsupportedModel where a rank's share begins or ends within a block of the checkpoint."""
    step = info.shape[1] if info.storage in INT_STORAGE else column_step(info.storage)
    if job.columns.start % step == 0 and (job.columns.stop % step == 0 or job.columns.stop == info.shape[1]):
        return
    raise UnsupportedModel(
        f"Tensor {job.source} is stored as {info.storage}, in blocks of {step} columns; a rank's share of {job.k} of "
        f"its {info.shape[1]} columns would cut them. Use fewer ranks (--tp), or a checkpoint in another format."
    )


def _pack(checkpoint: Checkpoint, job: PackJob, fmt: str, taken: range) -> npt.NDArray[Any]:
    storage = checkpoint.tensors()[job.source].storage
    if storage in INT_STORAGE:
        return pack_integers(checkpoint.integers(job.source, taken), job.source, fmt)
    rows = stored_columns(checkpoint.read_stored(job.source)[taken.start : taken.stop], storage, job.columns)
    return pack_segment(rows, storage, len(taken), job.k, fmt)


def _kv_dtype(checkpoint: Checkpoint, options: BuildOptions) -> str:
    if options.kv_cache_dtype != "auto":
        return options.kv_cache_dtype
    storages = {t.storage for t in checkpoint.tensors().values() if len(t.shape) > 1}
    dtypes = {options.dtype if s in FLOAT_STORAGE and options.dtype != "auto" else s for s in storages}
    return "f32" if dtypes == {"f32"} else "f16"
