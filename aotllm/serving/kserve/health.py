"""`health_handler`: gRPC's own health service, grpc.health.v1, which Kubernetes and load balancers ask.

Its messages have one field each and are read and written here by hand: they do not merit a package.
"""

from __future__ import annotations

from typing import Any

import grpc
from google.protobuf.message import DecodeError

from aotllm.serving.errors import ModelNotFound
from aotllm.serving.kserve.errors import ModelNotReady
from aotllm.serving.kserve.inference import Inference
from aotllm.serving.kserve.protocol.messages import SERVICE, message_class
from aotllm.serving.kserve.rpcs import model_ready

# HealthCheckResponse.status: field 1, a varint
_SERVING = b"\x08\x01"
_NOT_SERVING = b"\x08\x02"
_SERVERS = ("", SERVICE.full_name)


def health_handler(inference: Inference) -> grpc.GenericRpcHandler:
    """`Check` for the server (service "" or that of inference) and for each model by its name; open to everybody."""
    # HealthCheckRequest has its one field, the service, in the place where this message has the name.
    request_class = message_class("ModelStatisticsRequest")

    async def check(data: bytes, rpc: Any) -> bytes:
        try:
            service = request_class.FromString(data).name
        except DecodeError as error:
            await rpc.abort(grpc.StatusCode.INVALID_ARGUMENT, f"the message is no HealthCheckRequest: {error}")
        if service in _SERVERS:
            return _SERVING if inference.context.ready else _NOT_SERVING
        try:
            inference.models.get(service)
        except ModelNotFound as error:
            await rpc.abort(grpc.StatusCode.NOT_FOUND, error.message)
        except ModelNotReady:
            return _NOT_SERVING
        return _SERVING if model_ready(inference, service, "") else _NOT_SERVING

    return grpc.method_handlers_generic_handler(
        "grpc.health.v1.Health", {"Check": grpc.unary_unary_rpc_method_handler(check)}
    )
