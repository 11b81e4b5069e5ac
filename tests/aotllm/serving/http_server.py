"""The application on a real socket, for clients that bring their own connections."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import uvicorn

from aotllm import Executor
from aotllm.serving import app_of
from aotllm.serving.http_protocol import HttpProtocol
from aotllm.serving.server import listen


@contextmanager
def serving(executors: Mapping[str, Executor], **options: Any) -> Iterator[str]:
    """Serves executors in a thread while it is open; gives the base URL of the API."""
    listener = listen("127.0.0.1", 0)
    app = app_of(executors, **options)
    config = uvicorn.Config(app, http=HttpProtocol, ws="none", log_level="warning", lifespan="off")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    finally:
        server.should_exit = True
        thread.join()
