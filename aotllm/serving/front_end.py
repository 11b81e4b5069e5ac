"""`serve_clients`: all protocols of a server in one event loop, until it is told to stop."""

from __future__ import annotations

import asyncio
import math
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import uvicorn

from aotllm.errors import AotllmError
from aotllm.serving.app import create_app
from aotllm.serving.context import ServingContext
from aotllm.serving.http_protocol import HttpProtocol
from aotllm.serving.sockets import BACKLOG

if TYPE_CHECKING:
    import grpc.aio


_LAST_WORDS_SECONDS = 1.0
"""For cancelled requests to tell their clients"""
_LOOK_SECONDS = 0.05
"""How often a draining server looks whether requests still run"""


@dataclass
class Listeners:
    """Where a front end takes connections."""

    http: socket.socket
    metrics: socket.socket | None = None
    grpc: str | None = None
    """`host:port`; gRPC binds sockets of its own, and processes may share a port"""


class _HttpServer(uvicorn.Server):
    """Tells when it takes connections, leaves signals alone, and sleeps when it has nothing to do."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """Take no more connections, and end with the last one."""
        self.should_exit = True
        self._stopping.set()

    async def main_loop(self) -> None:
        """Wait to be stopped. uvicorn's own looks around ten times a second, also for `Date`, which is `HttpProtocol`'s
        business here."""
        await self._stopping.wait()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve_clients(
    context: ServingContext,
    listeners: Listeners,
    drain_timeout: float,
    stop: asyncio.Event,
    started: Callable[[], None],
) -> None:
    """Serve until `stop` is set; then take no more connections, and let requests in flight finish.

    Args:
        context: what to serve.
        listeners: where.
        drain_timeout: seconds until requests that still run are cancelled.
        stop: set from the loop.
        started: called when all protocols take connections.

    Raises:
        AotllmError: the gRPC address cannot be had, or a certificate cannot be read.
    """
    servers = [_http_server(context, create_app(context), drain_timeout)]
    sockets = [listeners.http]
    if listeners.metrics is not None:
        from aotllm.serving.telemetry.metrics import create_metrics_app

        servers.append(_http_server(context, create_metrics_app(context), drain_timeout))
        sockets.append(listeners.metrics)
    grpc_server = await _grpc_server(context, listeners.grpc) if listeners.grpc is not None else None
    running: list[asyncio.Future[Any]] = [
        asyncio.create_task(s.serve([sock])) for s, sock in zip(servers, sockets, strict=True)
    ]
    ready: asyncio.Future[Any] = asyncio.gather(*(server.listening.wait() for server in servers))
    await asyncio.wait({ready, *running}, return_when=asyncio.FIRST_COMPLETED)
    if ready.done():
        started()
        stopping = asyncio.ensure_future(stop.wait())
        await asyncio.wait({stopping, *running}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
    ready.cancel()
    context.draining = True
    for server in servers:
        server.stop()
    if grpc_server is not None:
        running.append(asyncio.create_task(grpc_server.stop(drain_timeout + _LAST_WORDS_SECONDS)))
    draining = asyncio.create_task(_drain(context, grpc_server, drain_timeout))
    await asyncio.gather(*running)
    draining.cancel()


async def _drain(context: ServingContext, grpc_server: grpc.aio.Server | None, drain_timeout: float) -> None:
    """Wait until requests have finished, or cancel them when the time is over, so that their clients are told; then end
    the gRPC streams on which nothing comes any more."""
    end = asyncio.get_running_loop().time() + drain_timeout
    while context.repository.in_flight and asyncio.get_running_loop().time() < end:
        await asyncio.sleep(_LOOK_SECONDS)
    if context.repository.in_flight:
        await context.repository.cancel_all()
    if grpc_server is not None:
        await grpc_server.stop(_LAST_WORDS_SECONDS)


def _http_server(context: ServingContext, app: object, drain_timeout: float) -> _HttpServer:
    options = context.options
    config = uvicorn.Config(
        app,  # type: ignore[arg-type]
        http=HttpProtocol,
        ws="none",
        backlog=BACKLOG,
        log_config=None,
        log_level="warning",
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=math.ceil(drain_timeout + _LAST_WORDS_SECONDS),
        ssl_certfile=options.ssl_certfile,
        ssl_keyfile=options.ssl_keyfile,
    )
    try:
        config.load()
    except (OSError, ValueError) as error:
        raise AotllmError(f"cannot use --ssl-certfile and --ssl-keyfile: {error}") from None
    return _HttpServer(config)


async def _grpc_server(context: ServingContext, address: str) -> grpc.aio.Server:
    import grpc

    from aotllm.serving.kserve.grpc_server import create_grpc_server

    server = create_grpc_server(context)
    options = context.options
    try:
        if options.ssl_certfile and options.ssl_keyfile:
            with open(options.ssl_keyfile, "rb") as key, open(options.ssl_certfile, "rb") as chain:
                credentials = grpc.ssl_server_credentials([(key.read(), chain.read())])
            server.add_secure_port(address, credentials)
        else:
            server.add_insecure_port(address)
    except (RuntimeError, OSError) as error:
        raise AotllmError(f"cannot listen on {address}: {error}; choose another --grpc-port") from None
    await server.start()
    return server
