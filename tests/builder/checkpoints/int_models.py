"""AWQ and GPTQ folders of tiny models, packed bit by bit from what the formats define."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.builder.checkpoints.tiny_models import edit

AWQ_OUTPUTS = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of 8 outputs each nibble of a word is, the lowest first"""


@dataclass(frozen=True)
class Kind:
    """One way to quantize a folder."""

    method: str
    bits: int
    group: int
    symmetric: bool = False
    version: str = "gptq"
    scale_type: torch.dtype = torch.float16

    def config(self) -> dict[str, Any]:
        """What quantizers write into `config.json`."""
        common = {"quant_method": self.method, "bits": self.bits, "group_size": self.group}
        if self.method == "awq":
            return {**common, "zero_point": True, "version": "gemm", "modules_to_not_convert": None}
        return {
            **common,
            "desc_act": False,
            "sym": self.symmetric,
            "damp_percent": 0.1,
            "true_sequential": True,
            "checkpoint_format": self.version,
        }


KINDS = {
    "awq": Kind("awq", 4, 128),
    "awq, groups of 64": Kind("awq", 4, 64),
    "awq, groups of 32": Kind("awq", 4, 32, scale_type=torch.bfloat16),
    "gptq": Kind("gptq", 4, 128),
    "gptq, symmetric": Kind("gptq", 4, 128, symmetric=True),
    "gptq, whole rows": Kind("gptq", 4, -1),
    "gptq, groups of 32, v2": Kind("gptq", 4, 32, version="gptq_v2"),
    "gptq, 8 bits": Kind("gptq", 8, 64),
    "gptq, 8 bits, symmetric": Kind("gptq", 8, 128, symmetric=True),
}


def quantize_folder(folder: Path, kind: Kind, head: bool = False) -> dict[str, torch.Tensor]:
    """Turns the matrices of the layers into integers; returns what each then stands for, float32 `[n, k]`."""
    edit(folder, quantization_config=kind.config())
    result, meant = {}, {}
    for name, weight in load_file(folder / "model.safetensors").items():
        is_router = name.endswith(("block_sparse_moe.gate.weight", "mlp.gate.weight"))
        if weight.ndim != 2 or is_router or "embed" in name or (name.startswith("lm_head") and not head):
            result[name] = weight
            continue
        codes, scales, zeros = quantize(weight.float(), kind)
        of_input = torch.arange(weight.shape[1]) // group_of(kind, weight.shape[1])
        meant[name] = scales.float()[:, of_input] * (codes - zeros[:, of_input]).float()
        stem = name.removesuffix("weight")
        parts = pack(codes, scales, zeros, kind)
        result.update({stem + part: tensor.contiguous() for part, tensor in parts.items()})
    save_file(result, folder / "model.safetensors")
    return meant


def group_of(kind: Kind, k: int) -> int:
    return k if kind.group == -1 else kind.group


def quantize(weight: torch.Tensor, kind: Kind) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes [n, k], scales and zeros [n, groups]: rounded to nearest, as good as any."""
    top = 2**kind.bits - 1
    groups = weight.reshape(weight.shape[0], -1, group_of(kind, weight.shape[1]))
    if kind.symmetric:
        scales = (groups.abs().amax(2) * 2 / top).to(kind.scale_type)
        zeros = torch.full(scales.shape, (top + 1) // 2)
    else:
        low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
        scales = ((high - low) / top).to(kind.scale_type)
        zeros = (-low / scales.float()).round().clamp(0, top).long()
    codes = (groups / scales.float()[..., None]).round().long() + zeros[..., None]
    return codes.clamp(0, top).reshape(weight.shape), scales, zeros


def pack(codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, kind: Kind) -> dict[str, torch.Tensor]:
    """The tensors of a matrix, by the last part of their names."""
    k = codes.shape[1]
    per_word = 32 // kind.bits
    if kind.method == "awq":
        return {
            "qweight": words(codes.T, kind.bits, AWQ_OUTPUTS),
            "qzeros": words(zeros.T, kind.bits, AWQ_OUTPUTS),
            "scales": scales.T,
        }
    in_order = tuple(range(per_word))
    stored = zeros if kind.version == "gptq_v2" else (zeros - 1) % 2**kind.bits
    return {
        "qweight": words(codes, kind.bits, in_order).T,
        "qzeros": words(stored.T, kind.bits, in_order),
        "scales": scales.T,
        "g_idx": (torch.arange(k) // group_of(kind, k)).int(),
    }


def words(values: torch.Tensor, bits: int, order: tuple[int, ...]) -> torch.Tensor:
    """[rows, columns] → int32 [rows, columns / len(order)]: nibble i of a word is column `order[i]` of its columns."""
    result = torch.zeros(values.shape[0], values.shape[1] // len(order), dtype=torch.int64)
    for i, column in enumerate(order):
        result |= values[:, column :: len(order)].long() << (bits * i)
    return torch.where(result >= 2**31, result - 2**32, result).int()
