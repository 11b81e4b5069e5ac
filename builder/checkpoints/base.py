"""`Checkpoint`: the one view that the builder has of model files, whatever their format.

Names and layouts are Hugging Face's (`model.layers.0.self_attn.q_proj.weight`, `[out_features, in_features]`,
rotate-half RoPE); readers of other formats translate on the fly (GGUF un-permutes the rows of Q and K).
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from aotllm.builder.config import ModelConfig
from aotllm.errors import CheckpointError

FLOAT_STORAGE = ("f32", "f16", "bf16")
"""Storage formats that are plain arrays; every other one is a GGUF block format in lower case (`q4_1`, `q6_k`, …)."""


FP8_ROW_STORAGE = "fp8"
"""E4M3 codes with a scale per row"""
FP8_BLOCK_STORAGE = "fp8_block"
"""E4M3 codes with a scale per block of `FP8_BLOCK` rows and columns"""
FP8_STORAGE = (FP8_ROW_STORAGE, FP8_BLOCK_STORAGE)
FP8_BLOCK = 128
INT_STORAGE = ("int4", "int8")
"""Unsigned codes of 4 or 8 bits with a scale and a zero for each row and group of columns"""


@dataclass(frozen=True)
class Integers:
    """Rows of a matrix of integers: `w = scale · (code - zero)`, computed in float32."""

    codes: npt.NDArray[np.uint8]
    """`[rows, k]`, one code a byte"""
    scales: npt.NDArray[np.float32]
    """`[rows, groups]`: column c belongs to group `c // group`"""
    zeros: npt.NDArray[np.uint8]
    """`[rows, groups]`"""
    group: int
    """Columns of a group; the last may have fewer"""

    def values(self) -> npt.NDArray[np.float32]:
        """The weights, `[rows, k]`."""
        of_column = np.arange(self.codes.shape[1]) // self.group
        shifted = self.codes.astype(np.float32) - self.zeros.astype(np.float32)[:, of_column]
        result: npt.NDArray[np.float32] = self.scales[:, of_column] * shifted
        return result


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor is known by name. `shape` is logical: `[rows, columns]` for a matrix, whatever the storage."""

    name: str
    shape: tuple[int, ...]
    storage: str
    """f32 | f16 | bf16 | fp8 | fp8_block | int4 | int8 | a GGUF block format in lower case"""
    nbytes: int
    """Bytes that the stored tensor takes in the checkpoint"""


@dataclass(frozen=True)
class TokenizerAssets:
    """What an engine carries to turn text into ids and back."""

    tokenizer_json: str
    """A serialized `tokenizers.Tokenizer`"""
    chat_template: str | None
    """Jinja source, or None for a base model"""
    bos_token: str | None
    eos_token: str | None
    add_bos: bool
    """Whether a raw prompt starts with BOS (the tokenizer's post-processor already does it)"""
    generation_config: dict[str, Any] = field(default_factory=dict)
    """Sampling defaults as the checkpoint states them (`temperature`, `top_p`, `eos_token_id`, …)"""


class Checkpoint(ABC):
    """A readable model. Weights are read lazily, tensor by tensor, from memory-mapped files."""

    path: Path
    config: ModelConfig

    @abstractmethod
    def tensors(self) -> dict[str, TensorInfo]:
        """All tensors under canonical names, in file order."""

    @abstractmethod
    def read(self, name: str) -> npt.NDArray[np.float32]:
        """The tensor as float32 in its logical shape (block formats dequantized). Raises CheckpointError."""

    @abstractmethod
    def read_stored(self, name: str) -> npt.NDArray[Any]:
        """The tensor as it is stored, rows canonical.

        f32 → float32, f16 → float16, bf16 → uint16 (bit patterns), each in the logical shape;
        fp8, fp8_block → uint8 `[n, k]` of E4M3 codes, which `scales` belong to; int4, int8 → uint8 `[n, k]`, see
        `integers`; block formats → uint8 `[rows, bytes per row]`. Raises CheckpointError.
        """

    def scales(self, name: str) -> npt.NDArray[np.float32]:
        """Of an fp8 matrix, `w = code · scale`: `[n]`, or `[ceil(n / 128), ceil(k / 128)]`. Raises CheckpointError."""
        raise CheckpointError(f"{self.path}: tensor '{name}' has no scales")

    def integers(self, name: str, rows: range, with_codes: bool = True) -> Integers:
        """Consecutive rows of an int4 or int8 matrix; without codes, which are then `[rows, 0]`, that is quick.

        Raises CheckpointError.
        """
        raise CheckpointError(f"{self.path}: tensor '{name}' holds no integers")

    @abstractmethod
    def tokenizer(self) -> TokenizerAssets:
        """Raises CheckpointError where the checkpoint has no tokenizer that can be read."""

    def tensor_digest(self, name: str) -> str:
        """SHA-256 in hex over the bytes of `read_stored(name)`, then of its scales and zeros.

        Raises CheckpointError.
        """
        info = self.tensors()[name]
        if info.storage in INT_STORAGE:
            integers = self.integers(name, range(info.shape[0]))
            digest = hashlib.sha256(np.ascontiguousarray(integers.codes).data)
            digest.update(np.ascontiguousarray(integers.scales).data)
            digest.update(np.ascontiguousarray(integers.zeros).data)
            return digest.hexdigest()
        digest = hashlib.sha256(np.ascontiguousarray(self.read_stored(name)).data)
        if self.tensors()[name].storage in FP8_STORAGE:
            digest.update(np.ascontiguousarray(self.scales(name)).data)
        return digest.hexdigest()

    def close(self) -> None:  # noqa: B027 - optional hook
        """Unmap the files."""

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
