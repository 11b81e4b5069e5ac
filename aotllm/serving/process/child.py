"""What the processes under a supervisor have in common: their arguments, how they report, how they end."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
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
        sockets: inherited listening sockets, by what they are for.
    """

    plan: ServePlan
    report: int
    sockets: dict[str, int]

    @classmethod
    def start(cls) -> Child:
        """Read the command line. From now on the process ends with its supervisor, and only the supervisor hears
        Ctrl-C."""
        parser = argparse.ArgumentParser()
        parser.add_argument("--plan-fd", type=int, required=True)
        parser.add_argument("--report-fd", type=int, required=True)
        parser.add_argument("--lifeline-fd", type=int, required=True)
        parser.add_argument("--sockets", type=json.loads, default={})
        arguments = parser.parse_args()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        plan = ServePlan.from_file(arguments.plan_fd)
        threading.Thread(target=_end_with, args=(arguments.lifeline_fd, plan), daemon=True).start()
        return cls(plan, arguments.report_fd, arguments.sockets)

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
