"""What a target makes of a model: a plan and a list of tensors for each rank, as jobs that the build runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import onnx_ir as ir

from aotllm.engines.rank_file import TensorSpec

Part = Callable[[], npt.NDArray[Any]]


@dataclass(frozen=True)
class TensorJob:
    """A tensor of a rank's file, made in pieces: no build holds more of a model than a few of them."""

    tensor: str
    spec: TensorSpec
    parts: tuple[Part, ...]
    """Each makes the next piece of the tensor. Parts run on any thread and in any order, but see `in_order`"""
    weight_format: str | None = None
    """Under which the manifest counts the tensor's bytes; None = not a weight that is packed"""
    in_order: bool = False
    """The parts are only run when all tensors before this one are complete; they are quick"""


def ready(tensor: str, array: npt.NDArray[Any]) -> TensorJob:
    """The job of a small float32 tensor that exists already."""
    return TensorJob(tensor, TensorSpec("F32", array.shape), (lambda: array,), in_order=True)


@dataclass(frozen=True)
class RankProgram:
    """What one rank's file holds."""

    plan: Mapping[str, Any]
    tensors: tuple[TensorJob, ...]
    """In the order of the file"""


@dataclass(frozen=True)
class CompiledModel:
    """What a target made of a model."""

    graph: ir.Model
    """Fused"""
    ranks: tuple[RankProgram, ...]
    requires: tuple[str, ...]
    """Features that the machine must have"""
