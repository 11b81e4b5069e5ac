"""What the plans of all targets have in common, as types.

`docs/engine_format.md` is the contract; the runtime checks a plan against it when it loads an engine.
"""

from __future__ import annotations

from typing import Any, TypedDict

PLAN_VERSION = 1

Op = dict[str, Any]
"""An op record: `op` is its name, the other fields are those of the format's table. `in`, `out` and `residual` are
indices of buffers, `linear`, `gate` and `up` names of linears, `norm`, `bias` and the like names of tensors. Fields
that an op does not use are absent."""


class BufferRecord(TypedDict):
    """`[rows, width]` at `offset` bytes in the arena; the target says how many rows, and of what."""

    name: str
    width: int
    offset: int


class RopeRecord(TypedDict):
    """A table of rotary frequencies: the tensor's name, and the factor on cos and sin."""

    inv_freq: str
    attention_factor: float


class KvLayerRecord(TypedDict):
    """The cache of one layer; `window` in tokens, 0 = all."""

    num_kv_heads: int
    head_dim: int
    window: int


class KvRecord(TypedDict):
    """The cache of all layers; `dtype` is f32, bf16, int16 or int8 (cpu), bf16 or fp8 (cuda)."""

    dtype: str
    tokens_per_block: int
    layers: list[KvLayerRecord]


class TensorParallelRecord(TypedDict):
    """Which of how many ranks a plan is for."""

    size: int
    rank: int


class _StageBuffers(TypedDict, total=False):
    entering: int
    leaving: int


class StageRecord(_StageBuffers):
    """Which of how many pipeline stages a plan is for, and its layers `[begin, end)`.

    `entering` and `leaving` are indices of buffers: the residual stream as the stage before leaves it, and as the next
    one gets it."""

    size: int
    rank: int
    layers: tuple[int, int]


class _ParallelRecords(TypedDict, total=False):
    tp: TensorParallelRecord
    pp: StageRecord


class StepPlan(_ParallelRecords):
    """The program of a step, but for what is each target's own."""

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
    ops: list[Op]


KV_ELEMENTS = {"f32": (4, 0), "int16": (2, 4), "int8": (1, 4), "bf16": (2, 0), "fp8": (1, 0)}
"""Type of the cache → bytes of a value, and of what each head of a token has besides (integers: a float32 scale)"""


def kv_bytes_per_token(kv: KvRecord, stage: StageRecord | None = None) -> int:
    """Bytes that one token takes in the cache: K and V of all layers, or of those of a stage."""
    element, scale = KV_ELEMENTS[kv["dtype"]]
    layers = kv["layers"] if stage is None else kv["layers"][slice(*stage["layers"])]
    return sum(2 * layer["num_kv_heads"] * (element * layer["head_dim"] + scale) for layer in layers)
