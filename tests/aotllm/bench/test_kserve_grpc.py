"""`ModelStreamInfer` against a gRPC server with the messages of Triton's client."""

from __future__ import annotations

import asyncio
import struct
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from types import ModuleType
from typing import Any

import pytest

from aotllm.bench.backends.base import RequestSettings
from aotllm.bench.backends.kserve_grpc import _PROTOCOL, KServeGrpcBackend, encode
from aotllm.bench.conversation import Message
from aotllm.bench.record import RequestFailed, RequestRecord
from aotllm.errors import AotllmError, InvalidRequest

grpc = pytest.importorskip("grpc")
pb = pytest.importorskip("tritonclient.grpc.service_pb2")

METHOD = "/inference.GRPCInferenceService/ModelStreamInfer"
Answer = Callable[[Any, Any], AsyncIterator[Any]]


@pytest.fixture(autouse=True)
def protocol(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's own messages: whatever ours are, they are the same on the wire."""
    monkeypatch.setitem(sys.modules, _PROTOCOL, pb)


def response(text: str, in_contents: bool = False, **counts: int) -> Any:
    inner = pb.ModelInferResponse(model_name="m")
    inner.outputs.add(name="text_output", datatype="BYTES", shape=[1])
    if in_contents:
        inner.outputs[0].contents.bytes_contents.append(text.encode())
    else:
        inner.raw_output_contents.append(struct.pack("<I", len(text.encode())) + text.encode())
    for name, count in counts.items():
        inner.outputs.add(name=name, datatype="INT32", shape=[1, 1])
        if in_contents:
            inner.outputs[-1].contents.int_contents.append(count)
        else:
            inner.raw_output_contents.append(struct.pack("<i", count))
    return pb.ModelStreamInferResponse(infer_response=inner)


FINAL = pb.ModelStreamInferResponse(infer_response=pb.ModelInferResponse(model_name="m"))


def ask(answer: Answer, settings: RequestSettings | None = None) -> tuple[RequestRecord, list[Any]]:
    """The record of one request at clock times 1, 2, …, and the messages that the server got."""
    got: list[Any] = []
    record, ticks = RequestRecord(), iter(range(1, 100))

    async def stream_infer(requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        async for request in requests:
            got.append(request)
            async for message in answer(request, context):
                yield message

    async def work() -> None:
        handler = grpc.stream_stream_rpc_method_handler(
            stream_infer, pb.ModelInferRequest.FromString, pb.ModelStreamInferResponse.SerializeToString
        )
        server = grpc.aio.server()
        server.add_generic_rpc_handlers(
            [grpc.method_handlers_generic_handler(METHOD.split("/")[1], {METHOD.split("/")[2]: handler})]
        )
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        backend = KServeGrpcBackend(f"127.0.0.1:{port}", {"X-Key": "k"}, clock=lambda: float(next(ticks)))
        try:
            messages = [Message("user", "hé")]
            await backend.generate(messages, 9, settings or RequestSettings("m"), record)
        finally:
            await backend.close()
            await server.stop(None)

    asyncio.run(work())
    return record, got


def says(*messages: Any) -> Answer:
    async def answer(request: Any, context: Any) -> AsyncIterator[Any]:
        for message in messages:
            yield message

    return answer


@pytest.mark.parametrize("in_contents", [False, True])
def test_an_answer(in_contents: bool):
    first = response("é", in_contents, num_input_tokens=7, num_output_tokens=1)
    second = response("b", in_contents, num_input_tokens=7, num_output_tokens=1)
    record, _ = ask(says(first, second, FINAL))
    assert (record.text, record.prompt_tokens, record.output_tokens) == ("éb", 7, 2)
    assert list(record.chunk_times) == [1.0, 2.0]  # the empty last response carries nothing


def test_the_request_is_as_tritons_client_sends_it():
    settings = RequestSettings("m", 0.5, ignore_eos=True, extra_body={"top_k": 3, "stop_words": "x"})
    _, (request,) = ask(says(response("a")), settings)
    raw = dict(zip((tensor.name for tensor in request.inputs), request.raw_input_contents, strict=True))
    kinds = {tensor.name: (tensor.datatype, list(tensor.shape)) for tensor in request.inputs}
    assert request.model_name == "m"
    assert raw["text_input"] == b"\x03\x00\x00\x00" + "hé".encode()
    assert raw["max_tokens"] == raw["min_tokens"] == b"\x09\x00\x00\x00"
    assert raw["temperature"] == struct.pack("<f", 0.5)
    assert raw["stream"] == b"\x01"
    assert raw["top_k"] == b"\x03\x00\x00\x00"
    assert raw["stop_words"] == b"\x01\x00\x00\x00x"
    assert kinds["text_input"] == ("BYTES", [1, 1])
    assert [kinds[name][0] for name in ("max_tokens", "temperature", "stream")] == ["INT32", "FP32", "BOOL"]


async def refuses(request: Any, context: Any) -> AsyncIterator[Any]:
    await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "no such tensor")
    yield FINAL


@pytest.mark.parametrize(
    ("answer", "kind", "message"),
    [
        (says(response("a"), pb.ModelStreamInferResponse(error_message="full")), "stream", "full"),
        (refuses, "grpc_invalid_argument", "no such tensor"),
        (says(FINAL), "incomplete", "without a response"),
    ],
)
def test_failures_by_kind(answer: Answer, kind: str, message: str):
    with pytest.raises(RequestFailed, match=message) as failure:
        ask(answer)
    assert failure.value.error_kind == kind


def test_nobody_listens():
    async def work() -> None:
        backend = KServeGrpcBackend("127.0.0.1:1")
        try:
            await backend.generate([Message("user", "a")], 1, RequestSettings("m"), RequestRecord())
        finally:
            await backend.close()

    with pytest.raises(RequestFailed) as failure:
        asyncio.run(work())
    assert failure.value.error_kind == "connection"


@pytest.mark.parametrize("url", ["", "ftp://host:1", "grpc://"])
def test_urls_that_are_none(url: str):
    with pytest.raises(InvalidRequest, match="--url takes"):
        KServeGrpcBackend(url)


@pytest.mark.parametrize("value", [None, [1], {"a": 1}])
def test_values_that_are_no_tensor(value: Any):
    with pytest.raises(InvalidRequest, match="must be a string, number or boolean"):
        encode("x", value)


def test_without_the_messages_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    missing: Sequence[ModuleType | None] = [None]
    monkeypatch.setitem(sys.modules, _PROTOCOL, missing[0])
    with pytest.raises(AotllmError, match="kserve-grpc needs"):
        KServeGrpcBackend("127.0.0.1:1")
