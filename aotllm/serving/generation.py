"""Running the requests behind one call: submit all or none, follow them together, stop when the client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from itertools import chain
from typing import Any, Protocol, TypeVar

from aotllm.beam_search import BeamSearchParams
from aotllm.errors import AotllmError, Cancelled, Overloaded
from aotllm.request import Request, RequestOutput, TokenOutput
from aotllm.request_handle import RequestHandle, Through
from aotllm.request_table import as_internal
from aotllm.serving.call import Call
from aotllm.serving.engine import ServingEngine

T = TypeVar("T")


class Connection(Protocol):
    """The way to a client: an HTTP request, or what tells of another protocol's client that it leaves."""

    @property
    def receive(self) -> Callable[[], Awaitable[Any]]:
        """As in ASGI: a coroutine whose message says `http.disconnect` when the client has gone."""


async def submit_all(engine: ServingEngine, requests: Sequence[Request], call: Call) -> list[RequestHandle]:
    """Submit all requests or none: if one is refused, the others are cancelled."""
    handles: list[RequestHandle] = []
    try:
        for request in requests:
            handles.append(await submit(engine, request, call))
        call.submitted()
    except BaseException as error:
        _cancel_all(handles)
        call.submitted(error if isinstance(error, Overloaded) else None)
        if isinstance(error, Cancelled):
            raise shutting_down() from error
        raise
    return handles


async def submit(engine: ServingEngine, request: Request, call: Call) -> RequestHandle:
    """Submit a request that the call's telemetry hears of. Raises what `ServingEngine.submit_async` raises."""
    listener = call.begin(request)
    try:
        return await engine.submit_async(request, listener)
    except BaseException as error:
        listener.on_end(None, _told(error))
        raise


def _told(error: BaseException) -> AotllmError:
    # Cancellation of a task is no Exception; what else is not ours is a fault.
    return as_internal(error) if isinstance(error, Exception) else Cancelled("the client has gone")


def _cancel_all(handles: Sequence[RequestHandle]) -> None:
    for handle in handles:
        handle.cancel()


def shutting_down() -> Overloaded:
    """What clients are told whose requests end with the server."""
    return Overloaded("the server is shutting down; try again later")


async def merged(
    handles: Sequence[RequestHandle], through: Through | None = None
) -> AsyncGenerator[tuple[int, TokenOutput], None]:
    """Outputs of all handles as they come, each with the index of its handle. What has come for a sequence while the
    consumer was busy is one output, so that a slow reader costs less, not more. Ends all when one fails or the consumer
    leaves.

    Args:
        handles: one or more.
        through: see `RequestHandle.take_all`; only where there is one handle.
    """
    try:
        if len(handles) == 1:
            # No task and queue in between: this is the way of nearly every token.
            while outputs := await handles[0].take_all(through):
                for output in outputs if len(outputs) == 1 else joined(outputs):
                    yield 0, _not_ended_by_us(output)
            return
        async with aclosing(_batches(handles)) as batches:
            async for index, outputs in batches:
                for output in joined(outputs):
                    yield index, _not_ended_by_us(output)
    finally:
        _cancel_all(handles)


def _not_ended_by_us(output: TokenOutput) -> TokenOutput:
    # Whoever reads it has not cancelled it.
    if output.finish_reason == "cancelled":
        raise shutting_down()
    return output


def joined(outputs: Sequence[TokenOutput]) -> list[TokenOutput]:
    """One output per sequence in place of many, in the order of their first ones."""
    by_sequence: dict[int, list[TokenOutput]] = {}
    for output in outputs:
        by_sequence.setdefault(output.index, []).append(output)
    return [parts[0] if len(parts) == 1 else _join(parts) for parts in by_sequence.values()]


def _join(parts: Sequence[TokenOutput]) -> TokenOutput:
    return TokenOutput(
        text="".join([part.text for part in parts]),
        token_ids=tuple(chain.from_iterable([part.token_ids for part in parts])),
        logprobs=tuple(chain.from_iterable([part.logprobs for part in parts])),
        logits=tuple(chain.from_iterable([part.logits for part in parts])),
        finish_reason=parts[-1].finish_reason,
        stop_reason=parts[-1].stop_reason,
        index=parts[0].index,
        prompt_logprobs=parts[0].prompt_logprobs,
    )


async def _batches(handles: Sequence[RequestHandle]) -> AsyncGenerator[tuple[int, list[TokenOutput]], None]:
    queue: asyncio.Queue[tuple[int, list[TokenOutput] | Exception]] = asyncio.Queue()

    async def pump(index: int, handle: RequestHandle) -> None:
        try:
            while outputs := await handle.take_all():
                queue.put_nowait((index, outputs))
            queue.put_nowait((index, []))
        except Exception as error:
            queue.put_nowait((index, error))

    tasks = [asyncio.create_task(pump(index, handle)) for index, handle in enumerate(handles)]
    try:
        running = len(tasks)
        while running:
            index, item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item:
                yield index, item
            else:
                running -= 1
    finally:
        for task in tasks:
            task.cancel()


async def results(handles: Sequence[RequestHandle], client: Connection) -> list[RequestOutput]:
    """All results, in order. When the client disconnects, the requests are cancelled and Cancelled is raised."""

    async def gather() -> list[RequestOutput]:
        return list(await asyncio.gather(*(_result(handle) for handle in handles)))

    try:
        return await _while_connected(gather(), client)
    finally:
        _cancel_all(handles)


async def beam_results(
    engine: ServingEngine, requests: Sequence[Request], params: BeamSearchParams, client: Connection, call: Call
) -> list[RequestOutput]:
    """`results` of beam searches, which end when the client disconnects."""

    async def gather() -> list[RequestOutput]:
        searches = [asyncio.ensure_future(_search(engine, request, params, call)) for request in requests]
        try:
            return [_not_cancelled(await search) for search in searches]
        except Cancelled as error:  # between two steps
            raise shutting_down() from error
        finally:
            for search in searches:
                search.cancel()
            await asyncio.gather(*searches, return_exceptions=True)

    return await _while_connected(gather(), client)


async def _search(engine: ServingEngine, request: Request, params: BeamSearchParams, call: Call) -> RequestOutput:
    listener = call.begin(request)
    try:
        result = await engine.beam_search_async(request, params)
    except BaseException as error:
        listener.on_end(None, _told(error))
        raise
    listener.on_end(result, None)
    return result


async def _result(handle: RequestHandle) -> RequestOutput:
    return _not_cancelled(await handle)


def _not_cancelled(result: RequestOutput) -> RequestOutput:
    # The client is still there, so it was the server that cancelled.
    if any(output.finish_reason == "cancelled" for output in result.outputs):
        raise shutting_down()
    return result


async def _while_connected(work: Awaitable[T], client: Connection) -> T:
    task: asyncio.Future[T] = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnected(client.receive))
    both: list[asyncio.Future[Any]] = [task, watch]
    try:
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Cancelled("the client closed the connection")
        return task.result()
    finally:
        for pending in both:
            pending.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await task


async def _disconnected(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
