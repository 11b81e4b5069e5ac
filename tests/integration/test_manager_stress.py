"""The whole manager under hostile use, on tiny random models: nothing hangs, leaks, or changes another one's answer."""

from __future__ import annotations

import gc
import json
import random
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any

import httpx
import pytest
import uvicorn

from aotllm import BeamSearchParams, Executor, RequestHandle
from aotllm.errors import InvalidRequest, Overloaded
from aotllm.request import RequestOutput
from aotllm.serving import app_of
from aotllm.serving.server import listen
from aotllm.structured_outputs import StructuredOutputs
from tests.integration.stress import TEXT, Models, answer, any_request, ask

# Cancellation ---------------------------------------------------------------------------------------------------------


def cancel_some(draw: random.Random, handles: list[RequestHandle]) -> None:
    """By handle, by sequence or by garbage collection: a part of them, or all."""
    way = draw.randrange(4)
    if way == 0:
        for handle in handles:
            handle.cancel()
    elif way == 1:
        del handles[::2]
        gc.collect()
    elif way == 2:
        for handle in handles:
            handle.cancel(draw.randrange(3))


def storm(executor: Executor, draw: random.Random, adapters: bool) -> None:
    """Requests that are cancelled while they wait, compute their prompt, generate, or have just ended."""
    handles: list[RequestHandle] = []
    for _ in range(30):
        request = any_request(draw.randrange(10**6), adapters)
        with suppress(Overloaded):
            handles.append(executor.submit(request))
        chance = draw.random()
        if handles and chance < 0.1:
            draw.choice(handles).cancel()
        elif handles and chance < 0.15:
            next(handles[-1])  # it has begun
            handles[-1].cancel()
        elif handles and chance < 0.2:
            del handles[draw.randrange(len(handles))]
    cancel_some(draw, handles)
    for handle in handles:
        handle.result(60)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", {}),
        ("llama", {"num_kv_blocks": 18, "speculative": "ngram"}),  # of one sequence and a bit
        (
            "llama",
            {"num_kv_blocks": 20, "kv_host_memory": "200KB", "queue_policy": "longest_prefix", "max_wait_steps": 5},
        ),
        ("llama, int8 cache", {"num_kv_blocks": 18, "max_num_tokens": 24, "max_batch_size": 5, "max_queue_size": 30}),
        (
            "gemma3, windows",
            {"num_kv_blocks": 22, "kv_host_memory": "1MiB", "speculative": "ngram", "max_kv_events": 10},
        ),
        ("gemma3, windows", {"kv_cache_memory": "600tokens", "capacity_policy": "guaranteed_no_evict"}),
    ],
    ids=str,
)
def test_a_storm_of_cancellations_leaves_nothing_and_changes_nothing(
    models: Models, name: str, options: dict[str, Any]
) -> None:
    adapters = name == "llama"
    probes = [any_request(seed, adapters) for seed in range(1000, 1016)]
    with models.start(name, prefix_caching=False) as executor:
        expected = [answer(executor.submit(probe).result()) for probe in probes]
    draw = random.Random(str(options))
    with models.start(name, **options) as executor:
        for _ in range(4):
            storm(executor, draw, adapters)
            assert [answer(result) for result in executor.generate(probes)] == expected
        if options.get("num_kv_blocks", 99) < 20:
            assert executor.stats().preemptions > 0


@contextmanager
def served(executor: Executor) -> Iterator[int]:
    """The port of an HTTP server around the executor."""
    with closing(listen("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(uvicorn.Config(app_of({"m": executor}), log_level="error", lifespan="off"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join()


def call_and_leave(port: int, body: dict[str, Any], read: int, rudely: bool) -> None:
    """A client that goes away after `read` pieces of the answer, with a reset if `rudely`."""
    content = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}"
    )
    with closing(socket.create_connection(("127.0.0.1", port), timeout=60)) as connection:
        connection.sendall(f"{head}\r\n\r\n".encode() + content)
        for _ in range(read):
            connection.recv(100)
        if rudely:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def test_clients_that_leave_free_their_requests_and_change_nothing(models: Models) -> None:
    probe = {"prompt": TEXT[:40], "max_tokens": 20, "temperature": 0, "ignore_eos": True, "logprobs": 2}
    ways = [
        {"stream": True, "n": 3},
        {"n": 3},
        {"best_of": 4, "stream": True},
        {"use_beam_search": True, "n": 4},
        {"stream": True, "structured_outputs": {"regex": "[a-z]{1,150}"}},
        {"prompt": [TEXT[i : i + 40] for i in range(3)]},
    ]
    with models.start("llama", max_batch_size=8) as executor, served(executor) as port:
        url = f"http://127.0.0.1:{port}/v1/completions"
        expected = httpx.post(url, json=probe, timeout=60).json()["choices"]
        for round_ in range(4):
            clients = [
                threading.Thread(
                    target=call_and_leave,
                    args=(
                        port,
                        {"prompt": TEXT[i : i + 50], "max_tokens": 150, "ignore_eos": True, **ways[i % len(ways)]},
                        (i + round_) % 3 if "stream" in ways[i % len(ways)] else 0,
                        i % 2 == 0,
                    ),
                )
                for i in range(18)
            ]
            for client in clients:
                client.start()
            for client in clients:
                client.join()
            assert httpx.post(url, json=probe, timeout=60).json()["choices"] == expected


