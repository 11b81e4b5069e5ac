"""What the processes under a supervisor have in common: what they are given, how they report, how they end."""

from __future__ import annotations

import json
import os
import shutil
import socket
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aotllm.serving.process.failures import failure_of
from aotllm.serving.process.plan import ServePlan


@dataclass
class Child:
    """A process under a supervisor.

    Attributes:
        plan: what to do.
        report: file descriptor to which one line is written, when it is ready or has failed to start.
        sockets: listening sockets, by what they are for.
    """

    plan: ServePlan
    report: int
    sockets: dict[str, socket.socket]

    def end_with(self, lifeline: int) -> None:
        """Let the process end with its supervisor.

        Args:
            lifeline: end of a pipe whose other end is the supervisor's alone.
        """
        threading.Thread(target=_end_with, args=(lifeline, self.plan), daemon=True).start()

    def ready(self, **facts: Any) -> None:
        """Tell the supervisor."""
        self._report({"ready": facts})

    def failed(self, error: Exception) -> None:
        """Tell the supervisor why there is no ready."""
        failure = failure_of(error)
        self._report({"failed": [failure.kind, failure.message, failure.param]})

    def _report(self, line: dict[str, Any]) -> None:
        os.write(self.report, json.dumps(line).encode() + b"\n")
        os.close(self.report)


def _end_with(lifeline: int, plan: ServePlan) -> None:
    """The supervisor holds the other end, which closes when it dies, however it dies. It could not tidy up then."""
    os.read(lifeline, 1)
    shutil.rmtree(Path(plan.socket_path).parent, ignore_errors=True)
    os._exit(1)
