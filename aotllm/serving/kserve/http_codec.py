"""Between the bodies of `/infer` and ours: JSON, with tensors in it or, as bytes, behind it (binary tensor data)."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
from starlette.responses import Response

from aotllm.errors import InvalidRequest
from aotllm.serving.kserve.infer_request import InferRequest, RequestedOutput, region_of
from aotllm.serving.kserve.models import VERSION
from aotllm.serving.kserve.placement import placed, put_output, raw_input, shared_input
from aotllm.serving.kserve.shared_memory import SystemSharedMemory
from aotllm.triton_tensors.tensors import DataType, InputTensor, Tensor, decode_json

HEADER_LENGTH = "Inference-Header-Content-Length"
_WINDOW_BITS = {"gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}


def json_object(data: bytes | memoryview) -> dict[str, Any]:
    """A body that is a JSON object; an empty one is an empty object. Raises InvalidRequest."""
    if not data:
        return {}
    try:
        body = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None
    if not isinstance(body, dict):
        raise InvalidRequest(f"the body must be a JSON object, got {type(body).__name__}")
    return body


def decompressed(data: bytes, encoding: str, limit: int) -> bytes:
    """A body by its Content-Encoding.

    Raises:
        InvalidRequest: the encoding is unknown, the data is damaged, or longer than `limit` bytes when unpacked.
    """
    if encoding in ("", "identity"):
        return data
    if encoding not in _WINDOW_BITS:
        raise InvalidRequest(f"Content-Encoding must be gzip, deflate or identity, got {encoding!r:.40}")
    unpacker = zlib.decompressobj(_WINDOW_BITS[encoding])
    try:
        unpacked = unpacker.decompress(data, limit + 1)
    except zlib.error as error:
        raise InvalidRequest(f"the body is no {encoding} data: {error}") from None
    if len(unpacked) > limit:
        raise InvalidRequest(f"the body is longer than {limit} bytes when unpacked")
    if not unpacker.eof:
        raise InvalidRequest(f"the body is no complete {encoding} data")
    return unpacked


def request_of(
    model: str, version: str, data: bytes, header_length: str | None, shared_memory: SystemSharedMemory
) -> InferRequest:
    """The body of `/infer`.

    Args:
        model, version: of the URL.
        data: JSON, and behind it the data of binary tensors.
        header_length: length of the JSON in bytes; None = all of it.

    Raises:
        InvalidRequest: a part is missing, of a wrong type, or the sizes are wrong.
    """
    length = len(data)
    if header_length is not None:
        # Of at most 20 digits: Python refuses to convert thousands.
        if not re.fullmatch("[0-9]{1,20}", header_length) or int(header_length) > length:
            raise InvalidRequest(
                f"{HEADER_LENGTH} must be an integer of at most {length}, the length of the body, got "
                f"{header_length!r:.40}"
            )
        length = int(header_length)
    body = json_object(memoryview(data)[:length])
    parameters = _object(body, "parameters")
    return InferRequest(
        model=model,
        version=version,
        id=_string(body, "id"),
        parameters=parameters,
        inputs=list(_inputs(_objects(body, "inputs"), memoryview(data)[length:], shared_memory)),
        outputs=[_requested(o, parameters.get("binary_data_output") is True) for o in _objects(body, "outputs")],
    )


def response_of(request: InferRequest, tensors: Sequence[Tensor], shared_memory: SystemSharedMemory) -> Response:
    """The response of `/infer`. Raises InvalidRequest or RegionNotFound for shared memory that it does not fit in."""
    binary_default = request.parameters.get("binary_data_output") is True
    outputs, tail = [], []
    for tensor, requested in placed(request, tensors):
        output: dict[str, Any] = {"name": tensor.name, "datatype": tensor.datatype.name, "shape": list(tensor.shape)}
        if requested is not None and requested.region is not None:
            data = tensor.to_bytes()
            put_output(tensor.name, requested.region, data, shared_memory)
            output["parameters"] = {
                "shared_memory_region": requested.region.name,
                "shared_memory_offset": requested.region.offset,
                "shared_memory_byte_size": len(data),
            }
        elif binary_default if requested is None else requested.binary:
            tail.append(tensor.to_bytes())
            output["parameters"] = {"binary_data_size": len(tail[-1])}
        else:
            output["data"] = tensor.to_json()
        outputs.append(output)
    body = {"model_name": request.model, "model_version": VERSION, "outputs": outputs}
    head = msgspec.json.encode({"id": request.id, **body} if request.id else body)
    if not tail:
        return Response(head, media_type="application/json")
    headers = {HEADER_LENGTH: str(len(head))}
    return Response(b"".join([head, *tail]), media_type="application/octet-stream", headers=headers)


def _inputs(
    inputs: Sequence[Mapping[str, Any]], tail: memoryview, shared_memory: SystemSharedMemory
) -> Iterator[InputTensor]:
    for tensor in inputs:
        name, datatype = _string(tensor, "name"), _string(tensor, "datatype")
        shape = tensor.get("shape")
        if not isinstance(shape, list):
            raise InvalidRequest(f"{name}: the shape must be a list, got {shape!r:.60}", name)
        parameters = _object(tensor, "parameters")
        region = region_of(name, parameters)
        size = parameters.get("binary_data_size")
        if region is not None:
            yield shared_input(name, datatype, shape, region, shared_memory)
        elif size is not None:
            if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size <= len(tail):
                raise InvalidRequest(
                    f"{name}: binary_data_size must be an integer of at most {len(tail)}, the bytes that are left "
                    f"behind the JSON, got {size!r:.40}",
                    name,
                )
            yield raw_input(name, datatype, shape, tail[:size])
            tail = tail[size:]
        else:
            yield _json_input(name, datatype, shape, tensor.get("data"))
    if tail:
        raise InvalidRequest(f"{len(tail)} bytes are left behind the binary data of the inputs")


def _json_input(name: str, datatype: str, shape: list[Any], data: Any) -> InputTensor:
    def decode(kind: DataType) -> list[Any]:
        return decode_json(name, kind, shape, data)

    return InputTensor(name, datatype, shape, decode)


def _requested(output: Mapping[str, Any], binary_default: bool) -> RequestedOutput:
    name, parameters = _string(output, "name"), _object(output, "parameters")
    if parameters.get("classification"):
        raise InvalidRequest(f"{name}: classification is not implemented; leave it out", name)
    binary = parameters.get("binary_data", binary_default)
    if not isinstance(binary, bool):
        raise InvalidRequest(f"{name}: binary_data must be a boolean, got {binary!r:.40}", name)
    return RequestedOutput(name, binary, region_of(name, parameters))


def _string(body: Mapping[str, Any], name: str) -> str:
    value = body.get(name, "")
    if not isinstance(value, str):
        raise InvalidRequest(f"{name} must be a string, got {value!r:.60}", name)
    return value


def _object(body: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = body.get(name) or {}
    if not isinstance(value, dict):
        raise InvalidRequest(f"{name} must be an object, got {value!r:.60}", name)
    return value


def _objects(body: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    value = body.get(name) or []
    if not isinstance(value, list) or not all(isinstance(element, dict) for element in value):
        raise InvalidRequest(f"{name} must be a list of objects, got {value!r:.60}", name)
    return value