def test_adapters_come_and_go_while_they_are_used(models: Models) -> None:
    with models.start("llama", num_kv_blocks=40) as executor:
        probe = ask(TEXT[:40], adapter="a", max_tokens=20)
        expected = {
            adapter: executor.submit(ask(TEXT[:40], adapter=adapter, max_tokens=20)).result() for adapter in "ab"
        }
        assert expected["a"].token_ids != expected["b"].token_ids
        for _ in range(6):
            handles = [executor.submit(ask(TEXT[i : i + 40], adapter="a", max_tokens=60, n=2)) for i in range(6)]
            same = executor.submit(probe)
            executor.unload_lora("a")
            with pytest.raises(InvalidRequest, match="no adapter 'a'"):
                executor.submit(probe)
            executor.load_lora("a", models.adapters["b"])  # another one of the same name
            assert executor.submit(probe).result().token_ids == expected["b"].token_ids
            handles[0].cancel()
            assert same.result().token_ids == expected["a"].token_ids
            assert {handle.result().finish_reason for handle in handles[1:]} == {"length"}
            executor.unload_lora("a")
            executor.load_lora("a", models.adapters["a"])


def test_a_beam_search_finishes_with_the_adapter_that_it_began_with(models: Models) -> None:
    with models.start("llama") as executor:
        request = ask(TEXT[:40], adapter="a", max_tokens=30, n=3)
        expected = executor.beam_search(request, BeamSearchParams(3))
        results: list[RequestOutput] = []
        search = threading.Thread(target=lambda: results.append(executor.beam_search(request, BeamSearchParams(3))))
        steps = executor.stats().steps
        search.start()
        while executor.stats().steps == steps and search.is_alive():
            pass
        executor.unload_lora("a")
        search.join()
        assert [o.token_ids for o in results[0].outputs] == [o.token_ids for o in expected.outputs]


# Time, load and the end -----------------------------------------------------------------------------------------------


def test_time_outs_of_every_size(models: Models) -> None:
    with models.start("llama", num_kv_blocks=40) as executor:
        expected = executor.submit(ask(TEXT[:40], max_tokens=100)).result().token_ids
        for timeout in (5e-324, 1e-9, 1e-6, 1e-4, 1e-3, 5e-3, 0.02, 1e6):
            handles = [executor.submit(ask(TEXT[:40], max_tokens=100, n=1 + i % 3, timeout=timeout)) for i in range(8)]
            for handle in handles:
                for output in handle.result(60).outputs:
                    assert output.finish_reason in ("timeout", "length")
                    assert output.token_ids == expected[: len(output.token_ids)]
                    assert (output.finish_reason == "length") == (len(output.token_ids) == 100)


@pytest.mark.parametrize(("batch", "queue"), [(2, 0), (2, 1), (1, 3)])
def test_a_full_queue_refuses_at_once_and_those_inside_go_on(models: Models, batch: int, queue: int) -> None:
    with models.start("llama", max_batch_size=batch, max_queue_size=queue) as executor:
        alone = [
            executor.submit(ask(TEXT[i : i + 30], max_tokens=200)).result().token_ids for i in range(batch + queue)
        ]
        handles = [executor.submit(ask(TEXT[i : i + 30], max_tokens=200)) for i in range(batch + queue)]
        with pytest.raises(Overloaded) as caught:
            for _ in range(200):
                executor.submit(ask(TEXT[:30]))
        assert caught.value.retry_after > 0
        assert [handle.result().token_ids for handle in handles] == alone
        while executor.stats().queued or executor.stats().running:
            pass  # the others have lost their handles, and go
        assert executor.submit(ask(TEXT[:30], n=batch + queue)).result().finish_reason == "length"
        with pytest.raises(InvalidRequest) as never:  # to try again later would be of no use
            executor.submit(ask(TEXT[:30], n=batch + queue + 1))
        assert (never.value.param, isinstance(never.value, Overloaded)) == ("n", False)
        searched = executor.beam_search(ask(TEXT[:30], n=4), BeamSearchParams(4))  # in turns
        assert len(searched.outputs) == 4


@pytest.mark.parametrize("drain", [False, True])
def test_shutdown_ends_every_kind_of_request(models: Models, drain: bool) -> None:
    executor = Executor(models.engine("llama"), num_threads=2, max_batch_size=3, num_kv_blocks=30)
    requests = [
        ask(TEXT[:40], max_tokens=60, **fields)
        for fields in [
            {},
            {"n": 4},
            {"structured_outputs": StructuredOutputs(regex="[a-z]{50}")},
            {"prompt_logprobs": 1},
            {"best_of": 3},
        ]
        * 3
    ]
    handles = [executor.submit(request) for request in requests]
    next(handles[0])
    executor.shutdown(drain)
    reasons = {output.finish_reason for handle in handles for output in handle.result(0).outputs}
    if drain:
        assert reasons == {"length", "stop"}
    else:  # some may have ended before, on a busy machine
        assert "cancelled" in reasons
        assert reasons <= {"cancelled", "length", "stop"}
    stats = executor.stats()
    assert (stats.running, stats.queued, stats.blocks_used) == (0, 0, 0)


@pytest.mark.parametrize("policy", ["priority", "longest_prefix"])
def test_who_has_waited_too_long_goes_first(models: Models, policy: str) -> None:
    with models.start("llama", max_batch_size=1, queue_policy=policy, max_wait_steps=10) as executor:
        executor.submit(ask(TEXT[:64])).result()  # a prefix for the others
        first = executor.submit(ask(TEXT[200:210], max_tokens=200))
        requests = [ask(TEXT[100:130], priority=-5), *[ask(TEXT[:64], priority=5)] * 20]
        waiting = [(time.perf_counter(), executor.submit(request)) for request in requests]
        # By the clock, as a busy machine may submit the last ones when the first has ended.
        admitted = [begin + (handle.result().timings.queue_seconds or 0.0) for begin, handle in waiting]
        assert admitted[0] < max(admitted[1:])
        assert first.result().finish_reason == "length"
