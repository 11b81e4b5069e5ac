"""Passes: a traced model becomes a fused one with its memory planned. Each works in place; the model always runs."""

from aotllm.builder.passes.arena_plan import ArenaLayout, arena_plan, buffer_index
from aotllm.builder.passes.fuse import operands
from aotllm.builder.passes.kv_layout import KvLayer, kv_layers
from aotllm.builder.passes.pipeline import PassReport, run_passes
from aotllm.builder.passes.shard import Partition
from aotllm.builder.passes.stages import Stage, cut_stages

__all__ = [
    "ArenaLayout",
    "KvLayer",
    "Partition",
    "PassReport",
    "Stage",
    "arena_plan",
    "buffer_index",
    "cut_stages",
    "kv_layers",
    "operands",
    "run_passes",
]
