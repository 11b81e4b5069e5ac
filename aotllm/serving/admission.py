"""`Turnstile`: lets requests in one after the other, and refuses them early while the queue is full.

A burst of requests would otherwise be parsed, rendered and tokenized all at once, before the first of them learns that
the queue is full; the last one would be told after all that work.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

from starlette.types import ASGIApp, Receive, Scope, Send

from aotllm.errors import Overloaded
from aotllm.serving.error_responses import response_of

TURN = "aotllm.turn"
"""Key of a request's `Turn` in its ASGI scope"""
WIDTH = 4
"""Requests that are parsed and submitted at a time"""
HOLD_SECONDS = 0.005
"""A request that takes longer (a large prompt, a grammar) holds up nobody behind it"""
REFUSE_SECONDS = 0.05
"""For so long after a refusal by the queue others are refused without asking"""


class Turnstile:
    """One per event loop."""

    def __init__(self) -> None:
        self._inside = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._full_until = 0.0
        self._full: Overloaded | None = None

    def refused(self, error: Overloaded) -> None:
        """The queue has just refused a request."""
        self._full, self._full_until = error, time.monotonic() + REFUSE_SECONDS

    def refusal(self) -> Overloaded | None:
        """Why not to ask at all, if the queue was full a moment ago."""
        return self._full if time.monotonic() < self._full_until else None

    async def enter(self) -> Turn:
        """Wait for a turn, first come, first served."""
        if self._inside >= WIDTH or self._waiting:
            turn = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._leave()
                raise
        else:
            self._inside += 1
        return Turn(self)

    def _leave(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)  # the place is his
                return
        self._inside -= 1


class Turn:
    """A place inside, until it is left or the time is over."""

    def __init__(self, turnstile: Turnstile) -> None:
        self._turnstile = turnstile
        self._left = False
        self._timer = asyncio.get_running_loop().call_later(HOLD_SECONDS, self.leave)

    def leave(self, refusal: Overloaded | None = None) -> None:
        """The request has been submitted, or the queue has refused it. Idempotent."""
        if refusal is not None:
            self._turnstile.refused(refusal)
        if not self._left:
            self._left = True
            self._timer.cancel()
            self._turnstile._leave()


class TurnstileMiddleware:
    """Around the routes that submit requests.

    Args:
        turnstile: of the event loop.
        paths: beginnings of the paths that pass through it.
        one_queue: whether all requests go to one engine, so that a refusal of one says something about the next.
    """

    def __init__(
        self, app: ASGIApp, turnstile: Turnstile, paths: tuple[str, ...], one_queue: Callable[[], bool]
    ) -> None:
        self._app = app
        self._turnstile = turnstile
        self._paths = paths
        self._one_queue = one_queue

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI entrance."""
        if scope["type"] != "http" or scope["method"] != "POST" or not scope["path"].startswith(self._paths):
            await self._app(scope, receive, send)
            return
        turn = await self._turnstile.enter()
        try:
            refusal = self._turnstile.refusal() if self._one_queue() else None
            if refusal is not None:
                await response_of(refusal)(scope, receive, send)
                return
            scope[TURN] = turn
            await self._app(scope, receive, send)
        finally:
            turn.leave()
