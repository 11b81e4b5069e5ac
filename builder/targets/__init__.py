"""Targets: what makes of a checkpoint the programs that its engine holds."""

from __future__ import annotations

from collections.abc import Callable

from aotllm.builder.checkpoints.base import Checkpoint
from aotllm.builder.options import BuildOptions
from aotllm.builder.targets.cpu.target import compile_cpu
from aotllm.builder.targets.cuda.target import compile_cuda
from aotllm.builder.targets.program import CompiledModel

COMPILERS: dict[str, Callable[[Checkpoint, BuildOptions], CompiledModel]] = {"cpu": compile_cpu, "cuda": compile_cuda}
"""By name of the target"""
