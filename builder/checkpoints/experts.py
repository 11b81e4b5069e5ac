"""Experts in checkpoints: one tensor of all experts becomes a matrix per expert, as the canonical names have it.

Canonical are the names of Qwen 3: the router `mlp.gate.weight` `[experts, hidden]`, and for expert 7
`mlp.experts.7.gate_proj.weight`, `up_proj` and `down_proj`. Files have besides:

* Mixtral's `block_sparse_moe.gate` and `block_sparse_moe.experts.7.w1` (gate), `w3` (up), `w2` (down);
* transformers 5: `mlp.experts.gate_up_proj` `[experts, 2 · neurons, hidden]`, gate above up, and
  `mlp.experts.down_proj` `[experts, hidden, neurons]`;
* GGUF: `ffn_gate_exps`, `ffn_up_exps` `[experts, neurons, hidden]`, `ffn_down_exps` `[experts, hidden, neurons]`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from aotllm.builder.checkpoints.validate import MAX_EXPERTS

_MIXTRAL_PARTS = {"1": "gate_proj", "2": "down_proj", "3": "up_proj"}
_MIXTRAL_EXPERT = re.compile(r"\.block_sparse_moe\.experts\.([0-9]+)\.w([123])\.", re.ASCII)
_STACKED = re.compile(r"(.+\.mlp\.experts)\.(gate_up_proj|gate_proj|up_proj|down_proj)(?:\.weight)?", re.ASCII)


@dataclass(frozen=True)
class ExpertPart:
    """Some of a tensor's bytes: one matrix of one expert."""

    name: str
    """Canonical"""
    shape: tuple[int, int]
    offset: int
    """Bytes from the start of the tensor"""
    nbytes: int


def canonical_expert_name(name: str) -> str:
    """`….block_sparse_moe.experts.7.w1.weight` → `….mlp.experts.7.gate_proj.weight`; other names stay."""
    name = _MIXTRAL_EXPERT.sub(lambda match: f".mlp.experts.{match[1]}.{_MIXTRAL_PARTS[match[2]]}.", name)
    return name.replace(".block_sparse_moe.gate.", ".mlp.gate.")


def expert_parts(name: str, shape: tuple[int, ...], nbytes: int) -> Iterator[ExpertPart]:
    """The matrices that a tensor of all experts holds; none where `name` and `shape` are not those of one."""
    match = _STACKED.fullmatch(name)
    if match is None or len(shape) != 3 or min(shape) < 1 or shape[0] > MAX_EXPERTS:
        return
    experts, rows, columns = shape
    parts = ("gate_proj", "up_proj") if match[2] == "gate_up_proj" else (match[2],)
    if rows % len(parts):
        return
    size = nbytes // (experts * len(parts))
    for expert in range(experts):
        for i, part in enumerate(parts):
            offset = (expert * len(parts) + i) * size
            yield ExpertPart(f"{match[1]}.{expert}.{part}.weight", (rows // len(parts), columns), offset, size)
