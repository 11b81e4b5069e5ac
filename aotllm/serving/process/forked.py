"""`ForkedProcess`: a process below this one that runs a function."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterable
from typing import NoReturn


class ForkedProcess:
    """Forked and not started anew: it finds imported what this process has imported, and shares its memory.

    Attributes:
        pid: of the process.
        returncode: its exit code, the negative number of the signal that ended it, or None while it runs.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._ended = asyncio.Event()
        self._watched = os.pidfd_open(pid)
        asyncio.get_running_loop().add_reader(self._watched, self._reap)

    @classmethod
    async def start(cls, name: str, main: Callable[[], int]) -> ForkedProcess:
        """Fork. The child is in a session of its own, has no standard input, and ignores Ctrl-C.

        Args:
            name: of the child in lists of processes; at most 15 bytes.
            main: what the child does; returns its exit code. It closes what it has inherited and does not want.

        Raises:
            OSError: there is no room for another process.
        """
        loop = asyncio.get_running_loop()
        forked: asyncio.Future[int] = loop.create_future()

        def fork() -> None:
            try:
                forked.set_result(_fork(name, main))
            except OSError as error:
                forked.set_exception(error)

        loop.call_soon(fork)  # from no task: the child runs a loop of its own
        return cls(await forked)

    async def wait(self) -> int:
        """Wait for its end; returns `returncode`."""
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        """No-op when it has ended."""
        if self.returncode is None:
            os.kill(self.pid, number)  # it is there until it is reaped, here

    def kill(self) -> None:
        """End it at once."""
        self.send_signal(signal.SIGKILL)

    def _reap(self) -> None:
        asyncio.get_running_loop().remove_reader(self._watched)
        os.close(self._watched)
        self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        self._ended.set()


def _fork(name: str, main: Callable[[], int]) -> int:
    """Returns the pid, in the parent only."""
    sys.stdout.flush()
    sys.stderr.flush()
    gc.freeze()  # a collection in the child would write to all that it shares
    # A signal that came to the child while it has the handlers of this process would be told to this one.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        pid = os.fork()
        if pid == 0:
            _run(name, main, before)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return pid


def _run(name: str, main: Callable[[], int], signals: Iterable[int]) -> NoReturn:
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, signals)
        os.setsid()
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        with contextlib.suppress(OSError), open("/proc/self/comm", "w") as comm:
            comm.write(name)
        code = main()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # what is left on the stack is the parent's
