"""A front end: `main`, which the supervisor runs in a process below it."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal

from aotllm.serving.context import ServingContext
from aotllm.serving.front_end import Listeners, serve_clients
from aotllm.serving.process.child import Child
from aotllm.serving.process.remote_repository import RemotePeers, RemoteRepository, RemoteTable
from aotllm.serving.telemetry.request_log import LOGGER, configure_logging
from aotllm.serving.telemetry.serving_telemetry import ServingTelemetry


async def _run(child: Child) -> int:
    plan = child.plan
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    repository = RemoteRepository()
    connecting = asyncio.create_task(repository.connect(plan.socket_path))
    options = plan.serving_options()
    context = ServingContext(
        repository,
        options,
        ServingTelemetry(options),
        shared_memory=RemoteTable(repository, "shared_memory"),
        responses=RemoteTable(repository, "responses"),
        peers=RemotePeers(repository),
    )
    listeners = Listeners(child.sockets["http"], child.sockets.get("metrics"), plan.grpc_address)
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, _tell_what_is_held, repository)
    reporting: list[asyncio.Task[None]] = []

    async def report() -> None:
        await repository.complete.wait()
        child.ready()

    try:
        await serve_clients(
            context, listeners, plan.drain_timeout, stop, lambda: reporting.append(asyncio.create_task(report()))
        )
    except Exception as error:
        child.failed(error)
        return 1
    finally:
        for task in (connecting, *reporting):
            task.cancel()
        context.telemetry.close()
    return 0


def _tell_what_is_held(repository: RemoteRepository) -> None:
    """`kill -USR1`: one line in the log, to look for leaks."""
    held = {
        "pid": os.getpid(),
        "requests": repository.in_flight,
        "tasks": len(asyncio.all_tasks()),
        "file_descriptors": len(os.listdir("/proc/self/fd")),
    }
    logging.getLogger(f"{LOGGER}.held").warning(json.dumps({"held": held}))


def main(child: Child) -> int:
    """Run until SIGTERM; returns the exit code."""
    configure_logging(child.plan.serving_options().log_level)
    import uvloop

    return uvloop.run(_run(child))
