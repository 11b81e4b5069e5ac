"""An event loop whose clock is the script's: when nothing is left to do now, it is at once the time of what is next."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _NoWaiting(selectors.SelectSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[Any]:
        assert timeout is not None, "the test waits for something that never happens"
        self._loop.now += max(timeout, 0)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.now = 0.0
        super().__init__(_NoWaiting(self))
        self._clock_resolution = 1e-9

    def time(self) -> float:
        return self.now


def run_virtual(work: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine; `clock()` in it is virtual time."""
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(work)
    finally:
        loop.close()


def clock() -> float:
    return asyncio.get_running_loop().time()
