"""The plan of the CPU target as types; `aotllm.builder.targets.plan` has what all targets share."""

from __future__ import annotations

from typing import TypedDict

from aotllm.builder.targets.plan import StepPlan


class SegmentRecord(TypedDict):
    """`n` whole rows of a linear in one format; `tensor` holds their panels."""

    n: int
    format: str
    tensor: str


class LinearRecord(TypedDict):
    """A packed matrix `[n, k]`: its segments, in row order."""

    n: int
    k: int
    segments: list[SegmentRecord]


class Plan(StepPlan):
    """The whole program of a step."""

    linears: dict[str, LinearRecord]
