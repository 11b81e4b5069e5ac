"""GGUF files packed by hand, field by field, so that a test can get any of them wrong."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Any

import numpy as np

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
_FORMATS = {U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "B", U64: "Q", I64: "q", F64: "d"}


def string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def value(kind: int, content: Any) -> bytes:
    """Payload of a value. An array is given as `(item kind, items)`."""
    if kind == STRING:
        return string(content)
    if kind == ARRAY:
        item_kind, items = content
        return struct.pack("<IQ", item_kind, len(items)) + b"".join(value(item_kind, item) for item in items)
    return struct.pack("<" + _FORMATS[kind], content)


class Payload(bytes):
    """The bytes of a value just as they shall be, right or wrong."""


@dataclass
class RawTensor:
    name: str | bytes
    dims: tuple[int, ...]
    """Fastest first, as GGUF writes them"""
    type: int = 0
    data: bytes = b""
    offset: int | None = None
    """None = right after the tensor before it, aligned"""


@dataclass
class RawGguf:
    """A file to be; `pack` writes exactly what is stated and derives the rest."""

    keys: list[tuple[str | bytes, int, Any]] = field(default_factory=list)
    """name, value type, and content (or a `Payload`)"""
    tensors: list[RawTensor] = field(default_factory=list)
    magic: bytes = b"GGUF"
    version: int = 3
    num_tensors: int | None = None
    num_keys: int | None = None
    alignment: int = 32

    def pack(self) -> bytes:
        out = bytearray(self.magic + struct.pack("<I", self.version))
        out += struct.pack("<Q", len(self.tensors) if self.num_tensors is None else self.num_tensors)
        out += struct.pack("<Q", len(self.keys) if self.num_keys is None else self.num_keys)
        for key, kind, content in self.keys:
            raw = content if isinstance(content, Payload) else value(kind, content)
            out += string(key) + struct.pack("<I", kind) + raw
        data = bytearray()
        for tensor in self.tensors:
            data += bytes(-len(data) % self.alignment)
            offset = len(data) if tensor.offset is None else tensor.offset
            out += string(tensor.name) + struct.pack("<I", len(tensor.dims))
            out += struct.pack(f"<{len(tensor.dims)}Q", *tensor.dims) + struct.pack("<IQ", tensor.type, offset)
            data += tensor.data
        padding = bytes(-len(out) % self.alignment) if self.tensors else b""
        return bytes(out + padding + data)


def tiny_llama() -> RawGguf:
    """A whole llama model: hidden 8, two heads of 4, one key/value head, one layer, 4 tokens, tied embeddings."""
    random = np.random.default_rng(7)

    def tensor(name: str, *dims: int) -> RawTensor:
        return RawTensor(name, dims, F32_TYPE, random.standard_normal(dims[::-1]).astype("<f4").tobytes())

    keys: list[tuple[str | bytes, int, Any]] = [
        ("general.architecture", STRING, "llama"),
        ("general.name", STRING, "tiny"),
        ("llama.context_length", U32, 16),
        ("llama.embedding_length", U32, 8),
        ("llama.block_count", U32, 1),
        ("llama.feed_forward_length", U32, 12),
        ("llama.attention.head_count", U32, 2),
        ("llama.attention.head_count_kv", U32, 1),
        ("llama.attention.layer_norm_rms_epsilon", F32, 1e-5),
        ("llama.rope.freq_base", F32, 5e5),
        ("tokenizer.ggml.tokens", ARRAY, (STRING, ["<s>", "</s>", "a", "é"])),
        ("tokenizer.ggml.scores", ARRAY, (F32, [0.0, 0.0, -1.0, -2.0])),
        ("tokenizer.ggml.add_bos_token", BOOL, True),
    ]
    tensors = [
        tensor("token_embd.weight", 8, 4),
        tensor("blk.0.attn_norm.weight", 8),
        tensor("blk.0.attn_q.weight", 8, 8),
        tensor("blk.0.attn_k.weight", 8, 4),
        tensor("blk.0.attn_v.weight", 8, 4),
        tensor("blk.0.attn_output.weight", 8, 8),
        tensor("blk.0.ffn_norm.weight", 8),
        tensor("blk.0.ffn_gate.weight", 8, 12),
        tensor("blk.0.ffn_up.weight", 8, 12),
        tensor("blk.0.ffn_down.weight", 12, 8),
        tensor("output_norm.weight", 8),
    ]
    return RawGguf(keys, tensors)


def tiny_experts() -> RawGguf:
    """The same with two experts in its layer, of which a token takes one."""
    random, file = np.random.default_rng(8), tiny_llama()
    file.keys += [("llama.expert_count", U32, 2), ("llama.expert_used_count", U32, 1)]
    file.tensors = [tensor for tensor in file.tensors if "ffn_" not in str(tensor.name) or "norm" in str(tensor.name)]
    for name, dims in (
        ("ffn_gate_inp", (8, 2)),
        ("ffn_gate_exps", (8, 12, 2)),
        ("ffn_up_exps", (8, 12, 2)),
        ("ffn_down_exps", (12, 8, 2)),
    ):
        data = random.standard_normal(dims[::-1]).astype("<f4").tobytes()
        file.tensors.append(RawTensor(f"blk.0.{name}.weight", dims, F32_TYPE, data))
    return file


F32_TYPE, Q4_0_TYPE, Q8_1_TYPE = 0, 2, 9
"""Tensor types, which are numbered apart from value types."""
