"""The plan of the CUDA target as types; `aotllm.builder.targets.plan` has what all targets share."""

from __future__ import annotations

from typing import TypedDict

from aotllm.builder.targets.plan import StepPlan


class _MatrixRecord(TypedDict):
    n: int
    k: int
    format: str
    tensor: str


class LinearRecord(_MatrixRecord, total=False):
    """A matrix `[n, k]` in one format: the tensor of its codes, and those of its scales and zeros where it has some.

    `group` is how many columns share them, in int8 and int4.
    """

    scales: str
    zeros: str
    group: int


class TacticRecord(TypedDict):
    """The kernel for up to `max_rows` rows."""

    max_rows: int
    kernel: str


class Plan(StepPlan):
    """The whole program of a step of one rank."""

    sm: int
    linears: dict[str, LinearRecord]
    tactics: dict[str, list[TacticRecord]]
