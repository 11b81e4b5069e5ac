"""The CPU target: from a checkpoint to the program of its one rank."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy.typing as npt

from aotllm.builder.checkpoints.base import FLOAT_STORAGE, Checkpoint
from aotllm.builder.models import trace
from aotllm.builder.options import BuildOptions
from aotllm.builder.passes import run_passes
from aotllm.builder.targets.cpu.lowering import PackJob, lower
from aotllm.builder.targets.cpu.packing import pack_segment, segment_format, segment_nbytes
from aotllm.builder.targets.cpu.packing_formats import PANEL_ROWS
from aotllm.builder.targets.program import CompiledModel, RankProgram, TensorJob, ready
from aotllm.engines.rank_file import TensorSpec

_PART_WEIGHTS = 1 << 23
REQUIRES = ("avx2", "fma", "f16c", "bmi2")


def compile_cpu(checkpoint: Checkpoint, options: BuildOptions) -> CompiledModel:
    """Traces, fuses and lowers the model. Of its weights only the small ones are read.

    Raises:
        CheckpointError, UnsupportedModel: the model cannot be read, or the target cannot run it.
    """
    config, limits = checkpoint.config, options.shape_limits()
    max_seq_len = options.max_seq_len or config.max_position_embeddings
    graph = trace(checkpoint, max_seq_len)
    run_passes(graph, config, max_num_tokens=limits.max_num_tokens)
    tensors = checkpoint.tensors()
    lowered = lower(
        graph,
        config,
        max_seq_len=max_seq_len,
        max_num_tokens=limits.max_num_tokens,
        max_batch_size=limits.max_batch_size,
        kv_dtype=_kv_dtype(checkpoint, options),
        tokens_per_block=limits.tokens_per_block,
        segment_format=lambda name: segment_format(tensors[name].storage, options.dtype),
    )
    formats = {s["tensor"]: s["format"] for linear in lowered.plan["linears"].values() for s in linear["segments"]}
    packed = [_segment_job(checkpoint, job, formats[job.tensor]) for job in lowered.pack_jobs]
    dense = [ready(job.tensor, job.compute()) for job in lowered.dense_jobs]
    return CompiledModel(graph, (RankProgram(lowered.plan, (*packed, *dense)),), REQUIRES)


def _segment_job(checkpoint: Checkpoint, job: PackJob, fmt: str) -> TensorJob:
    spec = TensorSpec("U8", (segment_nbytes(fmt, job.n, job.k),))
    step = max(PANEL_ROWS, _PART_WEIGHTS // job.k // PANEL_ROWS * PANEL_ROWS)
    parts = tuple(
        partial(_pack, checkpoint, job, fmt, first, min(first + step, job.n)) for first in range(0, job.n, step)
    )
    return TensorJob(job.tensor, spec, parts, fmt)


def _pack(checkpoint: Checkpoint, job: PackJob, fmt: str, first: int, last: int) -> npt.NDArray[Any]:
    rows = checkpoint.read_stored(job.source)[first:last]
    return pack_segment(rows, checkpoint.tensors()[job.source].storage, last - first, job.k, fmt)


def _kv_dtype(checkpoint: Checkpoint, options: BuildOptions) -> str:
    if options.kv_cache_dtype != "auto":
        return options.kv_cache_dtype
    storages = {t.storage for t in checkpoint.tensors().values() if len(t.shape) > 1}
    dtypes = {options.dtype if s in FLOAT_STORAGE and options.dtype != "auto" else s for s in storages}
    return "f32" if dtypes == {"f32"} else "f16"
