"""`RunningServer`: `aotllm serve` as its users start it, in processes of its own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).parents[2]
_PATIENCE = 60.0


class RunningServer:
    """Starts a server on free ports, and waits until it takes requests. To be stopped; `running_server` does.

    Attributes:
        url: of HTTP; grpc, metrics: `host:port`, and the URL of the metrics.
        pid: of the process that a user would see.
    """

    def __init__(self, *engines: Path | str, **options: Any) -> None:
        flags: list[str] = []
        for name, value in {"http_port": 0, "grpc_port": 0, "metrics_port": 0, **options}.items():
            flag = f"--{name.replace('_', '-')}"
            for item in value if isinstance(value, (list, tuple)) else [value]:
                flags += [flag] if item is True else [flag, str(item)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "aotllm", "serve", *map(str, engines), "--json", *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": os.environ.get("PYTHONPATH", str(ROOT))},
        )
        assert self._process.stdout is not None
        self.log: list[str] = []
        """Lines of standard error so far"""
        self._reader = threading.Thread(target=self._read_log, daemon=True)
        self._reader.start()
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            self._reader.join()
            raise RuntimeError("the server did not start:\n" + "".join(self.log))
        ready = json.loads(line)
        self.url: str = ready["url"]
        self.grpc: str = ready.get("grpc", "")
        self.metrics: str = ready.get("metrics", "")
        self.models: list[str] = ready["models"]
        self.pid = self._process.pid

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Signal it, and wait for its end; returns the exit code."""
        if self._process.poll() is None:
            self._process.send_signal(number)
        return self.wait()

    def wait(self) -> int:
        """Wait for its end; returns the exit code."""
        try:
            code = self._process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            raise
        self._reader.join()
        return code

    def children(self, name: str = "") -> list[int]:
        """Pids of its processes of a name, `supervisor.ENGINE_PROCESS` or `FRONT_END`; by default of all."""
        pids = []
        for task in Path(f"/proc/{self.pid}/task").iterdir():
            for pid in (task / "children").read_text().split():
                with contextlib.suppress(OSError):  # it has just ended
                    if name in Path(f"/proc/{pid}/comm").read_text():
                        pids.append(int(pid))
        return pids

    def status(self, path: str) -> int:
        """HTTP status of a GET on a connection of its own; 0 where none is taken."""
        try:
            return httpx.get(self.url + path, timeout=_PATIENCE).status_code
        except httpx.TransportError:
            return 0

    def wait_for_status(self, path: str, status: int) -> None:
        """Wait until a GET has that status."""
        deadline = time.monotonic() + _PATIENCE
        while (got := self.status(path)) != status:
            assert time.monotonic() < deadline, f"{path} still says {got}, not {status}"

    def _read_log(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self.log.append(line)


@contextlib.contextmanager
def running_server(*engines: Path | str, **options: Any) -> Iterator[RunningServer]:
    """A server for as long as the block takes."""
    server = RunningServer(*engines, **options)
    try:
        yield server
    finally:
        server.stop()
