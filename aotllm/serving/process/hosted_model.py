"""`HostedModel`: an engine in the engine process, and the ways of its responses to the front ends."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from aotllm.loaded_engine import LoadedEngine
from aotllm.manager import Response
from aotllm.serving.process.front_end_connection import FrontEndConnection
from aotllm.serving.process.messages import FullResponse, ModelState, Responses, Tokens, wire_response
from aotllm.serving.repository import ModelState as RepositoryState

_POLL_SECONDS = 3600.0
"""An idle poller sleeps: a response or shutdown wakes it"""


@dataclass
class _Route:
    """Where the responses of one request go."""

    connection: FrontEndConnection
    id: int
    remaining: int
    """Sequences that have not ended"""


class HostedModel:
    """Used on the event loop only, but for its polling thread.

    Args:
        name, path: of the engine.
        on_fault: called on the loop when the runtime itself fails.
    """

    def __init__(self, name: str, path: str, on_fault: Callable[[HostedModel, Exception], None]) -> None:
        self.name = name
        self.path = path
        self.state: RepositoryState = "UNAVAILABLE"
        self.reason = "not loaded yet"
        self.loaded: LoadedEngine | None = None
        self._on_fault = on_fault
        self._alive = True
        self._generation = 0
        self._routes: dict[int, _Route] = {}

    def snapshot(self) -> ModelState:
        """What front ends are told."""
        loaded = self.loaded
        if loaded is None:
            return ModelState(self.name, self.path, self.state, self.reason, False, self._generation)
        manager = loaded.manager
        return ModelState(
            self.name,
            self.path,
            self.state,
            self.reason,
            self._alive,
            self._generation,
            manager.max_seq_len,
            manager.vocab_size,
            loaded.adapters.ids,
        )

    def attach(self, loaded: LoadedEngine) -> None:
        """Its engine is there."""
        self.loaded, self._alive = loaded, True
        self.state, self.reason = "READY", ""
        self._generation += 1
        self._closing = False
        self._poller = threading.Thread(
            target=self._poll, args=(loaded, asyncio.get_running_loop()), name=f"poll-{self.name}", daemon=True
        )
        self._poller.start()

    async def detach(self, drain: bool) -> None:
        """Shut its manager down and forget it."""
        loaded = self.loaded
        if loaded is None:
            return
        self._closing = True
        await asyncio.to_thread(loaded.manager.shutdown, drain)
        await asyncio.to_thread(self._poller.join)
        await asyncio.sleep(0)  # what the poller has handed over last
        self.loaded = None
        self._routes.clear()

    def route(self, native_id: int, connection: FrontEndConnection, request_id: int, sequences: int) -> None:
        """Remember who asked."""
        self._routes[native_id] = _Route(connection, request_id, sequences)

    def _poll(self, loaded: LoadedEngine, loop: asyncio.AbstractEventLoop) -> None:
        try:
            while True:
                start = time.monotonic()
                responses = loaded.manager.poll(_POLL_SECONDS)
                if responses:
                    loop.call_soon_threadsafe(self._deliver, responses)
                elif self._closing and time.monotonic() - start < _POLL_SECONDS / 2:
                    return  # poll does not wait when the manager has nothing left
        except Exception as error:
            self._alive = False
            loop.call_soon_threadsafe(self._on_fault, self, error)

    def _deliver(self, responses: Sequence[Response]) -> None:
        batches: dict[FrontEndConnection, list[Tokens | FullResponse]] = {}
        for response in responses:
            route = self._routes.get(response.request_id)
            if route is None:
                continue  # its front end has gone
            batches.setdefault(route.connection, []).append(wire_response(route.id, response))
            if response.error_kind is not None:
                route.remaining = 0
            elif response.finish_reason is not None:
                route.remaining -= 1
            if route.remaining <= 0:
                del self._routes[response.request_id]
                route.connection.requests.pop(route.id, None)
        for connection, batch in batches.items():
            connection.send(Responses(batch))

    def drop(self, native_ids: Sequence[int]) -> None:
        """Their front end has gone: nobody wants the rest."""
        for native_id in native_ids:
            self._routes.pop(native_id, None)
            if self.loaded is not None:
                self.loaded.manager.cancel(native_id)
