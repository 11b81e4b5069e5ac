"""Listening sockets, for one process and for several that share a port."""

from __future__ import annotations

import contextlib
import resource
import socket

from aotllm.errors import AotllmError

BACKLOG = 2048


def listen(host: str, port: int, flag: str = "--http-port") -> socket.socket:
    """A listening socket; port 0 = any free one. Raises AotllmError when the address cannot be had."""
    listener = _bound(host, port, flag, socket.SO_REUSEADDR)
    listener.listen(BACKLOG)
    return listener


def share_port(host: str, port: int, count: int, flag: str) -> list[socket.socket]:
    """Sockets on one port, one per process, over which the kernel spreads connections. They do not listen yet.

    Port 0 = any free one. Raises AotllmError when the address cannot be had.
    """
    # Another server that shares its port would let us in: see first whether anybody is there.
    listen(host, port, flag).close()
    first = _bound(host, port, flag, socket.SO_REUSEPORT)
    port = first.getsockname()[1]
    return [first, *(_bound(host, port, flag, socket.SO_REUSEPORT) for _ in range(count - 1))]


def raise_file_limit() -> None:
    """Let this process, and those that it starts, have as many open files, connections among them, as the system allows
    it: the usual soft limit of 1024 is for programs that call select(2)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def address_of(sock: socket.socket) -> str:
    """`host:port`, as it stands in URLs."""
    host, port = sock.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _bound(host: str, port: int, flag: str, option: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, option, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise AotllmError(f"cannot listen on {host}:{port}: {error.strerror}; choose another {flag}") from None
    return sock
