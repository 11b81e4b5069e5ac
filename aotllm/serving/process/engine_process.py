"""The engine process: `main`, which the supervisor runs in a process below it."""

from __future__ import annotations

import asyncio
import signal

from aotllm.serving.process.child import Child
from aotllm.serving.process.engine_server import EngineServer


async def _run(child: Child) -> int:
    stopping = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)
    try:
        server = EngineServer(child.plan)
        listener = await server.listen(child.sockets["engine"])
        await server.start()
    except Exception as error:
        child.failed(error)
        return 1
    child.ready(memory=server.memory())
    await stopping.wait()
    listener.close()
    await server.stop()
    return 0


def main(child: Child) -> int:
    """Run until SIGTERM; returns the exit code."""
    return asyncio.run(_run(child))
