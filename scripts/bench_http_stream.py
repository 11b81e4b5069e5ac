#!/usr/bin/env python3
"""What a token costs on its way from the runtime to the socket: streams of a server whose model costs nothing.

`python scripts/bench_http_stream.py [--streams 32,256] [--tokens 1000] [--step-ms loop,0,20] [--path chat|completions]`

The server runs in a process of its own; the client is a loop over raw sockets that looks at the bytes only as far as it
has to. A step gives each stream one token, as in-flight batching does. Where the tokens come from:

* `loop`: from the server's own event loop, once all have been taken: the path from `OutputStream` to the socket alone,
  with an event per token, which is the worst case.
* a number: from `tests/aotllm/fake_manager.py` through an `Executor` and its thread, a step each so many milliseconds.
  With 0 steps follow each other as fast as they can, so the server falls behind, and tokens that wait share an event.

The line "in process" has the same handles read by coroutines, without HTTP: what is above it is what HTTP costs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import selectors
import socket
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from aotllm import Executor, Request, SamplingParams
from aotllm.request import RequestOutput, SequenceOutput, Timings, TokenOutput
from aotllm.request_handle import OutputStream, RequestHandle, RequestListener
from tests.aotllm.fake_manager import FakeEngine, FakeManager, FakeResponse

BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
    "completions": ("/v1/completions", {"prompt": "hi"}),
}


class PacedManager(FakeManager):
    """Steps at a fixed pace once all streams are there, so that a step has a token for each."""

    def __init__(self, streams: int, step_seconds: float) -> None:
        super().__init__(lambda _: iter(lambda: 97, None), max_seq_len=1 << 20, max_queue_size=1 << 20)
        self._streams = streams
        self._step_seconds = step_seconds
        self._due = 0.0
        self._begun = False

    def poll(self, timeout: float) -> list[FakeResponse]:
        """See `FakeManager.poll`."""
        with self.changed:
            if not self._begun:
                self.changed.wait_for(lambda: self._closed or len(self._running) >= self._streams, timeout)
                if len(self._running) < self._streams:
                    return []
                self._begun, self._due = True, time.monotonic()
        if self._step_seconds:
            time.sleep(max(0.0, self._due - time.monotonic()))
            self._due = max(self._due + self._step_seconds, time.monotonic() - self._step_seconds)
        responses = super().poll(timeout)
        with self.changed:
            self._begun = bool(self._running)
        return responses


class LoopEngine:
    """A `ServingEngine` without threads: the event loop itself puts a token into each stream as soon as all tokens
    have been taken, as in a front end whose engine runs in another process. One event per token."""

    def __init__(self, streams: int, max_tokens: int) -> None:
        self.engine = FakeEngine()
        self.tokenizer = self.engine.tokenizer()
        self.default_sampling = SamplingParams()
        self.max_seq_len = 1 << 20
        self.alive = True
        self.lora_names = ()
        self._wanted = streams
        self._left = max_tokens
        self._streams: list[OutputStream] = []

    async def submit_async(self, request: Request, listener: RequestListener | None = None) -> RequestHandle:
        """See `ServingEngine.submit_async`."""
        stream = OutputStream(listener)
        self._streams.append(stream)
        if len(self._streams) == self._wanted:
            asyncio.get_running_loop().call_soon(self._tick)
        return RequestHandle(len(self._streams), (1, 2, 3), stream, lambda *_: None, self)

    def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        if any(stream._outputs for stream in self._streams):
            loop.call_soon(self._tick)
            return
        self._left -= 1
        if self._left:
            for stream in self._streams:
                stream.put([TokenOutput(" word", (97,))])
            loop.call_soon(self._tick)
            return
        answer = SequenceOutput(0, "", (), "length", None, Timings(0.0, 0.0))
        for stream in self._streams:
            result = RequestOutput(1, (1, 2, 3), 0, (answer,), Timings(0.0, 0.0))
            stream.put([TokenOutput(" word", (97,), finish_reason="length")], result)


class Measured(NamedTuple):
    """One run."""

    tokens: int
    events: int
    seconds: float
    cpu_seconds: float

    def row(self, name: str) -> str:
        """A line of the table."""
        return (
            f"{name:34} {self.tokens / self.seconds:10,.0f} tokens/s  {self.cpu_seconds / self.tokens * 1e6:7.1f} µs "
            f"CPU per token  {self.tokens / max(1, self.events):6.2f} tokens per event"
        )


def in_process(streams: int, tokens: int, step_seconds: float | None) -> Measured:
    """The same without HTTP."""
    sampling = SamplingParams(max_tokens=tokens)

    async def read(executor: Any) -> int:
        events = 0
        async for _ in await executor.submit_async(Request(prompt="hi", sampling=sampling)):
            events += 1
        return events

    async def read_all(executor: Any) -> Measured:
        began, cpu = time.perf_counter(), time.process_time()
        events = sum(await asyncio.gather(*(read(executor) for _ in range(streams))))
        return Measured(streams * tokens, events, time.perf_counter() - began, time.process_time() - cpu)

    if step_seconds is None:
        return _runner()(read_all(LoopEngine(streams, tokens)))
    manager = PacedManager(streams, step_seconds)
    with Executor(FakeEngine(), manager_factory=lambda *_: manager) as executor:
        return _runner()(read_all(executor))


def _runner() -> Callable[[Any], Any]:
    import uvloop

    return uvloop.run


def serve(pipe: Connection, streams: int, tokens: int, step_seconds: float | None, profile: str | None) -> None:
    """The server process: sends its port, and its CPU time whenever it is asked."""
    import uvicorn

    from aotllm.serving import app_of
    from aotllm.serving.server import listen

    if step_seconds is None:
        executor: Any = LoopEngine(streams, tokens)
    else:
        manager = PacedManager(streams, step_seconds)
        executor = Executor(FakeEngine(), manager_factory=lambda *_: manager)
    listener = listen("127.0.0.1", 0)
    config = uvicorn.Config(
        app_of({"m": executor}), log_level="warning", access_log=False, lifespan="off", loop="uvloop", http="httptools"
    )
    server = uvicorn.Server(config)

    async def run() -> None:
        serving = asyncio.create_task(server.serve([listener]))
        pipe.send(listener.getsockname()[1])
        while await asyncio.to_thread(pipe.recv):
            pipe.send(time.process_time())
        server.should_exit = True
        await serving

    if profile is None:
        _runner()(run())
    else:
        import cProfile

        profiler = cProfile.Profile()
        profiler.runcall(_runner(), run())
        profiler.dump_stats(profile)
    if step_seconds is not None:
        executor.shutdown()


def over_http(streams: int, tokens: int, step_seconds: float | None, path: str, profile: str | None) -> Measured:
    """One run against a server of its own."""
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=serve, args=(there, streams, tokens, step_seconds, profile)
    )
    process.start()
    try:
        port = here.recv()
        here.send(True)
        cpu = here.recv()
        began = time.perf_counter()
        events = read_streams(port, streams, tokens, path)
        seconds = time.perf_counter() - began
        here.send(True)
        return Measured(streams * tokens, events, seconds, here.recv() - cpu)
    finally:
        here.send(False)
        process.join()


def read_streams(port: int, streams: int, tokens: int, path: str) -> int:
    """Reads that many streams to their end; returns how many events came."""
    route, body = BODIES[path]
    content = json.dumps({**body, "stream": True, "max_tokens": tokens}).encode()
    head = (
        f"POST {route} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    selector = selectors.DefaultSelector()
    for _ in range(streams):
        connection = socket.create_connection(("127.0.0.1", port))
        connection.sendall(head.encode() + content)
        selector.register(connection, selectors.EVENT_READ, bytearray())
    return sum(_read_all(selector, streams))


def _read_all(selector: selectors.BaseSelector, open_streams: int) -> Iterator[int]:
    while open_streams:
        for key, _ in selector.select():
            connection: Any = key.fileobj
            data = connection.recv(1 << 18)
            yield data.count(b"data: ")
            # The end may be cut anywhere, so the last bytes of the piece before are kept.
            key.data[:] = key.data[-64:] + data
            if b"data: [DONE]" in key.data or not data:
                selector.unregister(connection)
                connection.close()
                open_streams -= 1


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--streams", default="32,256")
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--step-ms", default="loop,0,20", help="Milliseconds of the fake manager's step, or loop.")
    parser.add_argument("--path", choices=BODIES, default="chat")
    parser.add_argument("--profile", help="File for cProfile's data of the server's event loop.")
    options = parser.parse_args()
    print(f"{os.cpu_count()} CPUs, {options.path}, {options.tokens} tokens per stream")
    for streams in map(int, options.streams.split(",")):
        for step in options.step_ms.split(","):
            seconds, tokens, pace = None, options.tokens, "loop"
            if step != "loop":
                seconds, pace = float(step) / 1000, "flat out"
            if seconds:
                tokens, pace = min(tokens, int(8 / seconds)), f"a step each {step} ms"
            what = f"{streams} streams, {pace}"
            print(in_process(streams, tokens, seconds).row(f"{what}, in process"), flush=True)
            print(over_http(streams, tokens, seconds, options.path, options.profile).row(what), flush=True)


if __name__ == "__main__":
    main()
