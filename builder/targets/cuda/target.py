"""The CUDA target: from a checkpoint to the programs of its ranks. No GPU is needed, nor looked for."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from aotllm.builder.checkpoints.base import FP8_BLOCK_STORAGE, FP8_STORAGE, INT_STORAGE, Checkpoint
from aotllm.builder.checkpoints.expected import EMBEDDING, LM_HEAD
from aotllm.builder.models import trace
from aotllm.builder.numerics import INT4_GROUP
from aotllm.builder.options import FP8_SM, BuildOptions, Excluded
from aotllm.builder.passes import Partition, cut_stages, run_passes
from aotllm.builder.targets.cuda.lowering import arena_layout, lower
from aotllm.builder.targets.cuda.packing import BITS, pack_jobs
from aotllm.builder.targets.lowering import engine_name, weight_bytes
from aotllm.builder.targets.program import CompiledModel, RankProgram, ready
from aotllm.errors import InvalidRequest

BLOCK_GATE_UP_FORMAT = "bf16"
"""Of `gate_up` where the checkpoint has it in blocks: bf16 or fp8_block. Its rows of gate and up take turns, so that in
`fp8_block` a tile of rows has two scales per block of columns (`docs/engine_format.md`); the GEMMs of this version take
one. bf16 holds code · scale to 1 part in 512"""
FP8_BLOCK_SM = 90
"""First SM whose GEMMs of this version take one scale per 128 × 128 block"""
_GATE_AND_UP = (".gate_proj.weight", ".up_proj.weight")
_REQUIRES = {80: "sm_80", 89: "sm_89", 90: "sm_90a"}


def compile_cuda(checkpoint: Checkpoint, options: BuildOptions) -> CompiledModel:
    """Traces, fuses, shards and lowers the model. Of its weights only the small ones are read.

    Raises:
        CheckpointError, UnsupportedModel: the model cannot be read, or the target cannot run it.
        InvalidRequest: `quantize` would change nothing.
    """
    config, limits = checkpoint.config, options.shape_limits()
    max_seq_len = options.max_seq_len or config.max_position_embeddings
    graph = trace(checkpoint, max_seq_len)
    linear_format = _linear_format(checkpoint, options)
    layout = arena_layout({linear_format(name) for name, info in checkpoint.tensors().items() if len(info.shape) > 1})
    run_passes(graph, config, max_num_tokens=limits.max_num_tokens, layout=layout, tp=options.tp)

    def nbytes(source: str, n: int, k: int) -> int:
        return n * k * BITS[linear_format(source)] // 8

    ranks = []
    stages = cut_stages(graph, options.pp, lambda weight: weight_bytes(weight, nbytes))
    for stage, rank in itertools.product(stages, range(options.tp)):
        lowered = lower(
            graph,
            config,
            Partition(config, options.tp, rank),
            stage=stage,
            linear_format=linear_format,
            source_group=_source_group(checkpoint, options),
            layout=layout,
            sm=options.cuda_sm(),
            kv_dtype="bf16" if options.kv_cache_dtype == "auto" else options.kv_cache_dtype,
            tokens_per_block=limits.tokens_per_block,
            max_seq_len=max_seq_len,
            max_num_tokens=limits.max_num_tokens,
            max_batch_size=limits.max_batch_size,
        )
        packed = [
            job
            for name, matrix in lowered.matrices.items()
            for record in (lowered.plan["linears"][name],)
            for job in pack_jobs(
                checkpoint,
                name,
                matrix,
                record["format"],
                record.get("group"),
                search_scales=options.searches_fp8_scales(),
            )
        ]
        ranks.append(RankProgram(lowered.plan, (*packed, *(ready(j.tensor, j.compute()) for j in lowered.dense_jobs))))
    if options.quantize is not None:
        _check_quantized({record["format"] for rank in ranks for record in rank.plan["linears"].values()}, options)
    if options.fp8_scales is not None:
        _check_scales(checkpoint, linear_format, options.fp8_scales)
    return CompiledModel(graph, tuple(ranks), (_REQUIRES[options.cuda_sm()],))


def _check_quantized(formats: set[str], options: BuildOptions) -> None:
    """FP8 matrices and integers of a checkpoint are not quantized once more; fp8 may be asked for where it is there.
    Raises InvalidRequest where nothing is left to be quantized."""
    if options.quantize in formats or (options.quantize == "fp8" and "fp8_block" in formats):
        return
    raise InvalidRequest(
        f"quantize: got {options.quantize}, but none is left to be so of the checkpoint's matrices, which would be "
        f"{', '.join(sorted(formats))}: those in fp8, int8 or int4 stay as they are, those of --quantize-exclude "
        "become bf16; leave --quantize out, or build from a checkpoint that is not quantized",
        "quantize",
    )


def _check_scales(checkpoint: Checkpoint, linear_format: Callable[[str], str], fp8_scales: str) -> None:
    """Raises InvalidRequest where all matrices in FP8 come with scales of their own."""
    matrices = (info for info in checkpoint.tensors().values() if len(info.shape) > 1)
    if not any(linear_format(info.name) == "fp8" and info.storage not in FP8_STORAGE for info in matrices):
        raise InvalidRequest(
            f"fp8_scales: got {fp8_scales}, but the checkpoint's matrices in FP8 keep the scales they have, and no "
            "other is made FP8; leave --fp8-scales out, or build from a checkpoint that is not quantized",
            "fp8_scales",
        )


def _linear_format(checkpoint: Checkpoint, options: BuildOptions) -> Callable[[str], str]:
    """Canonical name of a matrix → format.

    FP8 matrices and integers of the checkpoint stay as they are where the device can multiply them. Embeddings are
    looked up, not multiplied by; the head stays bf16 unless asked for, as it decides which token wins.
    """
    kept = {EMBEDDING} if options.quantize_lm_head else {EMBEDDING, LM_HEAD}
    tensors = checkpoint.tensors()
    excluded = options.excluded(checkpoint.config.num_layers)

    def linear_format(name: str) -> str:
        storage = tensors[name].storage
        if storage in INT_STORAGE:
            return "bf16" if name == EMBEDDING else storage
        if storage in FP8_STORAGE:
            least = FP8_BLOCK_SM if storage == FP8_BLOCK_STORAGE else FP8_SM
            if name == EMBEDDING or options.cuda_sm() < least:
                return "bf16"
            return BLOCK_GATE_UP_FORMAT if storage == FP8_BLOCK_STORAGE and name.endswith(_GATE_AND_UP) else storage
        if options.quantize is None or name in kept or _is_excluded(engine_name(name), excluded):
            return "bf16"
        return options.quantize

    return linear_format


def _is_excluded(name: str, excluded: Excluded) -> bool:
    """Whether the matrix, by its name in engines, is one of those: `layers.3.down`, `layers.3.experts.7.down`."""
    parts = name.split(".")
    matrix = {"q": "qkv", "k": "qkv", "v": "qkv", "gate": "gate_up", "up": "gate_up"}.get(parts[-1], parts[-1])
    return parts[0] == "layers" and (int(parts[1]) in excluded.layers or matrix in excluded.matrices)


def _source_group(checkpoint: Checkpoint, options: BuildOptions) -> Callable[[str], int | None]:
    """Canonical name of a matrix → columns that share a scale, as integers; None = all of a row."""
    tensors = checkpoint.tensors()

    def source_group(name: str) -> int | None:
        if tensors[name].storage in INT_STORAGE:
            return checkpoint.integers(name, range(0), with_codes=False).group
        return INT4_GROUP if options.quantize == "int4" else None

    return source_group
