"""Between the messages of gRPC and ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from aotllm.errors import InvalidRequest
from aotllm.serving.kserve.infer_request import InferRequest, Region, RequestedOutput, region_of
from aotllm.serving.kserve.models import VERSION
from aotllm.serving.kserve.placement import placed, put_output, raw_input, shared_input
from aotllm.serving.kserve.protocol.messages import ModelInferResponse, ModelStreamInferResponse
from aotllm.serving.kserve.shared_memory import SystemSharedMemory
from aotllm.triton_tensors.answers import Step
from aotllm.triton_tensors.tensors import DataType, InputTensor, Tensor, bytes_element, decode_contents

FINAL = "triton_final_response"
EMPTY_FINAL = "triton_enable_empty_final_response"

_RAW_OUTPUT = b"\x32"  # ModelInferResponse.raw_output_contents: field 6, length-delimited
_INFER_RESPONSE = b"\x12"  # ModelStreamInferResponse.infer_response: field 2, length-delimited


def request_of(message: Any, shared_memory: SystemSharedMemory) -> InferRequest:
    """A ModelInferRequest. Raises InvalidRequest where its parts contradict each other."""
    return InferRequest(
        model=message.model_name,
        version=message.model_version,
        id=message.id,
        parameters=_plain(message.parameters),
        inputs=list(_inputs(message, shared_memory)),
        outputs=[_requested(output) for output in message.outputs],
    )


def response_of(
    request: InferRequest, tensors: Sequence[Tensor], shared_memory: SystemSharedMemory, final: bool | None = None
) -> Any:
    """A ModelInferResponse. `final`: None = it does not say.

    Raises:
        InvalidRequest: an output does not fit in the shared memory it is to go to.
        RegionNotFound: there is no such region.
    """
    message = ModelInferResponse(model_name=request.model, model_version=VERSION, id=request.id)
    if final is not None:
        message.parameters[FINAL].bool_param = final
    for tensor, requested in placed(request, tensors):
        output = message.outputs.add(name=tensor.name, datatype=tensor.datatype.name, shape=tensor.shape)
        data = tensor.to_bytes()
        if requested is not None and requested.region is not None:
            put_output(tensor.name, requested.region, data, shared_memory)
            _tell_region(output, requested.region, len(data))
            data = b""  # an entry in any case: clients count them
        message.raw_output_contents.append(data)
    return message


class StepEncoder:
    """Writes the steps of one request as serialized ModelStreamInferResponses.

    Where a step is nothing but text, the message differs from the last one in this text only: the rest is serialized
    once, and the text put in between. Protocol buffers allow for that, whatever the order of the fields.

    Args:
        request: what is answered.
        tensors_of: the tensors of a step.
        plain: steps have text only, and whose it is: `text_output`, and after it what `tensors_of` gives.
        flags_last: the last step says that it is the last one.
    """

    def __init__(
        self,
        request: InferRequest,
        tensors_of: Callable[[Step], list[Tensor]],
        plain: bool,
        flags_last: bool,
        shared_memory: SystemSharedMemory,
    ) -> None:
        self._request = request
        self._tensors_of = tensors_of
        self._plain = plain and not any(output.region for output in request.outputs)
        self._flags_last = flags_last
        self._shared_memory = shared_memory
        self._frames: dict[tuple[int, int, bool], tuple[bytes, bytes]] = {}

    def encode(self, step: Step) -> bytes:
        """The message of one step."""
        final = step.final and self._flags_last
        if not self._plain:
            message = response_of(self._request, self._tensors_of(step), self._shared_memory, final)
            return in_stream(message.SerializeToString())
        key = step.prompt, step.output.index, final
        frame = self._frames.get(key)
        if frame is None:
            frame = self._frames[key] = self._frame(step, final)
        head, tail = frame
        element = bytes_element(step.output.text)
        return in_stream(b"".join((head, _RAW_OUTPUT, _varint(len(element)), element, tail)))

    def end(self) -> bytes:
        """An empty message that says that nothing comes after it."""
        return in_stream(response_of(self._request, [], self._shared_memory, final=True).SerializeToString())

    def _frame(self, step: Step, final: bool) -> tuple[bytes, bytes]:
        """What comes before the text, and after it."""
        message = response_of(self._request, self._tensors_of(step), self._shared_memory, final)
        others = list(message.raw_output_contents)[1:]
        del message.raw_output_contents[:]
        tail = b"".join(_RAW_OUTPUT + _varint(len(raw)) + raw for raw in others)
        return message.SerializeToString(), tail


def in_stream(response: bytes) -> bytes:
    """A serialized ModelInferResponse as a serialized ModelStreamInferResponse."""
    return b"".join((_INFER_RESPONSE, _varint(len(response)), response))


def error_in_stream(message: str, request_id: str) -> bytes:
    """The failure of one request of a stream, serialized."""
    response = ModelStreamInferResponse(error_message=message)
    response.infer_response.id = request_id
    return bytes(response.SerializeToString())


def _varint(value: int) -> bytes:
    if value < 0x80:
        return value.to_bytes(1, "little")
    data = bytearray()
    while value >= 0x80:
        data.append(value & 0x7F | 0x80)
        value >>= 7
    data.append(value)
    return bytes(data)


def _plain(parameters: Any) -> dict[str, Any]:
    chosen = ((name, value, value.WhichOneof("parameter_choice")) for name, value in parameters.items())
    return {name: getattr(value, choice) for name, value, choice in chosen if choice is not None}


def _inputs(message: Any, shared_memory: SystemSharedMemory) -> Iterator[InputTensor]:
    raw = iter(message.raw_input_contents)
    has_raw = len(message.raw_input_contents) > 0
    regions = [region_of(tensor.name, _plain(tensor.parameters)) for tensor in message.inputs]
    direct = sum(region is None for region in regions)
    if has_raw and len(message.raw_input_contents) != direct:
        raise InvalidRequest(
            f"raw_input_contents has {len(message.raw_input_contents)} entries for {direct} inputs outside of shared "
            "memory; give one for each",
            "raw_input_contents",
        )
    for tensor, region in zip(message.inputs, regions, strict=True):
        if has_raw and tensor.HasField("contents"):
            raise InvalidRequest(f"{tensor.name} has contents, though there are raw_input_contents", tensor.name)
        if region is not None:
            yield shared_input(tensor.name, tensor.datatype, tensor.shape, region, shared_memory)
        elif has_raw:
            yield raw_input(tensor.name, tensor.datatype, tensor.shape, next(raw))
        else:
            yield _typed_input(tensor.name, tensor.datatype, tensor.shape, tensor.contents)


def _typed_input(name: str, datatype: str, shape: Sequence[int], contents: Any) -> InputTensor:
    def decode(kind: DataType) -> list[Any]:
        return decode_contents(name, kind, shape, contents)

    return InputTensor(name, datatype, shape, decode)


def _requested(output: Any) -> RequestedOutput:
    parameters = _plain(output.parameters)
    if parameters.get("classification"):
        raise InvalidRequest(f"{output.name}: classification is not implemented; leave it out", output.name)
    return RequestedOutput(output.name, region=region_of(output.name, parameters))


def _tell_region(output: Any, region: Region, size: int) -> None:
    output.parameters["shared_memory_region"].string_param = region.name
    output.parameters["shared_memory_byte_size"].int64_param = size
    if region.offset:
        output.parameters["shared_memory_offset"].int64_param = region.offset
