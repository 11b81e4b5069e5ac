"""OpenAI-compatible HTTP server. Needs the extra `serve`: `pip install 'aotllm[serve]'`."""

from aotllm.errors import AotllmError

try:
    import fastapi  # noqa: F401
    import uvicorn  # noqa: F401
except ImportError as error:
    raise AotllmError(
        f"the HTTP server needs {error.name}, which is not installed; install it with: pip install 'aotllm[serve]'"
    ) from None

from aotllm.serving.app import create_app
from aotllm.serving.server import run_server

__all__ = ["create_app", "run_server"]
