"""`RequestHandle`: a request in flight, for threads and for asyncio."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from aotllm.errors import AotllmError
from aotllm.manager import ALL_SEQUENCES
from aotllm.request import RequestOutput, TokenOutput

if TYPE_CHECKING:
    import asyncio


class RequestListener(Protocol):
    """Hears what happens to one request, in order, on the thread that delivers it. Is quick, and does not raise."""

    def on_output(self, output: TokenOutput) -> None:
        """One output of one of its sequences."""

    def on_end(self, result: RequestOutput | None, error: AotllmError | None) -> None:
        """The end: one of the two. Nothing comes after it."""


Through = Callable[[TokenOutput], bool]
"""Takes an output in the call that brings it; False where it cannot"""


class SilentListener:
    """Hears nothing."""

    def on_output(self, output: TokenOutput) -> None:
        """See `RequestListener.on_output`."""

    def on_end(self, result: RequestOutput | None, error: AotllmError | None) -> None:
        """See `RequestListener.on_end`."""


@dataclass(frozen=True)
class _Waiter:
    """A coroutine that waits on its own event loop."""

    loop: asyncio.AbstractEventLoop
    thread: int
    """Where the loop runs"""
    future: asyncio.Future[None]
    until_finished: bool
    through: Through | None = None


class OutputStream:
    """Mailbox between the dispatcher thread, which writes, and the consumer of one request."""

    def __init__(self, listener: RequestListener | None = None) -> None:
        self._listener = listener or SilentListener()
        self._changed = threading.Condition()
        self._outputs: deque[TokenOutput] = deque()
        self._result: RequestOutput | None = None
        self._error: AotllmError | None = None
        self._waiters: list[_Waiter] = []

    @property
    def finished(self) -> bool:
        """There is a result or an error. Outputs may still wait to be read."""
        return self._result is not None or self._error is not None

    def put(self, outputs: Sequence[TokenOutput], result: RequestOutput | None = None) -> bool:
        """Append outputs; with the last ones comes the result. False if an event loop that waited has gone."""
        for output in outputs:
            self._listener.on_output(output)
        if result is not None:
            self._listener.on_end(result, None)
        with self._changed:
            if result is None and len(outputs) == 1 and self._goes_through(outputs[0]):
                return True
            self._outputs.extend(outputs)
            self._result = result
            return self._wake()

    def fail(self, error: AotllmError) -> None:
        """End with an error, which is raised after the outputs so far have been read. No-op when finished."""
        if self.finished:
            return
        self._listener.on_end(None, error)
        with self._changed:
            self._error = error
            self._wake()

    def result(self) -> RequestOutput:
        """The result of a finished stream."""
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result

    def next(self) -> TokenOutput | None:
        """Wait for the next output; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._outputs or self.finished)
            return self._pop()

    async def next_async(self) -> TokenOutput | None:
        """`next` for asyncio."""
        while True:
            with self._changed:
                if self._outputs or self.finished:
                    return self._pop()
                future = self._add_waiter(until_finished=False)
            await future

    async def take_all_async(self, through: Through | None = None) -> list[TokenOutput]:
        """See `RequestHandle.take_all`."""
        while True:
            with self._changed:
                if self._outputs:
                    taken = list(self._outputs)
                    self._outputs.clear()
                    return taken
                if self.finished:
                    self._pop()
                    return []
                future = self._add_waiter(until_finished=False, through=through)
            await future

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the end; False on time-out."""
        with self._changed:
            return self._changed.wait_for(lambda: self.finished, timeout)

    async def wait_async(self) -> None:
        """`wait` for asyncio."""
        with self._changed:
            if self.finished:
                return
            future = self._add_waiter(until_finished=True)
        await future

    def _pop(self) -> TokenOutput | None:
        """The next output, or None at the end. Raises the error that the stream ended with."""
        if self._outputs:
            return self._outputs.popleft()
        if self._error is not None:
            raise self._error
        return None

    def _goes_through(self, output: TokenOutput) -> bool:
        """A consumer that waits on this thread takes it. Who waits has taken all that came before."""
        if len(self._waiters) != 1:
            return False
        waiter = self._waiters[0]
        if waiter.through is None or waiter.thread != threading.get_ident() or waiter.future.done():
            return False
        return waiter.through(output)

    def _add_waiter(self, until_finished: bool, through: Through | None = None) -> asyncio.Future[None]:
        import asyncio  # here: callers without a loop need none of it

        loop = asyncio.get_running_loop()
        waiter = _Waiter(loop, threading.get_ident(), loop.create_future(), until_finished, through)
        self._waiters.append(waiter)
        return waiter.future

    def _wake(self) -> bool:
        self._changed.notify_all()
        due = [w for w in self._waiters if self.finished or not w.until_finished]
        self._waiters = [] if self.finished else [w for w in self._waiters if w.until_finished]
        alive = True
        for waiter in due:
            try:
                if waiter.thread == threading.get_ident():
                    _resolve(waiter.future)  # without a system call, which is what waking another thread takes
                else:
                    waiter.loop.call_soon_threadsafe(_resolve, waiter.future)
            except RuntimeError:  # the loop was closed under its coroutine
                alive = False
        return alive


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class RequestHandle:
    """A request in flight; made by `Executor.submit`.

    Outputs are read once, by iterating, in a thread (`for output in handle`) or in a coroutine (`async for`), those of
    several answers as they come, each with the `index` of its own (with `best_of` above n: when all have ended). The
    result can be had any number of times, with `result()` or `await handle`, whether or not outputs were read. Both
    return at once for a finished request. A failed request raises its error in either.

    **Cancellation is a normal end**: `finish_reason` is "cancelled" and the result has what was generated until then.
    A request is cancelled by `cancel()`; by shutdown of its executor; when its handle is garbage collected; and when a
    task that awaits the handle is cancelled. Nobody can read the answer then, so nothing more is computed for it.
    """

    def __init__(
        self,
        request_id: int,
        prompt_token_ids: tuple[int, ...],
        stream: OutputStream,
        cancel: Callable[[int, int], None],
        owner: object,
    ) -> None:
        self.request_id = request_id
        self.prompt_token_ids = prompt_token_ids
        self._stream = stream
        self._cancel = cancel
        self._owner = owner  # an executor lives at least as long as the handles that are in use

    @property
    def done(self) -> bool:
        """Finished, failed or cancelled."""
        return self._stream.finished

    def cancel(self, index: int = ALL_SEQUENCES) -> None:
        """Ask for an end, which comes with the next step; no-op for what has finished.

        Args:
            index: end this answer only, the others go on; else all.
        """
        if not self.done:
            self._cancel(self.request_id, index)

    def result(self, timeout: float | None = None) -> RequestOutput:
        """Wait for the end.

        Raises:
            TimeoutError: not finished after `timeout` seconds; the request goes on.
            AotllmError: the request failed.
        """
        if not self._stream.wait(timeout):
            raise TimeoutError(f"request {self.request_id} is not finished after {timeout} seconds")
        return self._stream.result()

    def __iter__(self) -> RequestHandle:
        return self

    def __next__(self) -> TokenOutput:
        output = self._stream.next()
        if output is None:
            raise StopIteration
        return output

    def __aiter__(self) -> RequestHandle:
        return self

    async def __anext__(self) -> TokenOutput:
        try:
            output = await self._stream.next_async()
        except BaseException:  # the task was cancelled; a request that failed has ended, and ignores it
            self.cancel()
            raise
        if output is None:
            raise StopAsyncIteration
        return output

    async def take_all(self, through: Through | None = None) -> list[TokenOutput]:
        """Wait for an output, and take it with all that wait behind it, in order; an empty list at the end.

        For consumers that may fall behind: what they read late they can handle at once.

        Args:
            through: is offered what comes meanwhile, where that is on the thread of this loop: outputs that it takes
                wake nobody, and are not returned.
        """
        try:
            return await self._stream.take_all_async(through)
        except BaseException:  # the task was cancelled; a request that failed has ended, and ignores it
            self.cancel()
            raise

    def __await__(self) -> Generator[Any, None, RequestOutput]:
        return self._wait().__await__()

    async def _wait(self) -> RequestOutput:
        try:
            await self._stream.wait_async()
        except BaseException:  # the task was cancelled; a request that failed has ended, and ignores it
            self.cancel()
            raise
        return self._stream.result()

    def __del__(self) -> None:
        # Partly made handles have no stream.
        stream = getattr(self, "_stream", None)
        if stream is not None and not stream.finished:
            self._cancel(self.request_id, ALL_SEQUENCES)
