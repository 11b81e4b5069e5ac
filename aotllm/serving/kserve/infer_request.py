"""`InferRequest`: a request to a model, whichever protocol it came in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from aotllm.errors import InvalidRequest
from aotllm.triton_tensors.tensors import InputTensor, Tensor


class Region(NamedTuple):
    """A place in registered shared memory."""

    name: str
    offset: int
    byte_size: int


class RequestedOutput(NamedTuple):
    """A tensor that the client wants."""

    name: str
    binary: bool = True
    """Over HTTP: behind the JSON, not in it"""
    region: Region | None = None
    """Where to put it; None = into the response"""


@dataclass
class InferRequest:
    """What the client sent."""

    model: str
    version: str = ""
    id: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """Values are plain: bool, int, float, str; out of JSON also lists and objects"""
    inputs: Sequence[InputTensor] = ()
    outputs: Sequence[RequestedOutput] = ()
    """Empty = all that there is"""


class InferAnswer(NamedTuple):
    """One response to it."""

    tensors: Sequence[Tensor]
    final: bool = True
    """Nothing comes after it"""


def region_of(name: str, parameters: Mapping[str, Any]) -> Region | None:
    """Where the tensor `name` lies in shared memory. Raises InvalidRequest for a size that is wrong."""
    region = parameters.get("shared_memory_region")
    if region is None:
        return None
    sizes = [parameters.get("shared_memory_offset", 0), parameters.get("shared_memory_byte_size")]
    if not isinstance(region, str) or not all(isinstance(s, int) and not isinstance(s, bool) and s >= 0 for s in sizes):
        raise InvalidRequest(
            f"{name}: shared_memory_region is a name, shared_memory_byte_size and shared_memory_offset are integers "
            f"≥ 0; got {region!r:.80}, {sizes[1]!r:.40} and {sizes[0]!r:.40}",
            name,
        )
    return Region(region, *sizes)
