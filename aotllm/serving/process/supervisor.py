"""`Supervisor`: starts the processes of a server, watches over them, and ends them."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import signal
import socket
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from aotllm.errors import AotllmError, Internal
from aotllm.kv_memory import KvMemory
from aotllm.serving.process.child import Child
from aotllm.serving.process.failures import error_of
from aotllm.serving.process.forked import ForkedProcess
from aotllm.serving.process.messages import Failure
from aotllm.serving.process.plain import namespace
from aotllm.serving.process.plan import ServePlan
from aotllm.serving.sockets import address_of, raise_file_limit, share_port

_log = logging.getLogger(__name__)

Ready = Callable[[dict[str, str], dict[str, KvMemory]], None]

ENGINE_PROCESS, FRONT_END = "aotllm-engine", "aotllm-frontend"
"""Names of the processes, as `ps -o comm` shows them"""

_LAST_WORDS_SECONDS = 5.0
"""How long front ends go on saying that the engine process has died, before the server ends"""
_KILL_SECONDS = 5.0
"""Beyond the drain timeout, for a process to end by itself"""
_MAX_SOCKET_PATH = 107
"""Bytes of sockaddr_un.sun_path, without the null byte"""
_RESTART_SECONDS = 0.5
"""Between the death of a front end and its successor"""


@dataclass
class _Process:
    process: ForkedProcess
    report: asyncio.Task[dict[str, Any]]

    async def ready(self) -> dict[str, Any]:
        """Wait until it reports, and what it says of itself. Raises what it failed with."""
        line = await self.report
        if "failed" in line:
            raise error_of(Failure(*line["failed"]))
        facts: dict[str, Any] = line["ready"]
        return facts

    async def end(self, number: signal.Signals, seconds: float) -> None:
        """Ask it to end, and kill it when it does not."""
        self.process.send_signal(number)
        try:
            await asyncio.wait_for(self.process.wait(), seconds)
        except asyncio.TimeoutError:
            self.process.kill()
            await self.process.wait()


class Supervisor:
    """The process that the user started. It neither runs a model nor speaks to clients.

    Args:
        plan: what to serve.
        ready: called when all processes take requests, with the addresses (`http`, `grpc`, `metrics`), and with what
            the KV memory of each engine buys.
    """

    def __init__(self, plan: ServePlan, ready: Ready) -> None:
        self._ready = ready
        raise_file_limit()
        self._folder = Path(tempfile.mkdtemp(prefix="aotllm-"))
        self._plan = replace(plan, socket_path=_socket_in(self._folder))
        (self._folder / "metrics").mkdir()
        self._lifeline_child, self._lifeline = os.pipe()
        self._sockets: dict[str, list[socket.socket]] = {}
        self._front_ends: dict[int, _Process] = {}
        self._received: list[signal.Signals] = []

    async def run(self) -> None:
        """Serve until SIGTERM or Ctrl-C.

        Raises:
            AotllmError: it could not start, or the engine process died.
            KeyboardInterrupt: it was Ctrl-C.
        """
        stop = asyncio.Event()
        self._handle_signals(stop)
        engine: _Process | None = None
        drain = self._plan.drain_timeout
        try:
            self._reserve_ports()
            # Front ends first, which take longer: they connect before the engine process accepts.
            for index in range(self._plan.frontends):
                self._front_ends[index] = await self._start_front_end(index)
            with self._sockets.pop("engine")[0] as sock:
                engine = await self._start(ENGINE_PROCESS, _engine_main, {"engine": sock})
            if await self._until(stop, self._all_ready(engine)):
                await self._watch(engine, stop)
        except Internal:
            drain = 0.0  # what front ends had to say, they have said
            raise
        finally:
            await self._end_front_ends(drain)
            if engine is not None:
                await engine.end(signal.SIGTERM, _KILL_SECONDS)
            self._clean_up()
        if signal.SIGINT in self._received:
            raise KeyboardInterrupt

    async def _all_ready(self, engine: _Process) -> None:
        facts = await engine.ready()
        for front_end in self._front_ends.values():
            await front_end.ready()
        memory = {name: KvMemory.from_native(namespace(bought)) for name, bought in facts["memory"].items()}
        self._ready({name: address_of(socks[0]) for name, socks in self._sockets.items()}, memory)

    async def _until(self, stop: asyncio.Event, work: Any) -> bool:
        """Run `work` to its end; False when told to stop before."""
        task, stopping = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
        await asyncio.wait([task, stopping], return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not task.done():
            task.cancel()
            return False
        task.result()
        return True

    async def _watch(self, engine: _Process, stop: asyncio.Event) -> None:
        """Replace front ends that die, until told to stop. Raises Internal when the engine process dies."""
        stopping = asyncio.ensure_future(stop.wait())
        engine_death = asyncio.ensure_future(engine.process.wait())
        while not stop.is_set():
            deaths = {asyncio.ensure_future(p.process.wait()): i for i, p in self._front_ends.items()}
            done, _ = await asyncio.wait([stopping, engine_death, *deaths], return_when=asyncio.FIRST_COMPLETED)
            if engine_death in done:
                await self._until(stop, asyncio.sleep(_LAST_WORDS_SECONDS))
                raise Internal(f"the engine process has died ({_how(engine_death.result())}); start the server again")
            for death, index in deaths.items():
                if death in done:
                    _log.warning("front end %d has died (%s); starting another one", index, _how(death.result()))
                    await self._until(stop, asyncio.sleep(_RESTART_SECONDS))
                    self._front_ends[index] = await self._start_front_end(index)
                else:
                    death.cancel()

    async def _end_front_ends(self, drain: float) -> None:
        # What the front ends close, the kernel closes only when nobody else holds it.
        for sockets in self._sockets.values():
            for sock in sockets:
                sock.close()
        await asyncio.gather(*(p.end(signal.SIGTERM, drain + _KILL_SECONDS) for p in self._front_ends.values()))

    async def _start_front_end(self, index: int) -> _Process:
        sockets = {name: socks[index] for name, socks in self._sockets.items() if name in ("http", "metrics")}
        return await self._start(FRONT_END, _front_end_main, sockets)

    async def _start(self, name: str, main: Callable[[Child], int], sockets: dict[str, socket.socket]) -> _Process:
        report_read, report_write = os.pipe()

        def run() -> int:  # in the child
            os.close(report_read)
            os.close(self._lifeline)
            for inherited in chain.from_iterable(self._sockets.values()):
                if inherited not in sockets.values():
                    inherited.close()
            os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(self._folder / "metrics")
            child = Child(self._plan, report_write, sockets)
            child.end_with(self._lifeline_child)
            return main(child)

        try:
            process = await ForkedProcess.start(name, run)
        except OSError:
            os.close(report_read)
            raise
        finally:
            os.close(report_write)
        return _Process(process, asyncio.create_task(_first_line(report_read, name)))

    def _reserve_ports(self) -> None:
        plan = self._plan
        engine = socket.socket(socket.AF_UNIX)
        engine.bind(plan.socket_path)
        engine.listen(plan.frontends)
        self._sockets["engine"] = [engine]
        self._sockets["http"] = share_port(plan.host, plan.http_port, plan.frontends, "--http-port")
        if plan.metrics_port is not None:
            self._sockets["metrics"] = share_port(plan.host, plan.metrics_port, plan.frontends, "--metrics-port")
        if plan.grpc_port is not None:
            # Never listened on: it keeps the port while front ends bind theirs.
            self._sockets["grpc"] = share_port(plan.host, plan.grpc_port, 1, "--grpc-port")
            self._plan = replace(plan, grpc_address=address_of(self._sockets["grpc"][0]))

    def _handle_signals(self, stop: asyncio.Event) -> None:
        def on(number: signal.Signals) -> None:
            if number in self._received:  # the second Ctrl-C does not wait
                for front_end in self._front_ends.values():
                    front_end.process.kill()
            self._received.append(number)
            stop.set()

        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, on, number)

    def _clean_up(self) -> None:
        os.close(self._lifeline)
        os.close(self._lifeline_child)
        shutil.rmtree(self._folder, ignore_errors=True)


def _socket_in(folder: Path) -> str:
    """Path of the engine process's socket. Raises AotllmError where it would be too long for one."""
    path = folder / "engine.sock"
    if len(os.fsencode(path)) > _MAX_SOCKET_PATH:
        folder.rmdir()
        raise AotllmError(
            f"the folder for temporary files, {tempfile.gettempdir()}, is too long a path for a Unix socket: together "
            f"{len(os.fsencode(path))} bytes, at most {_MAX_SOCKET_PATH} are allowed; set TMPDIR to a shorter one"
        )
    return str(path)


def _how(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"


def _engine_main(child: Child) -> int:
    from aotllm.serving.process.engine_process import main

    return main(child)


def _front_end_main(child: Child) -> int:
    from aotllm.serving.process.front_end_process import main

    return main(child)


async def _first_line(descriptor: int, name: str) -> dict[str, Any]:
    """The one line that a child reports; a child that dies without a word has failed."""
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(descriptor, "rb", 0)
    )
    line = await reader.readline()
    transport.close()
    if not line:
        return {"failed": [Internal.kind, f"{name} died while it started; its log is above", None]}
    report: dict[str, Any] = json.loads(line)
    return report


def supervise(plan: ServePlan, ready: Ready) -> None:
    """Run a server of several processes; see `Supervisor.run`."""
    asyncio.run(Supervisor(plan, ready).run())
