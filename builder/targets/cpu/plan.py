"""The plan of the CPU target as types; `aotllm.builder.targets.plan` has what all targets share."""

from __future__ import annotations

from typing import TypedDict

from aotllm.builder.targets.plan import BufferRecord, KvRecord, Op, RopeRecord


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


class Plan(TypedDict):
    """The whole program of a step."""

    version: int
    target: str
    vocab_size: int
    hidden_size: int
    max_seq_len: int
    max_num_tokens: int
    max_batch_size: int
    arena_bytes: int
    buffers: list[BufferRecord]
    rope: list[RopeRecord]
    kv: KvRecord
    linears: dict[str, LinearRecord]
    ops: list[Op]
