"""`OutputStream.take_all_async(through)`: outputs that go to their consumer without waking it."""

from __future__ import annotations

import asyncio
import threading

from aotllm.request import RequestOutput, Timings, TokenOutput
from aotllm.request_handle import OutputStream


def output(text: str) -> TokenOutput:
    return TokenOutput(text, (1,))


def end() -> RequestOutput:
    return RequestOutput(1, (), 0, (), Timings(None, 1.0))


def texts(outputs: list[TokenOutput]) -> list[str]:
    return [each.text for each in outputs]


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_outputs_that_are_taken_wake_nobody_and_the_end_always_does():
    async def main() -> None:
        stream, taken = OutputStream(), []

        def through(each: TokenOutput) -> bool:
            taken.append(each.text)
            return True

        waiting = asyncio.ensure_future(stream.take_all_async(through))
        await turns()
        for text in "abc":
            assert stream.put([output(text)])
        await turns()
        assert (taken, waiting.done()) == (["a", "b", "c"], False)
        stream.put([output("d")], end())
        assert texts(await waiting) == ["d"]
        assert taken == ["a", "b", "c"]
        assert await stream.take_all_async(through) == []

    asyncio.run(main())


def test_what_is_refused_comes_in_order_and_nothing_overtakes_it():
    async def main() -> None:
        stream, offered = OutputStream(), []

        def through(each: TokenOutput) -> bool:
            offered.append(each.text)
            return each.text != "b"

        waiting = asyncio.ensure_future(stream.take_all_async(through))
        await turns()
        for text in "abcd":
            stream.put([output(text)])
        assert texts(await waiting) == ["b", "c", "d"]
        assert offered == ["a", "b"]
        waiting = asyncio.ensure_future(stream.take_all_async(through))
        await turns()
        stream.put([output("e")])
        assert offered == ["a", "b", "e"]
        waiting.cancel()

    asyncio.run(main())


def test_nothing_is_offered_while_nobody_waits_or_to_a_task_that_was_cancelled():
    async def main() -> None:
        stream, offered = OutputStream(), []

        def through(each: TokenOutput) -> bool:
            offered.append(each.text)
            return True

        stream.put([output("a")])
        assert texts(await stream.take_all_async(through)) == ["a"]
        stream.put([output("b")])
        waiting = asyncio.ensure_future(stream.take_all_async(through))
        await turns()
        assert texts(await waiting) == ["b"]
        left = asyncio.ensure_future(stream.take_all_async(through))
        await turns()
        left.cancel()
        await turns()
        stream.put([output("c")])
        assert texts(await stream.take_all_async(through)) == ["c"]
        assert offered == []

    asyncio.run(main())


def test_nothing_is_offered_on_another_thread():
    async def main() -> None:
        stream, offered = OutputStream(), []

        def through(each: TokenOutput) -> bool:
            offered.append(threading.get_ident())
            return True

        waiting = asyncio.ensure_future(stream.take_all_async(through))
        await turns()
        await asyncio.to_thread(stream.put, [output("a")])
        assert texts(await waiting) == ["a"]
        assert offered == []

    asyncio.run(main())
