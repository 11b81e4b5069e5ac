"""Where the data of tensors lies: in the message itself or in shared memory, in both protocols alike."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from aotllm.errors import InvalidRequest
from aotllm.serving.kserve.infer_request import InferRequest, Region, RequestedOutput
from aotllm.serving.kserve.shared_memory import SystemSharedMemory
from aotllm.triton_tensors.tensors import DataType, InputTensor, Tensor, decode_raw


def raw_input(name: str, datatype: str, shape: Sequence[int], data: bytes | memoryview) -> InputTensor:
    """An input whose data came as bytes."""

    def decode(kind: DataType) -> list[Any]:
        return decode_raw(name, kind, shape, data)

    return InputTensor(name, datatype, shape, decode)


def shared_input(
    name: str, datatype: str, shape: Sequence[int], region: Region, shared_memory: SystemSharedMemory
) -> InputTensor:
    """An input whose data lies in shared memory."""

    def decode(kind: DataType) -> list[Any]:
        return decode_raw(name, kind, shape, shared_memory.read(*region))

    return InputTensor(name, datatype, shape, decode)


def placed(request: InferRequest, tensors: Sequence[Tensor]) -> Iterator[tuple[Tensor, RequestedOutput | None]]:
    """The tensors of a response, each with what the client said of it."""
    requested = {output.name: output for output in request.outputs}
    for tensor in tensors:
        yield tensor, requested.get(tensor.name)


def put_output(name: str, region: Region, data: bytes, shared_memory: SystemSharedMemory) -> None:
    """Write an output to shared memory.

    Raises:
        InvalidRequest: it does not fit there.
        RegionNotFound: there is no such region.
    """
    if len(data) > region.byte_size:
        raise InvalidRequest(
            f"{name} has {len(data)} bytes, but shared_memory_byte_size allows {region.byte_size}; give it more", name
        )
    shared_memory.write(region.name, region.offset, data)
