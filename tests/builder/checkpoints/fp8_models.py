"""FP8 folders of tiny models, as quantizers write them."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.builder.checkpoints.tiny_models import edit

COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "dynamic": False, "symmetric": True},
            "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
        }
    },
    "ignore": ["lm_head"],
}
BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
KINDS = {
    "per row": COMPRESSED,
    "per row, flat": {"quant_method": "fbgemm_fp8", "modules_to_not_convert": ["lm_head"]},
    "per tensor": {"quant_method": "fp8", "activation_scheme": "static"},
    "per tensor, modelopt": {"quant_method": "modelopt", "quant_algo": "FP8"},
    "per block": BLOCKS,
}


def quantize_folder(folder: Path, kind: str, embedding: bool = False, head: bool = False) -> None:
    """Turns the matrices of a folder's model into FP8 of `kind`, and says so in its config."""
    edit(folder, quantization_config=KINDS[kind])
    tensors = load_file(folder / "model.safetensors")
    result = {}
    for name, weight in tensors.items():
        kept = (name.startswith("lm_head") and not head) or ("embed" in name and not embedding)
        if weight.ndim != 2 or kept:
            result[name] = weight
            continue
        codes, scales = _quantized(weight.float(), kind)
        result[name] = codes
        result[name + ("_scale_inv" if kind == "per block" else "_scale")] = scales.clone()
        if kind.startswith("per tensor"):
            result[name.replace(".weight", ".input_scale")] = torch.tensor(0.5)
    save_file(result, folder / "model.safetensors")


def _quantized(weight: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    if kind.startswith("per tensor"):
        scales = whole = weight.abs().max() / 448
    elif kind.startswith("per row"):
        whole = (weight.abs().amax(dim=1, keepdim=True) / 448).bfloat16().float()
        scales = whole.squeeze(1) if kind.endswith("flat") else whole.bfloat16()
    else:
        n, k = weight.shape
        padded = torch.nn.functional.pad(weight, (0, -k % 128, 0, -n % 128))
        blocks = padded.reshape(padded.shape[0] // 128, 128, padded.shape[1] // 128, 128)
        scales = blocks.abs().amax(dim=(1, 3)) / 448
        whole = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[:n, :k]
    return (weight / whole).clamp(-448, 448).to(torch.float8_e4m3fn), scales
