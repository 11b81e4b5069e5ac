"""A server on loopback, HTTP and gRPC, in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import uvicorn

from aotllm import Executor
from aotllm.serving.app import create_app
from aotllm.serving.context import ServingContext
from aotllm.serving.kserve.grpc_server import create_grpc_server
from aotllm.serving.options import ServingOptions
from aotllm.serving.repository import LocalRepository
from aotllm.serving.server import listen


class KserveServer:
    """Serves executors; `grpc` and `http` are `host:port`.

    Args:
        executors: by name.
        make: for loading them again.
        options: of `ServingOptions`.
    """

    def __init__(
        self, executors: dict[str, Executor], make: Callable[[str], Executor] | None = None, **options: Any
    ) -> None:
        self._executors = executors
        self._make = make
        self._options = options
        self._ready: Future[None] = Future()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()))
        self._thread.start()
        self._ready.result(timeout=60)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    async def _main(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self.context = ServingContext(LocalRepository(self._executors, self._make), ServingOptions(**self._options))
        rpc_server = create_grpc_server(self.context)
        self.grpc = f"127.0.0.1:{rpc_server.add_insecure_port('127.0.0.1:0')}"
        await rpc_server.start()
        with listen("127.0.0.1", 0) as listener:
            self.http = f"127.0.0.1:{listener.getsockname()[1]}"
            config = uvicorn.Config(
                create_app(self.context), log_level="warning", lifespan="off", timeout_graceful_shutdown=1
            )
            server = uvicorn.Server(config)
            serving = asyncio.create_task(server.serve(sockets=[listener]))
            self._ready.set_result(None)
            await self._stop.wait()
            server.should_exit = True
            await serving
        await rpc_server.stop(None)


Serve = Callable[..., KserveServer]
