"""Servers: OpenAI and KServe over HTTP, KServe over gRPC. Needs the extra `serve`: `pip install 'aotllm[serve]'`.

The names below are imported when first used, so that the options of a server are known without the extra.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aotllm.errors import AotllmError

if TYPE_CHECKING:
    from aotllm.serving.app import app_of, context_of, create_app
    from aotllm.serving.server import run_server

__all__ = ["app_of", "check_installed", "context_of", "create_app", "run_server"]

_HOME = {
    "app_of": "aotllm.serving.app",
    "context_of": "aotllm.serving.app",
    "create_app": "aotllm.serving.app",
    "run_server": "aotllm.serving.server",
}
_NEEDED = ("starlette", "uvicorn", "uvloop", "httptools", "msgspec", "grpc", "google.protobuf", "prometheus_client")


def check_installed() -> None:
    """Raises AotllmError where a package of the extra is missing."""
    from importlib.util import find_spec

    for name in _NEEDED:
        # Looked for and not imported, which takes a second in a process that speaks to no client.
        package = name.partition(".")[0]
        if find_spec(package) is None or find_spec(name) is None:
            raise AotllmError(
                f"the HTTP server needs {name}, which is not installed; install it with: pip install 'aotllm[serve]'"
            )


def __getattr__(name: str) -> Any:
    if name in _HOME:
        import importlib

        check_installed()
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'aotllm.serving' has no attribute {name!r}")
