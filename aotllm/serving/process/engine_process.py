"""The engine process: `python -m aotllm.serving.process.engine_process`, started by the supervisor."""

from __future__ import annotations

import asyncio
import signal
import sys

from aotllm.serving.process.child import Child
from aotllm.serving.process.engine_server import EngineServer


async def _run(child: Child) -> int:
    stopping = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)
    try:
        server = EngineServer(child.plan)
        listener = await server.listen(child.plan.socket_path)
        await server.start()
    except Exception as error:
        child.failed(error)
        return 1
    child.ready(memory=server.memory())
    await stopping.wait()
    listener.close()
    await server.stop()
    return 0


def main() -> int:
    """Run until SIGTERM; returns the exit code."""
    return asyncio.run(_run(Child.start()))


if __name__ == "__main__":
    sys.exit(main())
