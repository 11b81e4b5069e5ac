"""`GgufCheckpoint`: a model in one GGUF file, or in several parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from aotllm.builder.checkpoints.base import Checkpoint, TensorInfo, TokenizerAssets
from aotllm.builder.checkpoints.expected import select_tensors
from aotllm.builder.checkpoints.experts import expert_parts
from aotllm.builder.checkpoints.gguf_config import read_architecture, read_config
from aotllm.builder.checkpoints.gguf_header import GgufTensor, read_header
from aotllm.builder.checkpoints.gguf_names import ROPE_FREQS, canonical_name, gguf_name
from aotllm.builder.checkpoints.gguf_split import check_part, check_tensor_count, find_parts
from aotllm.builder.checkpoints.mapped_file import MappedFile
from aotllm.builder.checkpoints.validate import validate
from aotllm.errors import CheckpointError, UnsupportedModel

_F32, _F16, _BF16 = GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16
_FLOAT_DTYPES = {_F32: "<f4", _F16: "<f2", _BF16: "<u2"}
_MAX_ROTARY_DIM = 1 << 16


class GgufCheckpoint(Checkpoint):
    """Reads a GGUF file, or all parts of a split model given any of them.

    Tensors come out under canonical names and in canonical row order: converters to GGUF permute the rows of Q and K
    of llama models for interleaved RoPE, which is undone here. Rows move whole, so that this is exact for block
    formats too.

    Raises:
        CheckpointError: a file is missing or malformed, or the tensors do not fit the metadata.
        UnsupportedModel: the architecture, or a feature or quantization type of it, is not implemented.
    """

    metadata: Mapping[str, Any]
    """All metadata of the (first) file: int, float, bool, str, NumPy arrays, lists of str."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files: list[MappedFile] = []
        self._stored: dict[str, tuple[MappedFile, GgufTensor]] = {}
        try:
            self.metadata = MappingProxyType(self._open_parts())
            self._read_model()
        except BaseException:
            self.close()
            raise

    def tensors(self) -> dict[str, TensorInfo]:
        """The tensors that the architecture uses, in file order."""
        return dict(self._tensors)

    def read_stored(self, name: str) -> npt.NDArray[Any]:
        """The tensor as it is stored, rows canonical; a read-only view of the file where rows keep their order."""
        file, tensor = self._locate(name)
        if tensor.type in _FLOAT_DTYPES:
            return self._canonical_rows(name, file.array(tensor.offset, tensor.shape, _FLOAT_DTYPES[tensor.type]))
        block_elements, block_bytes = GGML_QUANT_SIZES[tensor.type]
        row_bytes = tensor.shape[-1] // block_elements * block_bytes
        rows = tensor.nbytes // row_bytes
        return self._canonical_rows(name, file.array(tensor.offset, (rows, row_bytes), np.uint8))

    def read(self, name: str) -> npt.NDArray[np.float32]:
        """The tensor as float32 (a read-only view where it is stored so in this order)."""
        stored = self.read_stored(name)
        _, tensor = self._locate(name)
        if tensor.type == _BF16:
            return (stored.astype(np.uint32) << 16).view(np.float32)
        if tensor.type in _FLOAT_DTYPES:
            return stored.astype(np.float32, copy=False)
        with np.errstate(all="ignore"):  # scales of hostile files may be infinite; the values tell
            return np.asarray(dequantize(stored, tensor.type), dtype=np.float32).reshape(tensor.shape)

    def tokenizer(self) -> TokenizerAssets:
        """From the `tokenizer.*` metadata."""
        from aotllm.builder.checkpoints.gguf_tokenizer import tokenizer_from_gguf

        return tokenizer_from_gguf(self.metadata)

    def close(self) -> None:
        """Unmap the files; arrays handed out before stay valid."""
        for file in self._files:
            file.close()

    def _open_parts(self) -> dict[str, Any]:
        """Maps all files and collects their tensors under GGUF names. Returns the metadata of the first."""
        parts = find_parts(self.path)
        first: Mapping[str, Any] = {}
        for number, part in enumerate(parts):
            file = MappedFile(part)
            self._files.append(file)
            header = read_header(file)
            check_part(part, header.metadata, number, len(parts))
            first = first or header.metadata
            for name, tensor in header.tensors.items():
                if name in self._stored:
                    raise CheckpointError(f"{part}: tensor '{name}' is in an earlier part of the model too")
                self._stored[name] = (file, tensor)
        if len(parts) > 1:
            check_tensor_count(parts[0], first, len(self._stored))
        return dict(first)

    def _read_model(self) -> None:
        source = str(self.path)
        architecture = read_architecture(self.metadata, source)
        freq_factors = self._read_rope_freqs()
        canonical: dict[str, tuple[MappedFile, GgufTensor]] = {}
        for stored_name, (file, tensor) in self._stored.items():
            for name, part in _parts(canonical_name(stored_name, architecture), tensor):
                if name in canonical:
                    raise CheckpointError(
                        f"{source}: tensors '{canonical[name][1].name}' and '{stored_name}' are both {name}"
                    )
                canonical[name] = (file, part)
        self._stored = canonical
        self._interleaved = architecture == "llama"
        infos = {
            name: TensorInfo(name, tensor.shape, tensor.type.name.lower(), tensor.nbytes)
            for name, (_, tensor) in canonical.items()
        }
        shapes = {name: info.shape for name, info in infos.items()}
        self.config = validate(read_config(self.metadata, shapes, freq_factors, source), source)
        self._tensors = select_tensors(infos, self.config, source, lambda name: gguf_name(name, architecture))
        for name in self._tensors:
            _, tensor = canonical[name]
            if not can_dequantize(tensor.type):
                raise UnsupportedModel(
                    f"{source}: tensor '{tensor.name}' has type {tensor.type.name}, which cannot be read as weights"
                )

    def _read_rope_freqs(self) -> tuple[float, ...] | None:
        """Takes `rope_freqs.weight` from the tensors: it is part of the config."""
        located = self._stored.pop(ROPE_FREQS, None)
        if located is None:
            return None
        file, tensor = located
        if tensor.type != _F32 or len(tensor.shape) != 1 or tensor.shape[0] > _MAX_ROTARY_DIM // 2:
            raise CheckpointError(
                f"{file.path}: tensor '{ROPE_FREQS}' is {tensor.type.name} {list(tensor.shape)}; "
                "expected F32 [head_dim / 2]"
            )
        return tuple(file.array(tensor.offset, tensor.shape, "<f4").tolist())

    def _canonical_rows(self, name: str, stored: npt.NDArray[Any]) -> npt.NDArray[Any]:
        if not self._interleaved:
            return stored
        if ".self_attn.q_proj." in name:
            return unpermute_rows(stored, self.config.num_heads)
        if ".self_attn.k_proj." in name:
            return unpermute_rows(stored, self.config.num_kv_heads)
        return stored

    def _locate(self, name: str) -> tuple[MappedFile, GgufTensor]:
        if name not in self._tensors:
            raise CheckpointError(f"{self.path}: there is no tensor '{name}'")
        return self._stored[name]


