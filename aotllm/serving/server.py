"""`run_server`: a server of one process, until SIGTERM or Ctrl-C."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from aotllm.serving.context import ServingContext
from aotllm.serving.front_end import Listeners, serve_clients
from aotllm.serving.sockets import address_of, listen, raise_file_limit, share_port


def run_server(
    context: ServingContext,
    host: str,
    http_port: int,
    drain_timeout: float,
    ready: Callable[[dict[str, str]], None],
    *,
    grpc_port: int | None = None,
    metrics_port: int | None = None,
) -> None:
    """Serve until SIGTERM or Ctrl-C; then take no more connections, and let requests in flight finish.

    Args:
        context: what to serve.
        host: address to listen on.
        http_port, grpc_port, metrics_port: 0 = any free one; None = none.
        drain_timeout: seconds until requests that still run are cancelled.
        ready: called when connections are taken, with the addresses: `http`, `grpc`, `metrics`.

    Raises:
        AotllmError: an address cannot be had.
        KeyboardInterrupt: it was Ctrl-C. After SIGTERM the function returns.
    """
    raise_file_limit()
    http = listen(host, http_port)
    metrics = None if metrics_port is None else listen(host, metrics_port, "--metrics-port")
    reserved = None if grpc_port is None else share_port(host, grpc_port, 1, "--grpc-port")[0]
    addresses = {
        name: address_of(sock)
        for name, sock in (("http", http), ("grpc", reserved), ("metrics", metrics))
        if sock is not None
    }
    listeners = Listeners(http, metrics, addresses.get("grpc"))
    interrupted = False

    async def run() -> None:
        nonlocal interrupted
        stop = asyncio.Event()
        with _signals(stop) as received:
            await serve_clients(context, listeners, drain_timeout, stop, lambda: ready(addresses))
        interrupted = signal.SIGINT in received

    import uvloop

    try:
        uvloop.run(run())
    finally:
        for sock in (http, metrics, reserved):
            if sock is not None:
                sock.close()
    if interrupted:
        raise KeyboardInterrupt


@contextmanager
def _signals(stop: asyncio.Event) -> Iterator[list[signal.Signals]]:
    """SIGTERM and Ctrl-C set `stop`, in the main thread. Yields those that came."""
    received: list[signal.Signals] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    loop = asyncio.get_running_loop()

    def on(number: signal.Signals) -> None:
        received.append(number)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on, number)
    yield received
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.remove_signal_handler(number)
