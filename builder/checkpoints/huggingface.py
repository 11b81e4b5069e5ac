"""`HuggingFaceCheckpoint`: a folder with `config.json` and safetensors weights."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from aotllm.builder.checkpoints.base import (
    FP8_STORAGE,
    INT_STORAGE,
    Checkpoint,
    Integers,
    TensorInfo,
    TokenizerAssets,
)
from aotllm.builder.checkpoints.expected import EMBEDDING, select_tensors
from aotllm.builder.checkpoints.experts import canonical_expert_name, expert_parts
from aotllm.builder.checkpoints.fields import Fields
from aotllm.builder.checkpoints.huggingface_config import read_config
from aotllm.builder.checkpoints.huggingface_fp8 import checked_scales, dequantize, is_companion, scale_name
from aotllm.builder.checkpoints.huggingface_integers import (
    IntegerMatrix,
    IntegerScheme,
    is_integer_part,
    read_scheme,
)
from aotllm.builder.checkpoints.json_file import read_json_object
from aotllm.builder.checkpoints.safetensors_file import SafetensorsFile, StoredTensor
from aotllm.builder.checkpoints.validate import validate
from aotllm.builder.numerics import bf16_values
from aotllm.errors import CheckpointError, UnsupportedModel

_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_STORAGE = {"F32": "f32", "F16": "f16", "BF16": "bf16"}
"""dtype of the file → storage name; that of F8_E4M3 depends on its scales."""
_NUMPY_TYPES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2", "F8_E4M3": "u1", "I32": "<i4"}

_PREFIXES = (
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("model.language_model.", "model."),
)
"""Where multimodal files keep the language model, old and new."""


@dataclass(frozen=True)
class _Source:
    """Where a tensor is."""

    file: SafetensorsFile
    stored_name: str
    tensor: StoredTensor
    """The part of the file that it is"""


class HuggingFaceCheckpoint(Checkpoint):
    """Reads `config.json`, `generation_config.json` and `model.safetensors` (or its shards).

    Raises:
        CheckpointError: a file is missing or malformed, or the tensors do not fit the config.
        UnsupportedModel: the architecture, or a feature or number format of it, is not implemented.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        config_file = path / "config.json"
        generation_file = path / "generation_config.json"
        generation = read_json_object(generation_file) if generation_file.exists() else {}
        stated = read_json_object(config_file)
        config = validate(read_config(stated, generation, str(config_file)), str(config_file))
        top = Fields(str(config_file), stated)
        text = top.child("text_config")
        quantization = top.child("quantization_config") or (text.child("quantization_config") if text else None)
        self._scheme = read_scheme(quantization) if quantization is not None else None
        self._integers: dict[str, IntegerMatrix] = {}
        self._files: list[SafetensorsFile] = []
        self._scales: dict[str, str] = {}  # canonical name of an fp8 matrix → that of its scales
        try:
            self._open_weights()
            self._sources = self._locate()
            self._tensors = select_tensors(self._infos(), config, str(path), self._stored_name)
            self._refuse_other_types()
        except BaseException:
            self.close()
            raise
        scale = round_to_storage(config.embedding_scale, self._tensors[EMBEDDING].storage)
        self.config = replace(config, embedding_scale=scale)

    def tensors(self) -> dict[str, TensorInfo]:
        """The tensors that the architecture uses, in file order."""
        return dict(self._tensors)

    def read_stored(self, name: str) -> npt.NDArray[Any]:
        """The tensor as it is stored; usually a read-only view of the mapped file."""
        info = self._info(name)
        if name in self._integers:
            return self.integers(name, range(info.shape[0])).codes
        return self._array(name)

    def integers(self, name: str, rows: range, with_codes: bool = True) -> Integers:
        """See `Checkpoint`."""
        self._info(name)
        if name not in self._integers:
            return super().integers(name, rows, with_codes)
        return self._integers[name].rows(rows, self._numbers, with_codes)

    def _array(self, name: str) -> npt.NDArray[Any]:
        """A tensor of the file as it is."""
        source = self._sources[name]
        return source.file.file.array(source.tensor.offset, source.tensor.shape, _NUMPY_TYPES[source.tensor.dtype])

    def _numbers(self, name: str) -> npt.NDArray[Any]:
        """Likewise, bfloat16 as float32."""
        array = self._array(name)
        return bf16_values(array) if array.dtype == np.uint16 else array

    def scales(self, name: str) -> npt.NDArray[np.float32]:
        """See `Checkpoint`."""
        info = self._info(name)
        if name not in self._scales:
            return super().scales(name)
        source = self._sources[self._scales[name]]
        tensor = source.tensor
        if tensor.dtype not in _STORAGE:
            raise CheckpointError(
                f"{source.file.path}: tensor '{source.stored_name}' holds {tensor.dtype} values, expected F32 or BF16"
            )
        stored = source.file.file.array(tensor.offset, tensor.shape, _NUMPY_TYPES[tensor.dtype])
        values = bf16_values(stored) if tensor.dtype == "BF16" else stored.astype(np.float32)
        return checked_scales(source.stored_name, values, info.shape[0], info.storage)

    def read(self, name: str) -> npt.NDArray[np.float32]:
        """The tensor as float32 (a read-only view where it is stored so)."""
        if name in self._integers:
            return self.integers(name, range(self._info(name).shape[0])).values()
        stored = self.read_stored(name)
        if name in self._scales:
            return dequantize(stored, self.scales(name))
        if stored.dtype == np.uint16:
            return bf16_values(stored)
        return stored.astype(np.float32, copy=False)

    def tokenizer(self) -> TokenizerAssets:
        """From `tokenizer.json` and its companions in the folder."""
        from aotllm.builder.checkpoints.huggingface_tokenizer import tokenizer_from_folder

        return tokenizer_from_folder(self.path)

    def close(self) -> None:
        """Unmap the files; arrays handed out before stay valid."""
        for file in self._files:
            file.close()

    def _open_weights(self) -> None:
        if (self.path / _WEIGHTS).exists():
            self._files.append(SafetensorsFile(self.path / _WEIGHTS))
            return
        if not (self.path / _INDEX).exists():
            others = sorted(p.name for p in self.path.glob("pytorch_model*.bin"))
            hint = f" ({others[0]} is pickled; convert it with save_pretrained)" if others else ""
            raise CheckpointError(f"{self.path}: neither {_WEIGHTS} nor {_INDEX} is there{hint}")
        self._open_shards()

    def _open_shards(self) -> None:
        index_file = self.path / _INDEX
        weight_map = read_json_object(index_file).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{index_file}: field 'weight_map' is missing; expected tensor names and their files")
        for file_name in weight_map.values():
            plain = isinstance(file_name, str) and Path(file_name).name == file_name and len(file_name) <= 255
            if not plain or "\0" in file_name:
                raise CheckpointError(f"{index_file}: {file_name!r} is not the name of a file in this folder")
        opened: dict[str, SafetensorsFile] = {}
        for file_name in dict.fromkeys(weight_map.values()):
            if not (self.path / file_name).exists():
                raise CheckpointError(f"{index_file}: the shard {file_name} is missing")
            opened[file_name] = SafetensorsFile(self.path / file_name)
            self._files.append(opened[file_name])
        for tensor, file_name in weight_map.items():
            if tensor not in opened[file_name].tensors:
                raise CheckpointError(f"{index_file}: tensor '{tensor}' is not in {file_name}, where it should be")

    def _locate(self) -> dict[str, _Source]:
        """By canonical name."""
        sources: dict[str, _Source] = {}
        for file in self._files:
            for stored_name, tensor in file.tensors.items():
                for name, part in _parts(canonical_name(stored_name), tensor):
                    if name in sources:
                        raise CheckpointError(f"{self.path}: tensor '{stored_name}' is there twice")
                    sources[name] = _Source(file, stored_name, part)
        return sources

    def _infos(self) -> dict[str, TensorInfo]:
        infos = {}
        types = {name: (source.tensor.dtype, source.tensor.shape) for name, source in self._sources.items()}
        shapes = {name: shape for name, (_, shape) in types.items()}
        for name, source in self._sources.items():
            tensor = source.tensor
            if is_companion(name):
                continue
            if self._scheme is not None and is_integer_part(name):
                if name.endswith(".qweight"):
                    matrix = self._integer_matrix(name.removesuffix("qweight") + "weight", self._scheme, types)
                    infos[matrix.name] = TensorInfo(matrix.name, matrix.shape, self._scheme.storage, tensor.nbytes)
                continue
            storage = _STORAGE.get(tensor.dtype, tensor.dtype)
            if tensor.dtype == "F8_E4M3":
                self._scales[name], storage = scale_name(name, tensor.shape, shapes, str(self.path))
            infos[name] = TensorInfo(name, tensor.shape, storage, tensor.nbytes)
        return infos

    def _integer_matrix(
        self, name: str, scheme: IntegerScheme, found: dict[str, tuple[str, tuple[int, ...]]]
    ) -> IntegerMatrix:
        matrix = IntegerMatrix(name, scheme, found, str(self.path))
        if matrix.has_order:
            matrix.check_order(self._array(matrix.parts["g_idx"]))
        self._integers[name] = matrix
        return matrix

    def _refuse_other_types(self) -> None:
        known = (*_STORAGE.values(), *FP8_STORAGE, *INT_STORAGE)
        for name, info in self._tensors.items():
            if info.storage not in known:
                raise UnsupportedModel(
                    f"{self._sources[name].file.path}: tensor '{self._stored_name(name)}' holds {info.storage} values; "
                    f"weights must be {', '.join((*_STORAGE, 'F8_E4M3'))}"
                )

    def _stored_name(self, name: str) -> str:
        return self._sources[name].stored_name if name in self._sources else name

    def _info(self, name: str) -> TensorInfo:
        if name not in self._tensors:
            raise CheckpointError(f"{self.path}: there is no tensor '{name}'")
        return self._tensors[name]


def canonical_name(stored_name: str) -> str:
    """Name of a tensor without the prefix of multimodal files' language models, experts by one scheme."""
    for prefix, replacement in _PREFIXES:
        if stored_name.startswith(prefix):
            return replacement + stored_name[len(prefix) :]
    return canonical_expert_name(stored_name)


def _parts(name: str, tensor: StoredTensor) -> list[tuple[str, StoredTensor]]:
    """A tensor of all experts as one per expert; any other one as it is."""
    parts = [
        (part.name, StoredTensor(tensor.dtype, part.shape, tensor.offset + part.offset, part.nbytes))
        for part in expert_parts(name, tensor.shape, tensor.nbytes)
    ]
    return parts or [(name, tensor)]


def round_to_storage(value: float, storage: str) -> float:
    """`value` rounded to f32, f16 or bf16 (ties to even).

    transformers multiplies Gemma's embeddings by a scale of the weights' own type, so that the rounding is part of
    the model; other storage formats compute in f32.
    """
    if storage == "f16":
        return float(np.float16(value))
    bits = int(np.float32(value).view(np.uint32))
    if storage == "bf16":
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return float(np.uint32(bits).view(np.float32))
