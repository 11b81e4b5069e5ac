"""What FP8 engines compute, in float32: E4M3 with a scale for each row of a matrix and for each token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from aotllm.builder.numerics import dequantize_fp8, quantize_e4m3


def round_to_e4m3(x: Any) -> Any:
    """The nearest values that codes of E4M3 with one scale for each row of the last dimension stand for."""
    import torch

    scale = x.abs().amax(-1, keepdim=True).clamp_min(1e-12) / 448.0
    return (x / scale).to(torch.float8_e4m3fn).float() * scale


def with_scales(weight: Any, search: bool) -> Any:
    """What an engine's codes and scales of a matrix `[n, k]` stand for."""
    import torch

    codes, scales = quantize_e4m3(weight.numpy(), slice(0, weight.shape[1]), search)
    return torch.from_numpy(dequantize_fp8(codes, scales))


def emulate_fp8(
    model: Any,
    weights: str | None = "search",
    activations: bool = True,
    keeps: Callable[[str], bool] = lambda name: False,
) -> Any:
    """The layers' matrices of a model of transformers multiply as in FP8; returns the model.

    Args:
        model: is changed.
        weights: round them to codes with scales as of `BuildOptions.fp8_scales`; None = leave them.
        activations: round what they are multiplied by.
        keeps: name of a module -> whether it stays as it is.
    """
    import torch

    for name, module in model.named_modules():
        if not isinstance(module, torch.nn.Linear) or name == "lm_head" or keeps(name):
            continue
        if weights is not None:
            module.weight.data = with_scales(module.weight.data, weights == "search")
        if activations:
            module.register_forward_pre_hook(lambda _, inputs: (round_to_e4m3(inputs[0]),))
    return model
