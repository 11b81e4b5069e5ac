"""Handles on event loops: streaming, awaiting, consumers that go away."""

from __future__ import annotations

import asyncio
import gc
import itertools
from collections.abc import Callable

import pytest

from aotllm import Executor, Request, RequestHandle
from aotllm.errors import Internal, InvalidRequest
from aotllm.manager import ManagerRequest
from tests.aotllm.fake_manager import FakeManager, echoes, says

Start = Callable[..., Executor]


def endless(request: ManagerRequest) -> itertools.repeat[int]:
    return itertools.repeat(ord("x"))


def test_async_for_streams_in_order(start: Start):
    async def main() -> list[str]:
        handle = await start(FakeManager(says("sea"))).submit_async("?")
        return [output.text async for output in handle]

    assert asyncio.run(main()) == ["s", "e", "a", ""]


def test_many_requests_on_one_loop(start: Start):
    async def main() -> list[str]:
        executor = start(FakeManager(echoes))
        handles = [await executor.submit_async(f"{i}") for i in range(20)]
        return [result.text for result in await asyncio.gather(*handles)]

    assert asyncio.run(main()) == [f"{i}" for i in range(20)]


def test_two_loops_may_use_one_executor(start: Start):
    executor = start(FakeManager(echoes))

    async def ask(text: str) -> str:
        return (await executor.submit(text)).text

    assert [asyncio.run(ask("a")), asyncio.run(ask("b"))] == ["a", "b"]


def test_awaiting_a_finished_request_returns_at_once(start: Start):
    async def main() -> None:
        executor = start(FakeManager(says("ok")))
        handle = executor.submit("?")
        handle.result()
        executor.shutdown()
        assert (await handle).text == "ok"
        assert (await handle).text == "ok"
        assert [output.text async for output in handle] == ["o", "k", ""]

    asyncio.run(main())


def test_the_loop_runs_while_a_request_waits(start: Start):
    async def main() -> str:
        manager = FakeManager(says("ok"), stepping="by hand")
        waiting = asyncio.ensure_future(start(manager).submit("?"))
        await asyncio.sleep(0)
        assert not waiting.done()
        manager.step(3)
        return (await waiting).text

    assert asyncio.run(main()) == "ok"


def test_an_error_is_raised_in_the_awaiting_task(start: Start):
    async def main() -> None:
        executor = start(FakeManager(lambda _: [ord("a"), Internal("lost")]))
        with pytest.raises(Internal, match="lost"):
            await executor.submit("?")
        handle = executor.submit("?")
        assert (await anext(handle)).text == "a"
        with pytest.raises(Internal, match="lost"):
            await anext(handle)
        with pytest.raises(InvalidRequest):
            await executor.submit_async([999])

    asyncio.run(main())


async def _read(handle: RequestHandle) -> None:
    async for _ in handle:
        pass


async def _wait(handle: RequestHandle) -> None:
    await handle


@pytest.mark.parametrize("consume", [_read, _wait])
def test_cancelling_the_task_cancels_the_request(start: Start, consume: Callable[[RequestHandle], object]):
    async def main() -> None:
        manager = FakeManager(endless, stepping="by hand")
        handle = start(manager).submit("?")
        task = asyncio.ensure_future(consume(handle))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert manager.cancelled == [handle.request_id]
        assert (await handle).finish_reason == "cancelled"

    asyncio.run(main())


def test_a_loop_that_ends_under_its_request_cancels_it(start: Start):
    manager = FakeManager(endless, stepping="by hand")
    executor = start(manager)
    handle = executor.submit("?")
    loop = asyncio.new_event_loop()
    step = anext(handle).__await__()
    loop.call_soon(step.send, None)
    loop.call_soon(loop.stop)
    loop.run_forever()
    loop.close()
    manager.step()
    manager.wait_until(lambda m: m.cancelled == [handle.request_id])
    assert handle.result().finish_reason == "cancelled"


def test_a_dropped_stream_cancels(start: Start):
    async def main() -> FakeManager:
        manager = FakeManager(endless, stepping="by hand")
        handle = start(manager).submit("?")
        manager.step()
        async for _ in handle:
            break
        del handle
        gc.collect()
        return manager

    assert asyncio.run(main()).cancelled == [1]


def test_generate_async_runs_a_batch_larger_than_the_queue(start: Start):
    async def main() -> list[str]:
        executor = start(FakeManager(echoes, max_queue_size=3))
        prompts = [Request(prompt=f"{i}") for i in range(20)]
        return [result.text for result in await executor.generate_async(prompts)]

    assert asyncio.run(main()) == [f"{i}" for i in range(20)]


def test_cancelling_generate_async_cancels_its_requests(start: Start):
    async def main() -> None:
        manager = FakeManager(endless, stepping="by hand")
        task = asyncio.ensure_future(start(manager).generate_async(["a", "b"]))
        await asyncio.to_thread(manager.wait_until, lambda m: len(m.submitted) == 2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert sorted(set(manager.cancelled)) == [1, 2]

    asyncio.run(main())


def test_take_all_takes_what_waits_and_ends_with_nothing(start):
    manager = FakeManager(says("abcd"), stepping="by hand")
    executor = start(manager)

    async def run() -> list[str]:
        handle = await executor.submit_async("p")
        taken = []
        for steps in (1, 3, 1):  # the last one is the end token
            for _ in range(steps):
                manager.step_and_wait()
            taken.append("".join(output.text for output in await handle.take_all()))
        assert await handle.take_all() == []
        assert await handle.take_all() == []
        return taken

    assert asyncio.run(run()) == ["a", "bcd", ""]


def test_take_all_raises_after_what_was_generated(start):
    executor = start(FakeManager(lambda _: [97, Internal("lost")]))

    async def run() -> str:
        handle = await executor.submit_async("p")
        text = ""
        with pytest.raises(Internal, match="lost"):
            while outputs := await handle.take_all():
                text += "".join(output.text for output in outputs)
        return text

    assert asyncio.run(run()) == "a"


def test_cancelling_take_all_cancels_the_request(start):
    manager = FakeManager(says("ab"), stepping="by hand")
    executor = start(manager)

    async def run() -> None:
        handle = await executor.submit_async("p")
        task = asyncio.create_task(handle.take_all())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    assert set(manager.cancelled) == {1}
