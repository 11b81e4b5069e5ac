"""The memory of the server under test."""

from __future__ import annotations

import re
from pathlib import Path

from aotllm.bench.http_client import HttpClient
from aotllm.bench.record import RequestFailed

_METRIC = re.compile(rb"^process_resident_memory_bytes(?:\{[^}]*\})?\s+([0-9.eE+]+)", re.MULTILINE)
_RESIDENT = re.compile(r"^VmRSS:\s+(\d+) kB", re.MULTILINE)


class ServerMemory:
    """Resident bytes of a process and its children, or of the processes that a /metrics page speaks of.

    Args:
        pid: process on this machine; None = ask the page.
        metrics: client and path of the page.
        proc: where the kernel shows processes.
    """

    def __init__(
        self, pid: int | None, metrics: tuple[HttpClient, str] | None = None, proc: Path = Path("/proc")
    ) -> None:
        self._pid, self._metrics, self._proc = pid, metrics, proc

    async def read(self) -> int | None:
        """Now; None where it cannot be had."""
        if self._pid is not None:
            return self._tree(self._pid)
        if self._metrics is None:
            return None
        client, path = self._metrics
        try:
            answer = await client.fetch("GET", path)
        except RequestFailed:
            return None
        values = [float(value) for value in _METRIC.findall(answer.body)] if answer.status == 200 else []
        return round(sum(values)) if values else None

    def _tree(self, pid: int) -> int | None:
        try:
            match = _RESIDENT.search((self._proc / f"{pid}/status").read_text())
            children = [
                int(child)
                for task in (self._proc / f"{pid}/task").iterdir()
                for child in (task / "children").read_text().split()
            ]
        except OSError:
            return None
        own = int(match[1]) * 1024 if match else 0
        return own + sum(self._tree(child) or 0 for child in children)
