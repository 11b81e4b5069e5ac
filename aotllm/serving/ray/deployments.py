"""The deployments of a server on Ray Serve: replicas with an engine each, and front ends that choose among them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import fields
from typing import Any

from ray import serve
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Message

from aotllm.executor import Executor
from aotllm.serving.app import app_of
from aotllm.serving.errors import error_body
from aotllm.serving.options import ServingOptions
from aotllm.serving.ray.asgi_call import HttpCall, messages, response_parts
from aotllm.serving.ray.options import RayOptions
from aotllm.serving.ray.prefix_affinity import routing_key

MakeExecutors = Callable[[], Mapping[str, Executor]]
"""Model name -> executor; called in the replica's process"""


class Replica:
    """One copy of the engines, behind the same application that `aotllm serve` has."""

    def __init__(self, make_executors: MakeExecutors, options: ServingOptions) -> None:
        self._executors = make_executors()
        self._app = app_of(self._executors, **{field.name: getattr(options, field.name) for field in fields(options)})

    async def handle(self, call: HttpCall, routing_key: str | None = None) -> AsyncIterator[Message]:
        """What the application answers. The router looks at `routing_key`; nobody here does."""
        async for message in messages(self._app, call):
            yield message

    def check_health(self) -> None:
        """Called by Ray, which replaces a replica that is not well."""
        if not all(executor.alive for executor in self._executors.values()):
            raise RuntimeError("an engine has failed; the replica is to be replaced")

    def __del__(self) -> None:
        # Called by Ray when the replica has drained.
        for executor in getattr(self, "_executors", {}).values():
            executor.shutdown()


class FrontEnd:
    """Takes requests from Ray's HTTP proxy, which knows no bodies, and sends each where its prefix is cached."""

    def __init__(self, replicas: DeploymentHandle, prefix_chars: int, max_body_bytes: int) -> None:
        self._replicas = replicas.options(stream=True).handle
        self._prefix_chars = prefix_chars
        self._max_body_bytes = max_body_bytes

    async def __call__(self, request: Request) -> Response:
        """Answers as the replica does."""
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > self._max_body_bytes:
                message = f"the body is longer than {self._max_body_bytes} bytes"
                return JSONResponse(error_body(message, "ContentTooLargeError", 413), 413)
        call = HttpCall.of(request.scope, bytes(body))
        stream = self._replicas.remote(call, routing_key=routing_key(call.body, self._prefix_chars))
        status, headers = response_parts(await anext(aiter(stream)))
        response = StreamingResponse(_bodies(stream), status)
        response.raw_headers = headers
        return response


async def _bodies(stream: Any) -> AsyncIterator[bytes]:
    try:
        async for message in stream:
            yield message.get("body", b"")
    finally:
        stream.cancel()  # where the client has gone; else it has ended


def application(
    make_executors: MakeExecutors, serving: ServingOptions, options: RayOptions, drain_timeout: float
) -> Any:
    """What `ray.serve.run` takes."""
    scaled = options.max_replicas > options.min_replicas
    replicas = serve.deployment(
        Replica,
        name="replica",
        num_replicas=None if scaled else options.min_replicas,
        autoscaling_config=AutoscalingConfig(
            min_replicas=options.min_replicas,
            max_replicas=options.max_replicas,
            target_ongoing_requests=options.target_ongoing_requests,
        )
        if scaled
        else None,
        max_ongoing_requests=options.max_ongoing_requests,
        graceful_shutdown_timeout_s=drain_timeout,
        ray_actor_options={"num_cpus": options.cpus_per_replica, "num_gpus": options.gpus_per_replica},
        request_router_config=RequestRouterConfig(
            request_router_class="aotllm.serving.ray.router:PrefixRouter",
            request_router_kwargs={"load_bound": options.load_bound, "free_load": options.free_load},
        ),
    )
    front_ends = serve.deployment(
        FrontEnd,
        name="front_end",
        num_replicas=options.num_front_ends,
        # It only passes on: the replicas' own limit is the one that counts.
        max_ongoing_requests=100_000,
        graceful_shutdown_timeout_s=drain_timeout,
        ray_actor_options={"num_cpus": 0},
    )
    return front_ends.bind(replicas.bind(make_executors, serving), options.prefix_chars, serving.max_body_bytes)
