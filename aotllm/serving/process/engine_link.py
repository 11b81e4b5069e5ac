"""`EngineLink`: a front end's connection to the engine process."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable
from typing import Any, cast

from aotllm.errors import Unavailable
from aotllm.manager import ALL_SEQUENCES, ManagerRequest
from aotllm.output_assembler import OutputAssembler
from aotllm.request_handle import OutputStream, RequestListener
from aotllm.request_table import RequestTable
from aotllm.serving.process import messages as wire
from aotllm.serving.process.failures import error_of
from aotllm.serving.process.framing import FrameReader
from aotllm.structured_outputs import Grammar

_RETRY_SECONDS = 0.05

News = wire.State | wire.TableChange


def engine_lost() -> Unavailable:
    """What clients are told when the engine process has gone."""
    return Unavailable("the engine process has ended; the server has to be started again")


class EngineLink(asyncio.Protocol):
    """Made on the event loop that it lives on. Everything but `cancel` is called there.

    Args:
        on_news: called with each new state and each change of a table, in order.
    """

    def __init__(self, on_news: Callable[[News], None]) -> None:
        self.lost = asyncio.Event()
        self.topics: dict[str, Callable[[], Any]] = {}
        """What this front end answers to those that gather"""
        self._on_news = on_news
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._reader = FrameReader()
        self._ids = itertools.count(1)
        self._table = RequestTable(self.cancel)
        self._submitting: dict[int, asyncio.Future[None]] = {}
        self._asking: dict[int, asyncio.Future[Any]] = {}
        self._transport: asyncio.WriteTransport | None = None

    @classmethod
    async def connect(cls, path: str, on_news: Callable[[News], None]) -> EngineLink:
        """Connect as soon as the engine process listens."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                _, link = await loop.create_unix_connection(lambda: cls(on_news), path)
                return link
            except (FileNotFoundError, ConnectionRefusedError):
                await asyncio.sleep(_RETRY_SECONDS)

    @property
    def connected(self) -> bool:
        """There is an engine process at the other end."""
        return self._transport is not None and not self.lost.is_set()

    def __len__(self) -> int:
        """Requests in flight."""
        return len(self._table)

    async def submit(
        self,
        model: str,
        request: ManagerRequest,
        make_assembler: Callable[[int], OutputAssembler],
        listener: RequestListener | None = None,
    ) -> tuple[int, OutputStream]:
        """Queue a request, whose constraint is a `Grammar` here. Returns its id and the stream of its outputs.

        Raises:
            AotllmError: what the manager raised.
            Unavailable: there is no engine process.
        """
        self._check_connected()
        request_id = next(self._ids)
        grammar: Grammar | None = request.constraint  # type: ignore[assignment]
        data = wire.frame(wire.Submit(request_id, model, wire.wire_request(request), wire.wire_grammar(grammar)))
        # Before it is sent: responses may come with the very read that brings Accepted.
        stream = self._table.add(request_id, request, make_assembler, listener)
        accepted = self._submitting[request_id] = self._loop.create_future()
        self._write(data)
        try:
            await accepted
        except BaseException as error:
            self._table.forget(request_id)
            if isinstance(error, asyncio.CancelledError):
                self.cancel(request_id)
            raise
        finally:
            self._submitting.pop(request_id, None)
        return request_id, stream

    def cancel(self, request_id: int, sequence_index: int = ALL_SEQUENCES) -> None:
        """See `Manager.cancel`. From any thread, as a handle may be garbage collected on any."""
        if threading.get_ident() == self._thread:
            self._write(wire.frame(wire.Cancel(request_id, sequence_index)))
        elif not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.cancel, request_id, sequence_index)

    async def query(self, method: str, *args: Any) -> Any:
        """Call a method of the engine process. Raises what it raises, or Unavailable."""
        self._check_connected()
        query_id = next(self._ids)
        answer = self._asking[query_id] = self._loop.create_future()
        self._write(wire.frame(wire.Query(query_id, method, list(args))))
        try:
            return await answer
        finally:
            self._asking.pop(query_id, None)

    def seen(self, version: int) -> None:
        """Tell that this front end serves a state."""
        self._write(wire.frame(wire.Seen(version)))

    def cancel_all(self) -> None:
        """End the requests in flight as cancelled."""
        self._table.cancel_all()
        self.close()

    def close(self) -> None:
        """Close the connection: the engine process drops what this front end has asked for."""
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        self._transport = cast(asyncio.WriteTransport, transport)

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        for frame in self._reader.feed(data):
            self._take(wire.to_front_end.decode(frame))

    def connection_lost(self, error: Exception | None) -> None:
        """See asyncio.Protocol."""
        self.lost.set()
        for future in (*self._submitting.values(), *self._asking.values()):
            if not future.done():
                future.set_exception(engine_lost())
        for request_id in self._submitting:
            self._table.forget(request_id)
        self._table.fail_all(engine_lost())

    def _take(self, message: wire.ToFrontEnd) -> None:
        match message:
            case wire.Responses():
                for response in message.responses:
                    self._table.route(response)  # type: ignore[arg-type]  # its attributes are those of a Response
            case wire.Accepted():
                self._resolve(self._submitting.get(message.id), None, None)
            case wire.Refused():
                self._resolve(self._submitting.get(message.id), None, message.failure)
            case wire.Answer():
                self._resolve(self._asking.get(message.id), message.value, message.failure)
            case wire.State() | wire.TableChange():
                self._on_news(message)
            case wire.Gather():
                source = self.topics.get(message.topic)
                self._write(wire.frame(wire.Gathered(message.id, None if source is None else source())))

    def _resolve(self, future: asyncio.Future[Any] | None, value: Any, failure: wire.Failure | None) -> None:
        if future is None or future.done():
            return
        if failure is None:
            future.set_result(value)
        else:
            future.set_exception(error_of(failure))

    def _check_connected(self) -> None:
        if not self.connected:
            raise engine_lost()

    def _write(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)
