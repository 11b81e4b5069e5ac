"""`create_grpc_server`: KServe v2 and Triton's extensions over gRPC."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.json_format import ParseDict
from google.protobuf.message import DecodeError

from aotllm.errors import AotllmError
from aotllm.serving.context import ServingContext
from aotllm.serving.kserve.errors import fault, grpc_status, sentence
from aotllm.serving.kserve.health import health_handler
from aotllm.serving.kserve.inference import Inference
from aotllm.serving.kserve.model_control import ModelControl
from aotllm.serving.kserve.protocol.messages import SERVICE, message_class
from aotllm.serving.kserve.rpcs import Rpcs
from aotllm.serving.kserve.stream_infer import stream_infer

RpcContext = Any
"""grpc.aio.ServicerContext, whose type has parameters that differ between versions"""

_OPEN = ("ServerLive", "ServerReady", "ModelReady")
"""RPCs that need no key"""


def create_grpc_server(context: ServingContext) -> grpc.aio.Server:
    """A server that is not started and has no port yet: the caller adds ports, with TLS or without. Made on the event
    loop that runs it."""
    inference = Inference.of(context)
    server = grpc.aio.server(
        options=[
            ("grpc.max_receive_message_length", context.options.max_body_bytes),
            ("grpc.max_send_message_length", -1),
        ]
    )
    guard = _Guard(context.options.api_key)
    rpcs = Rpcs(inference, ModelControl(inference))
    handlers = {method.name: _handler(method, rpcs, guard, inference) for method in SERVICE.methods}
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(SERVICE.full_name, handlers), health_handler(inference))
    )
    return server


class _Guard:
    """Lets those in who bring one of the keys."""

    def __init__(self, keys: tuple[str, ...]) -> None:
        self._keys = [key.encode() for key in keys]

    async def check(self, rpc: RpcContext) -> None:
        """Ends the RPC as UNAUTHENTICATED without `authorization: Bearer KEY`."""
        if not self._keys:
            return
        metadata = dict(rpc.invocation_metadata() or ())
        scheme, _, token = str(metadata.get("authorization", "")).partition(" ")
        # Compare with every key, each in constant time, so that the time taken tells nothing.
        matches = [secrets.compare_digest(token.strip().encode(), key) for key in self._keys]
        if scheme.lower() != "bearer" or not any(matches):
            await rpc.abort(
                grpc.StatusCode.UNAUTHENTICATED, "send one of the server's keys as authorization: Bearer KEY"
            )


def _handler(method: Any, rpcs: Rpcs, guard: _Guard, inference: Inference) -> grpc.RpcMethodHandler:
    # Messages are parsed and serialized here, not by gRPC, which would call one that cannot be read INTERNAL.
    if method.server_streaming:
        return grpc.stream_stream_rpc_method_handler(_streaming(guard, inference))
    request_class = message_class(method.input_type.name)
    response_class = message_class(method.output_type.name)
    answer = getattr(rpcs, method.name)
    is_open = method.name in _OPEN

    async def unary(data: bytes, rpc: RpcContext) -> bytes:
        if not is_open:
            await guard.check(rpc)
        try:
            response = await answer(request_class.FromString(data), rpc)
            if isinstance(response, dict):
                response = ParseDict(response, response_class())
            return bytes(response.SerializeToString())
        except DecodeError as error:
            await rpc.abort(grpc.StatusCode.INVALID_ARGUMENT, f"the message is no {request_class.__name__}: {error}")
        except AotllmError as error:
            await rpc.abort(grpc_status(error), sentence(error))
        except (asyncio.CancelledError, grpc.aio.AbortError):
            raise
        except Exception as error:
            await rpc.abort(grpc.StatusCode.INTERNAL, fault(error, method.name).message)
        raise AssertionError("abort raises")

    return grpc.unary_unary_rpc_method_handler(unary)


def _streaming(guard: _Guard, inference: Inference) -> Callable[[AsyncIterator[bytes], RpcContext], Awaitable[None]]:
    async def stream(messages: AsyncIterator[bytes], rpc: RpcContext) -> None:
        await guard.check(rpc)
        await stream_infer(inference, messages, rpc)

    return stream
