"""FP8 weights of Hugging Face folders: which kinds are read, and the scales of each matrix.

A matrix `X.weight` of E4M3 codes has its scales beside it: `X.weight_scale` (compressed-tensors, fbgemm_fp8, modelopt
and plain fp8; one of the whole matrix, one per row, or one per block) or `X.weight_scale_inv` (DeepSeek's and Qwen's
files, one per block). Whatever the name says, `w = code · scale`. Scales of activations that files carry are not
needed: activations get theirs as they arise.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from aotllm.builder.checkpoints.base import FP8_BLOCK, FP8_BLOCK_STORAGE, FP8_ROW_STORAGE
from aotllm.builder.checkpoints.fields import Fields
from aotllm.builder.checkpoints.huggingface_integers import read_scheme
from aotllm.builder.numerics import dequantize_fp8
from aotllm.errors import CheckpointError, UnsupportedModel

_SCALE_SUFFIXES = ("_scale", "_scale_inv")
"""After the name of the weight"""
_COMPANIONS = (
    *(f".weight{suffix}" for suffix in _SCALE_SUFFIXES),
    *(".input_scale", ".input_scale_ub", ".output_scale", ".k_scale", ".v_scale", ".q_scale"),
)
_BLOCK_SHAPE = [FP8_BLOCK, FP8_BLOCK]


def is_companion(name: str) -> bool:
    """Whether a tensor is a scale and no weight of its own."""
    return name.endswith(_COMPANIONS)


def refuse_other_quantizations(quantization: Fields) -> None:
    """Raises UnsupportedModel unless `quantization_config` describes E4M3 weights with scales, or integers, that are
    read."""
    method = quantization.raw("quant_method") or "an unnamed method"
    if read_scheme(quantization) is not None:
        return
    if method == "compressed-tensors":
        groups = quantization.child("config_groups")
        for name in list(quantization.raw("config_groups") or {}):
            group = groups.child(name) if groups is not None else None
            weights = group.child("weights") if group is not None else None
            if weights is None or not _is_e4m3(weights):
                raise _unsupported(quantization, f"{method} ({_shown(quantization.raw('format'))})")
    elif method == "fp8":
        block = quantization.raw("weight_block_size")
        if block not in (None, _BLOCK_SHAPE):
            raise _unsupported(quantization, f"{method} in blocks of {_shown(block)}")
    elif method == "modelopt":
        algorithm = quantization.raw("quant_algo")
        if algorithm != "FP8":
            raise _unsupported(quantization, f"{method} ({_shown(algorithm)})")
    elif method != "fbgemm_fp8":
        raise _unsupported(quantization, _shown(method))


def _is_e4m3(weights: Fields) -> bool:
    strategy = weights.raw("strategy")
    known = strategy in ("channel", "tensor") or (
        strategy == "block" and weights.raw("block_structure") == _BLOCK_SHAPE
    )
    return bool(known and weights.raw("type") == "float" and weights.raw("num_bits") == 8)


def _unsupported(quantization: Fields, method: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"{quantization.source}: weights quantized by {method} are not implemented; use the f32, f16 or bf16 "
        f"checkpoint, an FP8 one (per tensor, per row, or in blocks of {FP8_BLOCK} x {FP8_BLOCK}), one of AWQ or "
        "GPTQ, or a GGUF file"
    )


def _shown(value: object) -> str:
    text = str(value)
    return text if len(text) <= 80 else text[:77] + "..."


def scale_name(
    weight: str, shape: tuple[int, ...], found: Mapping[str, tuple[int, ...]], source: str
) -> tuple[str, str]:
    """Name of the scales of E4M3 matrix `weight`, and the storage that they make of it.

    Args:
        weight: canonical name.
        shape: of the matrix.
        found: canonical name → shape of all tensors.
        source: file or folder, for messages.

    Raises:
        CheckpointError: there are none, or they have a shape that fits neither rows nor blocks.
    """
    names = [weight + suffix for suffix in _SCALE_SUFFIXES if weight + suffix in found]
    if not names or len(shape) != 2:
        raise CheckpointError(
            f"{source}: tensor '{weight}' holds E4M3 codes, but '{weight}{_SCALE_SUFFIXES[0]}' is missing"
        )
    scales, (rows, columns) = found[names[0]], shape
    blocks = (-(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK))
    if scales == blocks and not (scales == (1, 1) and names[0].endswith("_scale")):
        return names[0], FP8_BLOCK_STORAGE
    if scales in ((), (1,), (1, 1), (rows,), (rows, 1)):
        return names[0], FP8_ROW_STORAGE
    raise CheckpointError(
        f"{source}: tensor '{names[0]}' has shape {list(scales)}; expected one scale, [{rows}] or [{rows}, 1] (one per "
        f"row), or {list(blocks)} (one per block) for {list(shape)} weights"
    )


def checked_scales(name: str, stored: npt.NDArray[np.float32], rows: int, storage: str) -> npt.NDArray[np.float32]:
    """Scales `[rows]`, or those of blocks as they are. Raises CheckpointError for one that cannot be."""
    if not (np.isfinite(stored) & (stored >= 0)).all():
        raise CheckpointError(f"tensor '{name}' holds a scale that is negative or not finite")
    if storage == FP8_BLOCK_STORAGE:
        return stored
    return np.broadcast_to(stored.reshape(-1), rows)


def dequantize(codes: npt.NDArray[np.uint8], scales: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """The weights `[n, k]` that codes and scales (`[n]`, or one per block) stand for."""
    if scales.ndim == 2:
        scales = scales[np.arange(len(codes)) // FP8_BLOCK]
    return dequantize_fp8(codes, scales)
