"""KServe over gRPC: `ModelStreamInfer`, one stream per request, as Triton's decoupled models answer."""

from __future__ import annotations

import importlib
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from aotllm.bench.backends.base import RequestSettings
from aotllm.bench.backends.kserve import TokenCounts, inputs_of
from aotllm.bench.conversation import Message
from aotllm.bench.record import RequestFailed, RequestRecord
from aotllm.errors import AotllmError, InvalidRequest

_METHOD = "/inference.GRPCInferenceService/ModelStreamInfer"
_PROTOCOL = "aotllm.serving.kserve.protocol.messages"

_DATATYPES = {"max_tokens": "INT32", "min_tokens": "INT32", "top_k": "INT32", "seed": "UINT64"}
_LITTLE_ENDIAN = {"INT32": (4, True), "UINT64": (8, False), "INT64": (8, True)}


class KServeGrpcBackend:
    """Takes `[grpc://|http://]HOST:PORT`, and `grpcs://` or `https://` for TLS.

    Raises:
        AotllmError: grpcio or the protocol's messages are not there.
        InvalidRequest: not such a URL.
    """

    name = "kserve-grpc"

    def __init__(
        self, url: str, headers: Mapping[str, str] | None = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        try:
            import grpc  # type: ignore[import-untyped]
            import grpc.aio  # type: ignore[import-untyped]

            self._protocol: Any = importlib.import_module(_PROTOCOL)
        except ImportError as error:
            raise AotllmError(f"--backend kserve-grpc needs {error.name}: pip install 'aotllm[bench]'") from None
        scheme, target = _target(url)
        options = [("grpc.max_receive_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
        secure = scheme in ("grpcs", "https")
        self._channel: Any = (
            grpc.aio.secure_channel(target, grpc.ssl_channel_credentials(), options)
            if secure
            else grpc.aio.insecure_channel(target, options)
        )
        self._stream = self._channel.stream_stream(
            _METHOD,
            request_serializer=self._protocol.ModelInferRequest.SerializeToString,
            response_deserializer=self._protocol.ModelStreamInferResponse.FromString,
        )
        self._metadata = tuple((name.lower(), value) for name, value in (headers or {}).items())
        self._clock = clock
        self._rpc_error: type[Exception] = grpc.RpcError

    async def generate(
        self, messages: Sequence[Message], max_tokens: int, settings: RequestSettings, record: RequestRecord
    ) -> None:
        """Part of `Backend`."""
        request = self._request(settings.model, inputs_of(messages, max_tokens, settings))
        counts, last = TokenCounts(record), None

        async def requests() -> AsyncIterator[Any]:
            yield request

        call = self._stream(requests(), metadata=self._metadata)
        try:
            async for response in call:
                now = self._clock()
                if response.error_message:
                    raise RequestFailed("stream", f"error within the stream: {response.error_message}")
                outputs = outputs_of(response.infer_response)
                if outputs:
                    last = now
                    counts.response(
                        now,
                        outputs.get("text_output", b"").decode("utf-8", "replace"),
                        _integer(outputs.get("num_input_tokens")),
                        _integer(outputs.get("num_output_tokens")),
                    )
        except self._rpc_error as error:
            code = error.code()  # type: ignore[attr-defined]
            kind = "connection" if code.name == "UNAVAILABLE" else f"grpc_{code.name.lower()}"
            raise RequestFailed(kind, f"gRPC {code.name}: {error.details()}") from None  # type: ignore[attr-defined]
        finally:
            call.cancel()
        if last is None:
            raise RequestFailed("incomplete", "the stream ended without a response")
        counts.finish(last)

    async def close(self) -> None:
        """Part of `Backend`."""
        await self._channel.close()

    def _request(self, model: str, inputs: Mapping[str, Any]) -> Any:
        request = self._protocol.ModelInferRequest(model_name=model)
        for name, value in inputs.items():
            datatype, raw = encode(name, value)
            request.inputs.add(name=name, datatype=datatype, shape=[1, 1])
            request.raw_input_contents.append(raw)
        return request


def encode(name: str, value: Any) -> tuple[str, bytes]:
    """Datatype and raw contents of a tensor with one element.

    Raises:
        InvalidRequest: no tensor has such a value.
    """
    if isinstance(value, bool):
        return "BOOL", bytes([value])
    if isinstance(value, str):
        text = value.encode()
        return "BYTES", len(text).to_bytes(4, "little") + text
    if isinstance(value, (int, float)) and (isinstance(value, float) or name not in _DATATYPES):
        import struct

        return "FP32", struct.pack("<f", value)
    if isinstance(value, int):
        datatype = _DATATYPES[name]
        size, signed = _LITTLE_ENDIAN[datatype]
        return datatype, value.to_bytes(size, "little", signed=signed)
    raise InvalidRequest(f"{name} must be a string, number or boolean for KServe, got {value!r}", "extra_body")


def outputs_of(response: Any) -> dict[str, bytes]:
    """Tensor name → raw bytes of its first element (of BYTES: the string), of a `ModelInferResponse`."""
    outputs = {}
    raws = list(response.raw_output_contents)
    for index, tensor in enumerate(response.outputs):
        if index < len(raws):
            raw = raws[index]
            if tensor.datatype == "BYTES":
                raw = raw[4 : 4 + int.from_bytes(raw[:4], "little")]
        elif tensor.datatype == "BYTES":
            raw = b"".join(tensor.contents.bytes_contents)
        else:
            numbers = [*tensor.contents.int_contents, *tensor.contents.int64_contents]
            raw = numbers[0].to_bytes(8, "little", signed=True) if numbers else b""
        outputs[tensor.name] = raw
    return outputs


def _integer(raw: bytes | None) -> int | None:
    return int.from_bytes(raw, "little", signed=True) if raw else None


def _target(url: str) -> tuple[str, str]:
    parts = urlsplit(url if "://" in url else f"grpc://{url}")
    if parts.scheme not in ("grpc", "grpcs", "http", "https") or not parts.netloc:
        raise InvalidRequest(f"--url takes HOST:PORT or grpcs://HOST:PORT for kserve-grpc, got {url!r}", "url")
    return parts.scheme, parts.netloc
