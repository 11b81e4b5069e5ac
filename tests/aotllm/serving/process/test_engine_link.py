"""A front end and an engine process on one event loop: all of `ServingEngine`, and what happens when either dies."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator

import pytest

from aotllm.beam_search import BeamSearchParams
from aotllm.errors import ContextTooLong, EngineError, InvalidRequest, Overloaded, Unavailable
from aotllm.request import Request
from aotllm.sampling_params import SamplingParams
from aotllm.serving.errors import ModelNotFound
from aotllm.serving.process.remote_repository import RemotePeers, RemoteTable
from aotllm.structured_outputs import StructuredOutputs
from tests.aotllm.fake_manager import FakeManager, says
from tests.aotllm.serving.process.engine_group import Group, Run

GREETING = "Grüße, 🌊!"


def endless(request: object) -> Iterator[int]:
    return itertools.cycle(b"x")


def test_requests_stream_through(run: Run):
    async def test(group: Group) -> None:
        engine = (await group.front_end()).engines()["m"]
        handle = await engine.submit_async(Request(prompt="hi", sampling=SamplingParams(n=2, logprobs=1)))
        texts = ["", ""]
        async for output in handle:
            texts[output.index] += output.text
            assert len(output.logprobs) == len(output.token_ids)
        result = await handle
        assert texts == [GREETING, GREETING]
        assert [answer.finish_reason for answer in result.outputs] == ["stop", "stop"]
        assert (result.num_cached_tokens, result.timings.queue_seconds) == (2, 0.0)

    run(test, FakeManager(says(GREETING), num_cached_tokens=2))


def test_refusals_keep_kind_and_details(run: Run):
    manager = FakeManager(endless, stepping="by hand", max_queue_size=1)

    async def test(group: Group) -> None:
        engine = (await group.front_end()).engines()["m"]
        with pytest.raises(InvalidRequest, match="no adapter"):
            await engine.submit_async(Request(prompt="hi", adapter="none"))
        with pytest.raises(ContextTooLong, match="maximum context length is 4096"):
            await engine.submit_async(Request(prompt="x" * 5000))
        running = await engine.submit_async("hi")
        with pytest.raises(Overloaded) as full:
            await engine.submit_async("hi")
        assert full.value.retry_after == 2.5
        running.cancel()

    run(test, manager)


def test_a_grammar_is_compiled_in_the_engine_process_and_a_bad_one_refused(run: Run):
    manager = FakeManager(says("ok"))

    async def test(group: Group) -> None:
        engine = (await group.front_end()).engines()["m"]
        with pytest.raises(InvalidRequest, match="regex"):
            await engine.submit_async(Request(prompt="hi", structured_outputs=StructuredOutputs(regex="(")))
        await (await engine.submit_async(Request(prompt="hi", structured_outputs=StructuredOutputs(choice=["ok"]))))
        assert manager.submitted[-1].constraint is not None

    run(test, manager)


def test_beam_search_goes_through(run: Run):
    def top(text: object) -> list[tuple[int, float]]:
        return [(ord("a"), -0.1), (ord("b"), -2.0), (ord("c"), -3.0), (ord("d"), -4.0)]

    async def test(group: Group) -> None:
        engine = (await group.front_end()).engines()["m"]
        params = SamplingParams(max_tokens=3)
        result = await engine.beam_search_async(Request(prompt="hi", sampling=params), BeamSearchParams(beam_width=2))
        assert result.text == "aaa"

    run(test, FakeManager(says("aaaa"), top=top))


def test_a_handle_that_is_let_go_frees_its_request(run: Run):
    manager = FakeManager(endless, stepping="by hand")

    async def test(group: Group) -> None:
        engine = (await group.front_end()).engines()["m"]
        handle = await engine.submit_async("hi")
        await asyncio.to_thread(manager.wait_until, lambda m: len(m.running) == 1)
        del handle
        await asyncio.to_thread(manager.wait_until, lambda m: not m.running)

    run(test, manager)


def test_a_front_end_that_dies_takes_only_its_own_requests_along(run: Run):
    manager = FakeManager(endless, stepping="by hand")

    async def test(group: Group) -> None:
        dying, living = await group.front_end(), await group.front_end()
        lost = await dying.engines()["m"].submit_async("hi")
        kept = await living.engines()["m"].submit_async(Request(prompt="ho", sampling=SamplingParams(max_tokens=2)))
        dying.link.close()
        await asyncio.to_thread(manager.wait_until, lambda m: len(m.running) == 1)
        with pytest.raises(Unavailable):
            await lost
        assert not dying.engines()["m"].alive
        await asyncio.to_thread(manager.step, 2)
        assert (await kept).text == "xx"

    run(test, manager)


def test_an_engine_process_that_dies_fails_what_runs_and_what_comes(run: Run):
    manager = FakeManager(endless, stepping="by hand")

    async def test(group: Group) -> None:
        front_end = await group.front_end()
        engine = front_end.engines()["m"]
        running = await engine.submit_async("hi")
        for connection in list(group.server._connections):
            connection._transport.abort()  # as the kernel does for a killed process
        with pytest.raises(Unavailable, match="engine process has ended"):
            await running
        assert not engine.alive
        with pytest.raises(Unavailable):
            await engine.submit_async("hi")
        with pytest.raises(Unavailable):
            await engine.stats_async()

    run(test, manager)


def test_a_fault_of_the_runtime_fails_its_requests_and_shows_in_alive(run: Run):
    manager = FakeManager(endless, stepping="by hand")

    async def test(group: Group) -> None:
        engine = (await group.front_end()).engines()["m"]
        running = await engine.submit_async("hi")
        manager.fail(RuntimeError("the card is gone"))
        with pytest.raises(Exception, match="the card is gone"):
            await running
        while engine.alive:
            await asyncio.sleep(0)

    run(test, manager)


def test_unloading_lets_requests_finish_and_loading_brings_the_engine_back(run: Run):
    first, second = FakeManager(says("one"), stepping="by hand"), FakeManager(says("two"))

    async def test(group: Group) -> None:
        front_end, other = await group.front_end(), await group.front_end()
        engine = front_end.engines()["m"]
        running = await engine.submit_async("hi")
        unloading = asyncio.create_task(front_end.unload("m"))
        await asyncio.to_thread(first.wait_until, lambda m: m.shutdowns == [True])
        assert front_end.engines() == {}
        assert [entry.state for entry in other.entries()] == ["UNLOADING"]
        await asyncio.to_thread(first.step, 10)
        assert (await running).text == "one"
        await unloading
        assert [(e.state, e.reason) for e in other.entries()] == [("UNAVAILABLE", "unloaded")]
        with pytest.raises(ModelNotFound, match="not loaded"):
            await engine.submit_async("hi")
        await front_end.load("m")
        for repository in (front_end, other):  # all of them serve it when load returns
            assert (await (await repository.engines()["m"].submit_async("hi"))).text == "two"
        with pytest.raises(ModelNotFound):
            await front_end.load("../../etc/passwd")

    run(test, m=[first, second])


def test_an_engine_that_fails_to_load_says_why_and_leaves_the_others(run: Run):
    async def test(group: Group) -> None:
        front_end = await group.front_end()
        with pytest.raises(EngineError, match="no second time"):
            await front_end.load("a")
        states = {entry.name: entry.state for entry in front_end.entries()}
        assert states == {"a": "UNAVAILABLE", "b": "READY"}
        assert (await (await front_end.engines()["b"].submit_async("hi"))).text == "b"

    run(test, a=[FakeManager(says("a"))], b=[FakeManager(says("b"))])


def test_tables_are_the_same_for_all_front_ends(run: Run):
    async def test(group: Group) -> None:
        one, two = [RemoteTable(await group.front_end(), "regions") for _ in range(2)]
        assert await one.put("r", {"key": "/r", "bytes": 8})
        assert two.items() == {"r": {"key": "/r", "bytes": 8}}
        assert not await two.put("r", {})
        assert await two.remove("r") == {"key": "/r", "bytes": 8}
        assert one.items() == {}
        assert await one.remove("r") is None

    run(test, FakeManager())


def test_late_front_ends_learn_what_tables_hold(run: Run):
    async def test(group: Group) -> None:
        await RemoteTable(await group.front_end(), "regions").put("r", 1)
        late = RemoteTable(await group.front_end(), "regions")
        while late.items() != {"r": 1}:
            await asyncio.sleep(0)

    run(test, FakeManager())


def test_all_front_ends_answer_to_those_that_gather(run: Run):
    async def test(group: Group) -> None:
        peers = [RemotePeers(await group.front_end()) for _ in range(3)]
        for number, peer in enumerate(peers[:2]):
            peer.offer("numbers", lambda number=number: [number])  # type: ignore[misc]
        assert sorted(await peers[2].gather("numbers")) == [[0], [1]]
        group.front_ends[0].link.close()
        assert await peers[1].gather("numbers") in ([[1]], [[0], [1]], [[1], [0]])

    run(test, FakeManager())


def test_adapters_come_and_go_for_all_front_ends(run: Run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("aotllm.adapters.read_adapter", str)
    manager = FakeManager(says("ok"))

    async def test(group: Group) -> None:
        one, two = (await group.front_end()).engines()["m"], (await group.front_end()).engines()["m"]
        await one.load_lora_async("poet", "folder")
        assert two.lora_names == ("poet",)
        await (await two.submit_async(Request(prompt="hi", adapter="poet")))
        assert manager.submitted[-1].adapter == 1
        await two.unload_lora_async("poet")
        assert one.lora_names == ()

    run(test, manager)


def test_counters_and_memory(run: Run):
    async def test(group: Group) -> None:
        engine = (await group.front_end()).engines()["m"]
        stats, memory = await engine.stats_async(), await engine.memory_async()
        assert (stats.steps, stats.blocks_total, stats.counters["spilled"]) == (3, 4, 5)
        assert (memory.tokens, memory.groups[0].device_blocks) == (640, 40)

    run(test, FakeManager())
