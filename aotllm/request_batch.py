"""`RequestBatch`: requests that run together, more of them than the queue may hold."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from types import TracebackType

from aotllm.errors import Overloaded
from aotllm.request_handle import RequestHandle


class RequestBatch:
    """The handles of `generate`: submitted as the queue has room, cancelled when the batch fails."""

    def __init__(self) -> None:
        self.handles: list[RequestHandle] = []
        self._oldest = 0

    def add(self, submit: Callable[[], RequestHandle]) -> bool:
        """False if the queue is full and `oldest()` has to be waited for. Raises Overloaded if it is full of others."""
        try:
            self.handles.append(submit())
        except Overloaded:
            if self._oldest == len(self.handles):
                raise
            return False
        return True

    async def add_async(self, submit: Callable[[], Awaitable[RequestHandle]]) -> bool:
        """`add` where submitting is a coroutine."""
        try:
            self.handles.append(await submit())
        except Overloaded:
            if self._oldest == len(self.handles):
                raise
            return False
        return True

    def oldest(self) -> RequestHandle:
        """The oldest handle that has not been waited for."""
        self._oldest += 1
        return self.handles[self._oldest - 1]

    def __enter__(self) -> RequestBatch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            for handle in self.handles:
                handle.cancel()