def _parts(name: str, tensor: GgufTensor) -> list[tuple[str, GgufTensor]]:
    """A tensor of all experts as one per expert; any other one as it is."""
    parts = [
        (part.name, replace(tensor, shape=part.shape, offset=tensor.offset + part.offset, nbytes=part.nbytes))
        for part in expert_parts(name, tensor.shape, tensor.nbytes)
    ]
    return parts or [(name, tensor)]


def unpermute_rows(stored: npt.NDArray[Any], num_heads: int) -> npt.NDArray[Any]:
    """Rows of Q or K (or entries of their bias) from interleaved to rotate-half order.

    Row `2i + j` of a head (pair `i`, element `j`) becomes row `j · head_dim / 2 + i`.

    Args:
        stored: `[num_heads * head_dim, ...]`.
        num_heads: heads of this matrix.

    Returns:
        A copy of the same shape.
    """
    pairs = stored.reshape(num_heads, -1, 2, *stored.shape[1:])  # [heads, head_dim / 2, 2, ...]
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(stored.shape)


@cache
def can_dequantize(type_: GGMLQuantizationType) -> bool:
    """Whether the gguf package turns this type into float32."""
    if type_ in _FLOAT_DTYPES:
        return True
    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[type_][1]), np.uint8), type_)
    except NotImplementedError:
        return False
    return True
