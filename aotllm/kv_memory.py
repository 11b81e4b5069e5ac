"""How much memory the KV cache may take, as it is asked for; and what it buys."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from aotllm.errors import InvalidRequest

_UNITS = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
_AMOUNT = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*([a-zA-Z]*)")
_LARGEST = 2**63 - 1


@dataclass(frozen=True)
class KvMemorySize:
    """An amount of KV memory in one of three units; the other two are 0."""

    num_bytes: int = 0
    tokens: int = 0
    """Tokens that fit, of all sequences together"""
    fraction: float = 0.0
    """Of the memory that is free when the engine is loaded; of a GPU's, 512 MiB are left out first"""


def parse_kv_memory(text: str, name: str = "kv_cache_memory") -> KvMemorySize:
    """An amount of KV memory.

    * BYTES: a whole number, or any number with a unit: `4000000000`, `512MB` (powers of 1000), `1.5GiB` (of 1024).
    * TOKENS: a whole number with the unit tokens: `100000tokens`.
    * FRACTION of the free memory: a number with a decimal point, above 0 and up to 1: `0.5`.

    Raises:
        InvalidRequest: none of these; `param` is `name`.
    """
    match = _AMOUNT.fullmatch(text.strip())
    if match is None:
        raise _refuse(name, text)
    number, unit = match[1], match[2].upper()
    if unit == "TOKENS" and number.isdigit():
        return KvMemorySize(tokens=_bounded(int(number), name, text))
    if unit in _UNITS:
        return KvMemorySize(num_bytes=_bounded(int(float(number) * _UNITS[unit]), name, text))
    if unit:
        raise _refuse(name, text)
    if number.isdigit():
        return KvMemorySize(num_bytes=_bounded(int(number), name, text))
    if not 0 < float(number) <= 1:
        raise _refuse(name, text)
    return KvMemorySize(fraction=float(number))


def parse_bytes(text: str, name: str) -> int:
    """An amount of memory in bytes, in the first form of `parse_kv_memory`; 0 is allowed.

    Raises:
        InvalidRequest: something else; `param` is `name`.
    """
    if text.strip() == "0":
        return 0
    size = parse_kv_memory(text, name)
    if size.num_bytes == 0:
        raise InvalidRequest(f"{name} must be a number of bytes such as 2GiB or 500MB, got {text!r:.80}", name)
    return size.num_bytes


def _bounded(value: int, name: str, text: str) -> int:
    if not 0 < value <= _LARGEST:
        raise _refuse(name, text)
    return value


def _refuse(name: str, text: str) -> InvalidRequest:
    return InvalidRequest(
        f"{name} must be bytes such as 4000000000, 512MB or 1.5GiB, tokens such as 100000tokens, or a fraction of the "
        f"free memory, above 0 and up to 1, such as 0.5; got {text!r:.80}",
        name,
    )


@dataclass(frozen=True)
class KvGroup:
    """Blocks of the layers that share an attention window."""

    window: int
    """Tokens that a layer of the group looks back; 0 = all of them"""
    bytes_per_block: int
    device_blocks: int
    host_blocks: int

    @property
    def num_bytes(self) -> int:
        """Of both tiers."""
        return self.bytes_per_block * (self.device_blocks + self.host_blocks)


@dataclass(frozen=True)
class KvMemory:
    """What the memory of the KV cache buys."""

    groups: tuple[KvGroup, ...]
    tokens_per_block: int
    max_seq_len: int
    """Prompt and answer of one sequence, in tokens"""
    device_bytes: int
    host_bytes: int
    """Of the second tier, which keeps prefixes that the first has no room for"""
    tokens: int
    """Tokens that fit in the device's blocks"""
    sequences_at_max_len: int
    """Sequences of max_seq_len that fit at a time"""

    @classmethod
    def from_native(cls, native: Any) -> KvMemory:
        """From `_runtime.KvMemory`."""
        groups: Sequence[Any] = native.groups
        return cls(
            groups=tuple(KvGroup(g.window, g.bytes_per_block, g.device_blocks, g.host_blocks) for g in groups),
            tokens_per_block=native.tokens_per_block,
            max_seq_len=native.max_seq_len,
            device_bytes=native.device_bytes,
            host_bytes=native.host_bytes,
            tokens=native.tokens,
            sequences_at_max_len=native.sequences_at_max_len,
        )
