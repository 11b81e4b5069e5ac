"""`build`: checkpoint → traced graph → passes → plan → engine bundle."""

from __future__ import annotations

import json
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aotllm
from aotllm.builder.checkpoints import open_checkpoint
from aotllm.builder.checkpoints.base import FLOAT_STORAGE, Checkpoint, TokenizerAssets
from aotllm.builder.config import ModelConfig
from aotllm.builder.graph import save_structure
from aotllm.builder.identity import model_identity
from aotllm.builder.models import trace
from aotllm.builder.options import BuildOptions
from aotllm.builder.passes import run_passes
from aotllm.builder.targets.cpu.lowering import Lowered, lower
from aotllm.builder.targets.cpu.packing import pack_segment, segment_format, segment_nbytes
from aotllm.builder.targets.cpu.plan import kv_bytes_per_token
from aotllm.engines.bundle import (
    CHAT_TEMPLATE_FILE,
    GENERATION_CONFIG_FILE,
    GRAPH_FILE,
    TOKENIZER_FILE,
    file_sha256,
    staged_folder,
)
from aotllm.engines.manifest import FileEntry, Limits, Manifest, Memory, Model, Parallel, Precision, Target
from aotllm.engines.rank_file import RankFileWriter, TensorSpec
from aotllm.tokenization import Tokenizer

RANK_FILE = "rank0.engine"


@dataclass(frozen=True)
class BuildProgress:
    """News of a running build."""

    stage: str
    """read | compile | pack | write"""
    done: int
    total: int
    """Units of the stage: tensors while packing, else 1"""


@dataclass(frozen=True)
class BuildReport:
    """What a build made."""

    path: Path
    manifest: Manifest
    bytes: int
    """Of all files of the bundle"""
    seconds: float
    stage_seconds: dict[str, float]


class _Stages:
    """Times the stages and passes them on to the caller's progress display."""

    def __init__(self, progress: Callable[[BuildProgress], None] | None) -> None:
        self._progress = progress
        self._begin = time.perf_counter()
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def report(self, stage: str, done: int = 1, total: int = 1) -> None:
        now = time.perf_counter()
        self.seconds[stage] += now - self._begin
        self._begin = now
        if self._progress is not None:
            self._progress(BuildProgress(stage, done, total))


def build(
    model: str | Path,
    output: str | Path,
    options: BuildOptions | None = None,
    progress: Callable[[BuildProgress], None] | None = None,
) -> BuildReport:
    """Builds an engine from a checkpoint.

    The engine is staged beside `output` and renamed into place: a failed build leaves nothing behind. Peak memory is a
    few of the largest tensors, since weights stream from the checkpoint to the engine one by one.

    Args:
        model: a Hugging Face folder, a GGUF file (any part of a split one), or `hf:org/name`.
        output: the engine folder to make.
        options: see `BuildOptions`.
        progress: called as the build goes on, from this thread.

    Raises:
        CheckpointError, UnsupportedModel: the model cannot be read or is not known.
        InvalidRequest: an option is out of range.
        EngineError: `output` is in the way or cannot be written.
    """
    options = options or BuildOptions()
    options.validate()
    begin = time.perf_counter()
    stages = _Stages(progress)
    with open_checkpoint(model) as checkpoint, staged_folder(Path(output), options.force) as stage:
        tokenizer = checkpoint.tokenizer()
        Tokenizer(tokenizer.tokenizer_json, tokenizer.chat_template)  # what cannot be loaded is refused here, not later
        stages.report("read")
        graph, lowered = _compile(checkpoint, options)
        stages.report("compile")
        rank_digest = _write_rank(stage / RANK_FILE, checkpoint, lowered, stages)
        _write_companions(stage, tokenizer, graph)
        manifest = _manifest(stage, checkpoint, tokenizer, lowered, options, rank_digest)
        manifest.write(stage)
        stages.report("write")
        total_bytes = sum(file.stat().st_size for file in stage.iterdir())
    return BuildReport(Path(output), manifest, total_bytes, time.perf_counter() - begin, dict(stages.seconds))


def _compile(checkpoint: Checkpoint, options: BuildOptions) -> tuple[Any, Lowered]:
    """Traces and fuses the model and lowers it to a plan; no weight is read."""
    config = checkpoint.config
    max_seq_len = options.max_seq_len or config.max_position_embeddings
    graph = trace(checkpoint, max_seq_len)
    run_passes(graph, config, max_num_tokens=options.max_num_tokens)
    tensors = checkpoint.tensors()
    lowered = lower(
        graph,
        config,
        max_seq_len=max_seq_len,
        max_num_tokens=options.max_num_tokens,
        max_batch_size=options.max_batch_size,
        kv_dtype=_kv_dtype(checkpoint, options),
        tokens_per_block=options.tokens_per_block,
        segment_format=lambda name: segment_format(tensors[name].storage, options.dtype),
    )
    return graph, lowered


