"""Running the requests behind one HTTP call: submit all or none, follow them together, stop when the client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from fastapi import Request as HttpRequest

from aotllm.beam_search import BeamSearchParams
from aotllm.errors import Cancelled, Overloaded
from aotllm.executor import Executor
from aotllm.request import Request, RequestOutput, TokenOutput
from aotllm.request_handle import RequestHandle

T = TypeVar("T")


async def submit_all(executor: Executor, requests: Sequence[Request]) -> list[RequestHandle]:
    """Submit all requests or none: if one is refused, the others are cancelled."""
    handles: list[RequestHandle] = []
    try:
        for request in requests:
            handles.append(await executor.submit_async(request))
    except BaseException as error:
        _cancel_all(handles)
        if isinstance(error, Cancelled):
            raise shutting_down() from error
        raise
    return handles


def _cancel_all(handles: Sequence[RequestHandle]) -> None:
    for handle in handles:
        handle.cancel()


def shutting_down() -> Overloaded:
    """What clients are told whose requests end with the server."""
    return Overloaded("the server is shutting down; try again later")


async def merged(handles: Sequence[RequestHandle]) -> AsyncIterator[tuple[int, TokenOutput]]:
    """Outputs of all handles as they come, each with the index of its handle. Ends all when one fails or the consumer
    leaves."""
    queue: asyncio.Queue[tuple[int, TokenOutput | BaseException | None]] = asyncio.Queue()

    async def pump(index: int, handle: RequestHandle) -> None:
        try:
            async for output in handle:
                queue.put_nowait((index, output))
            queue.put_nowait((index, None))
        except Exception as error:
            queue.put_nowait((index, error))

    tasks = [asyncio.create_task(pump(index, handle)) for index, handle in enumerate(handles)]
    try:
        running = len(tasks)
        while running:
            index, item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                running -= 1
            else:
                if item.finish_reason == "cancelled":
                    raise shutting_down()
                yield index, item
    finally:
        for task in tasks:
            task.cancel()
        _cancel_all(handles)


async def results(handles: Sequence[RequestHandle], client: HttpRequest) -> list[RequestOutput]:
    """All results, in order. When the client disconnects, the requests are cancelled and Cancelled is raised."""

    async def gather() -> list[RequestOutput]:
        return list(await asyncio.gather(*(_result(handle) for handle in handles)))

    try:
        return await _while_connected(gather(), client)
    finally:
        _cancel_all(handles)


async def beam_results(
    executor: Executor, requests: Sequence[Request], params: BeamSearchParams, client: HttpRequest
) -> list[RequestOutput]:
    """`results` of beam searches, which end when the client disconnects."""

    async def gather() -> list[RequestOutput]:
        searches = [asyncio.ensure_future(executor.beam_search_async(request, params)) for request in requests]
        try:
            return [_not_cancelled(await search) for search in searches]
        except Cancelled as error:  # between two steps
            raise shutting_down() from error
        finally:
            for search in searches:
                search.cancel()
            await asyncio.gather(*searches, return_exceptions=True)

    return await _while_connected(gather(), client)


async def _result(handle: RequestHandle) -> RequestOutput:
    return _not_cancelled(await handle)


def _not_cancelled(result: RequestOutput) -> RequestOutput:
    # The client is still there, so it was the server that cancelled.
    if any(output.finish_reason == "cancelled" for output in result.outputs):
        raise shutting_down()
    return result


async def _while_connected(work: Awaitable[T], client: HttpRequest) -> T:
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
