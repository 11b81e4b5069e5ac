"""`run_server`: an app on a socket, until SIGTERM or Ctrl-C."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI

from aotllm.errors import AotllmError

_BACKLOG = 2048


class _Server(uvicorn.Server):
    """Tells when it is ready; uvicorn itself only logs that."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._ready()


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 = any free one. Raises AotllmError when the address cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise AotllmError(f"cannot listen on {host}:{port}: {error.strerror}; choose another --http-port") from None
    return listener


def run_server(app: FastAPI, host: str, port: int, drain_timeout: float, ready: Callable[[str], None]) -> None:
    """Serve until SIGTERM or Ctrl-C; then take no more connections, and let requests in flight finish.

    Args:
        app: from `create_app`.
        host, port: where to listen; port 0 = any free one.
        drain_timeout: seconds until requests that still run are cancelled.
        ready: called with the URL when connections are taken.

    Raises:
        AotllmError: the address cannot be had.
        KeyboardInterrupt: it was Ctrl-C. After SIGTERM the function returns.
    """
    listener = listen(host, port)
    name = f"[{host}]" if ":" in host else host
    url = f"http://{name}:{listener.getsockname()[1]}"
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=max(1, round(drain_timeout)),
        lifespan="off",
    )
    with listener, _sigterm_returns():
        _Server(config, lambda: ready(url)).run(sockets=[listener])


@contextmanager
def _sigterm_returns() -> Iterator[None]:
    """uvicorn raises the signal that ended it once more when it is done, which would end the process then and there."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