def _kv_dtype(checkpoint: Checkpoint, options: BuildOptions) -> str:
    if options.kv_cache_dtype != "auto":
        return options.kv_cache_dtype
    storages = {t.storage for t in checkpoint.tensors().values() if len(t.shape) > 1}
    dtypes = {options.dtype if s in FLOAT_STORAGE and options.dtype != "auto" else s for s in storages}
    return "f32" if dtypes == {"f32"} else "f16"


def _formats(lowered: Lowered) -> dict[str, str]:
    """Format of each packed tensor."""
    return {s["tensor"]: s["format"] for linear in lowered.plan["linears"].values() for s in linear["segments"]}


def _write_rank(path: Path, checkpoint: Checkpoint, lowered: Lowered, stages: _Stages) -> str:
    """Streams all tensors into the rank file; returns the file's SHA-256."""
    formats = _formats(lowered)
    dense = [(job.tensor, job.compute()) for job in lowered.dense_jobs]
    specs = {
        job.tensor: TensorSpec("U8", (segment_nbytes(formats[job.tensor], job.n, job.k),)) for job in lowered.pack_jobs
    }
    specs |= {name: TensorSpec("F32", array.shape) for name, array in dense}
    infos = checkpoint.tensors()
    total = len(lowered.pack_jobs)
    with RankFileWriter(path, specs, {"plan": json.dumps(lowered.plan, separators=(",", ":"))}) as writer:
        for done, job in enumerate(lowered.pack_jobs, 1):
            stored = checkpoint.read_stored(job.source)
            packed = pack_segment(stored, infos[job.source].storage, job.n, job.k, formats[job.tensor])
            writer.write(job.tensor, packed)
            stages.report("pack", done, total)
        for name, array in dense:
            writer.write(name, array)
        return writer.close()


def _write_companions(stage: Path, tokenizer: TokenizerAssets, graph: Any) -> None:
    (stage / TOKENIZER_FILE).write_text(tokenizer.tokenizer_json, encoding="utf-8")
    if tokenizer.chat_template is not None:
        (stage / CHAT_TEMPLATE_FILE).write_text(tokenizer.chat_template, encoding="utf-8")
    (stage / GENERATION_CONFIG_FILE).write_text(json.dumps(tokenizer.generation_config, indent=2), encoding="utf-8")
    save_structure(graph, stage / GRAPH_FILE)


def _eos_token_ids(config: ModelConfig, tokenizer: TokenizerAssets) -> tuple[int, ...]:
    """All ids that end a generation: those of the configuration, then those that only the tokenizer's files name."""
    named = tokenizer.generation_config.get("eos_token_id") or ()
    ids = [*config.eos_token_ids, *([named] if isinstance(named, int) else named)]
    return tuple(dict.fromkeys(i for i in ids if 0 <= i < config.vocab_size))


def _manifest(
    stage: Path,
    checkpoint: Checkpoint,
    tokenizer: TokenizerAssets,
    lowered: Lowered,
    options: BuildOptions,
    rank_digest: str,
) -> Manifest:
    config, plan = checkpoint.config, lowered.plan
    formats = _formats(lowered)
    format_bytes: Counter[str] = Counter()
    for job in lowered.pack_jobs:
        format_bytes[formats[job.tensor]] += segment_nbytes(formats[job.tensor], job.n, job.k)
    tensors, kv = checkpoint.tensors(), plan["kv"]
    digests = {RANK_FILE: rank_digest}
    files = {
        file.name: FileEntry(bytes=file.stat().st_size, sha256=digests.get(file.name) or file_sha256(file))
        for file in sorted(stage.iterdir())
    }
    return Manifest(
        builder_version=aotllm.__version__,
        model=Model(
            name=config.name or f"{config.architecture} model",
            architecture=config.architecture,
            identity=model_identity(checkpoint),
            num_parameters=sum(math.prod(tensors[job.source].shape) for job in lowered.pack_jobs),
        ),
        target=Target(name=options.target, requires=("avx2", "fma", "f16c", "bmi2")),
        precision=Precision(dtype=options.dtype, kv_cache_dtype=kv["dtype"], weight_formats=dict(format_bytes)),
        parallel=Parallel(tp=options.tp, pp=options.pp),
        limits=Limits(
            max_seq_len=plan["max_seq_len"],
            max_num_tokens=plan["max_num_tokens"],
            max_batch_size=plan["max_batch_size"],
            tokens_per_block=kv["tokens_per_block"],
        ),
        memory=Memory(
            weights=sum(format_bytes.values()), arena=plan["arena_bytes"], kv_per_token=kv_bytes_per_token(kv)
        ),
        bos_token_id=config.bos_token_id,
        eos_token_ids=_eos_token_ids(config, tokenizer),
        bos_token=tokenizer.bos_token,
        eos_token=tokenizer.eos_token,
        build_flags=options.flags(),
        files=files,
    )
