"""`build`: checkpoint → traced graph → passes → plan → engine bundle."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aotllm
from aotllm.builder.checkpoints import open_checkpoint
from aotllm.builder.checkpoints.base import Checkpoint, TokenizerAssets
from aotllm.builder.compact_tokens import write_compact_tokens
from aotllm.builder.config import ModelConfig
from aotllm.builder.graph import save_structure
from aotllm.builder.identity import model_identity
from aotllm.builder.options import BuildOptions
from aotllm.builder.rank_writer import write_rank
from aotllm.builder.targets import COMPILERS
from aotllm.builder.targets.plan import kv_bytes_per_token
from aotllm.builder.targets.program import CompiledModel, RankProgram
from aotllm.engines.bundle import (
    CHAT_TEMPLATE_FILE,
    GENERATION_CONFIG_FILE,
    GRAPH_FILE,
    TOKENIZER_FILE,
    TOKENS_FILE,
    rank_file_name,
    staged_folder,
)
from aotllm.engines.manifest import FileEntry, Limits, Manifest, Memory, Model, Parallel, Precision, Target
from aotllm.engines.verification import file_sha256
from aotllm.tokenization import Tokenizer


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

    The engine is staged beside `output` and renamed into place: a failed build leaves nothing behind. Peak memory is
    far below the model's size, since weights stream from the checkpoint to the engine piece by piece.

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
        compiled = COMPILERS[options.target](checkpoint, options)
        stages.report("compile")
        identity = model_identity(checkpoint)
        rank_digests = _write_ranks(stage, compiled, _build_id(identity, options), stages)
        _write_companions(stage, tokenizer, compiled.graph)
        manifest = _manifest(stage, checkpoint, identity, tokenizer, compiled, options, rank_digests)
        manifest.write(stage)
        stages.report("write")
        total_bytes = sum(file.stat().st_size for file in stage.iterdir())
    return BuildReport(Path(output), manifest, total_bytes, time.perf_counter() - begin, dict(stages.seconds))


def _build_id(identity: str, options: BuildOptions) -> str:
    """What the ranks of this build have in common, and no others: they are only run together."""
    return hashlib.sha256("\n".join([identity, aotllm.__version__, *options.flags()]).encode()).hexdigest()


def _write_ranks(stage: Path, compiled: CompiledModel, build_id: str, stages: _Stages) -> dict[str, str]:
    """Packs and writes the file of every rank; returns their digests by file name."""
    shared_id = build_id if len(compiled.ranks) > 1 else None
    jobs = [job for program in compiled.ranks for job in program.tensors if job.weight_format is not None]
    packed = itertools.count(1)
    return {
        name: write_rank(
            stage / name, program, lambda: stages.report("pack", next(packed), len(jobs)), build_id=shared_id
        )
        for name, program in ((rank_file_name(rank), program) for rank, program in enumerate(compiled.ranks))
    }


def _write_companions(stage: Path, tokenizer: TokenizerAssets, graph: Any) -> None:
    (stage / TOKENIZER_FILE).write_text(tokenizer.tokenizer_json, encoding="utf-8")
    write_compact_tokens(tokenizer.tokenizer_json, stage / TOKENS_FILE)
    if tokenizer.chat_template is not None:
        (stage / CHAT_TEMPLATE_FILE).write_text(tokenizer.chat_template, encoding="utf-8")
    (stage / GENERATION_CONFIG_FILE).write_text(json.dumps(tokenizer.generation_config, indent=2), encoding="utf-8")
    save_structure(graph, stage / GRAPH_FILE)


def _eos_token_ids(config: ModelConfig, tokenizer: TokenizerAssets) -> tuple[int, ...]:
    """All ids that end a generation: those of the configuration, then those that only the tokenizer's files name."""
    named = tokenizer.generation_config.get("eos_token_id") or ()
    ids = [*config.eos_token_ids, *([named] if isinstance(named, int) else named)]
    return tuple(dict.fromkeys(i for i in ids if 0 <= i < config.vocab_size))


def _weight_bytes(program: RankProgram) -> int:
    return sum(job.spec.nbytes for job in program.tensors if job.weight_format is not None)


def _manifest(
    stage: Path,
    checkpoint: Checkpoint,
    identity: str,
    tokenizer: TokenizerAssets,
    compiled: CompiledModel,
    options: BuildOptions,
    rank_digests: Mapping[str, str],
) -> Manifest:
    config, plan = checkpoint.config, compiled.ranks[0].plan
    format_bytes: Counter[str] = Counter()
    for program in compiled.ranks:
        for job in program.tensors:
            if job.weight_format is not None:
                format_bytes[job.weight_format] += job.spec.nbytes
    matrices = [tensor for tensor in checkpoint.tensors().values() if len(tensor.shape) > 1]
    kv = plan["kv"]
    files = {
        file.name: FileEntry(bytes=file.stat().st_size, sha256=rank_digests.get(file.name) or file_sha256(file))
        for file in sorted(stage.iterdir())
    }
    return Manifest(
        builder_version=aotllm.__version__,
        model=Model(
            name=config.name or f"{config.architecture} model",
            architecture=config.architecture,
            identity=identity,
            num_parameters=sum(math.prod(tensor.shape) for tensor in matrices),
        ),
        target=Target(name=options.target, requires=compiled.requires),
        precision=Precision(
            dtype=options.dtype,
            kv_cache_dtype=kv["dtype"],
            weight_formats=dict(format_bytes),
            quantization=options.quantization(),
        ),
        parallel=Parallel(tp=options.tp, pp=options.pp),
        limits=Limits(
            max_seq_len=plan["max_seq_len"],
            max_num_tokens=plan["max_num_tokens"],
            max_batch_size=plan["max_batch_size"],
            tokens_per_block=kv["tokens_per_block"],
        ),
        memory=Memory(
            weights=max(_weight_bytes(program) for program in compiled.ranks),
            arena=plan["arena_bytes"],
            kv_per_token=max(kv_bytes_per_token(kv, program.plan.get("pp")) for program in compiled.ranks),
        ),
        bos_token_id=config.bos_token_id,
        eos_token_ids=_eos_token_ids(config, tokenizer),
        bos_token=tokenizer.bos_token,
        eos_token=tokenizer.eos_token,
        build_flags=options.flags(),
        files=files,
    )
