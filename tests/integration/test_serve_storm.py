"""Clients that come, stream and leave at random, over HTTP and gRPC: whole answers are right, and nothing stays."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
import sys
import time
from collections import Counter
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import numpy as np
import pytest
import tritonclient.grpc.aio as triton

from aotllm.engines import Engine
from aotllm.serving.process.supervisor import FRONT_END
from tests.integration.letters_oracle import FACTORY, letters
from tests.integration.running_server import ROOT, RunningServer, running_server

GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
PROMPTS = [f"The {word} {'sea ' * length}" for length, word in enumerate(("deep", "wide", "blue", "cold") * 10)]
MOST_TOKENS = 150
SMALL_POOL = "4096tokens"
"""Less than a third of what all clients ask for"""
_PATIENCE = 60.0


@pytest.fixture(scope="module")
def engine(smollm2: Engine) -> Path:
    return smollm2.path


class Storm:
    """Clients of one server.

    Args:
        server: serves `letters`.
        engine: whose tokenizer it has.
        seconds: how long new requests are sent.
    """

    def __init__(self, server: RunningServer, engine: Engine, seconds: float) -> None:
        self._server = server
        self._seconds = seconds
        tokenizer = engine.tokenizer()
        ids = {prompt: tokenizer.encode(prompt, add_special_tokens=True) for prompt in PROMPTS}
        self._texts = {
            prompt: [tokenizer.decode([token]) for token in letters.answer(ids[prompt], MOST_TOKENS)]
            for prompt in PROMPTS
        }
        self.ends: Counter[str] = Counter()

    async def run(self, clients: int) -> None:
        """A third of the clients speak gRPC."""
        end = time.monotonic() + self._seconds
        async with (
            httpx.AsyncClient(base_url=self._server.url, timeout=_PATIENCE, limits=httpx.Limits()) as http,
            triton.InferenceServerClient(self._server.grpc) as grpc,
        ):
            await asyncio.gather(*(self._client(http, grpc, seed, end) for seed in range(clients)))

    async def _client(self, http: httpx.AsyncClient, grpc: Any, seed: int, end: float) -> None:
        rng = random.Random(seed)
        while time.monotonic() < end:
            prompt, tokens = rng.choice(PROMPTS), rng.randint(1, MOST_TOKENS)
            leave_after = rng.randint(0, 40) if rng.random() < 0.5 else None
            if seed % 3:
                text = await self._over_http(http, prompt, tokens, leave_after)
            else:
                text = await self._over_grpc(grpc, prompt, tokens, leave_after)
            right = "".join(self._texts[prompt][:tokens])
            if text is None:
                self.ends["left"] += 1
            else:
                self.ends["right" if text == right else "WRONG"] += 1

    async def _over_http(
        self, http: httpx.AsyncClient, prompt: str, tokens: int, leave_after: int | None
    ) -> str | None:
        body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True}
        text, events = "", 0
        async with http.stream("POST", "/v1/completions", json=body) as response:
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    return text
                if line:
                    text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
                    events += 1
                if leave_after is not None and events >= leave_after:
                    return None
        return f"{text} and no [DONE]"

    async def _over_grpc(self, grpc: Any, prompt: str, tokens: int, leave_after: int | None) -> str | None:
        inputs = [
            _tensor("text_input", "BYTES", np.array([[prompt.encode()]], object)),
            _tensor("max_tokens", "INT32", np.array([[tokens]], np.int32)),
            _tensor("top_k", "INT32", np.array([[1]], np.int32)),
            _tensor("stream", "BOOL", np.array([[True]])),
        ]

        async def requests() -> Any:
            yield {"model_name": self._server.models[0], "inputs": inputs}

        text, responses = "", 0
        stream = grpc.stream_infer(requests())
        async for result, error in stream:
            if error is not None:
                return str(error)
            text += result.as_numpy("text_output").flat[0].decode()
            responses += 1
            if leave_after is not None and responses >= leave_after:
                stream.cancel()
                with suppress(asyncio.CancelledError):
                    async for _ in stream:
                        pass
                return None
        return text


def _tensor(name: str, datatype: str, value: Any) -> Any:
    tensor = triton.InferInput(name, list(value.shape), datatype)
    tensor.set_data_from_numpy(value)
    return tensor


def gauges(server: RunningServer) -> dict[str, float]:
    """What the engine holds."""
    lines = httpx.get(server.metrics, timeout=_PATIENCE).text.splitlines()
    return {
        name: float(next(line for line in lines if line.startswith(f"aotllm:{name}{{")).split()[-1]) for name in GAUGES
    }


def held(server: RunningServer) -> dict[int, dict[str, int]]:
    """What each front end says it holds, by its pid."""
    pids = server.children(FRONT_END)
    seen = len(server.log)
    for pid in pids:
        os.kill(pid, signal.SIGUSR1)
    deadline = time.monotonic() + _PATIENCE
    while True:
        lines = [json.loads(line)["held"] for line in server.log[seen:] if line.startswith('{"held"')]
        if len(lines) == len(pids):
            return {line.pop("pid"): line for line in lines}
        assert time.monotonic() < deadline


def assert_nothing_is_left(server: RunningServer, before: dict[int, dict[str, int]]) -> None:
    """Waits for what is on its way: connections that are being closed."""
    deadline = time.monotonic() + _PATIENCE
    while True:
        engine, front_ends = gauges(server), held(server)
        more = {
            (pid, name): (value, before[pid][name])
            for pid, facts in front_ends.items()
            for name, value in facts.items()
            if value > before[pid][name]
        }
        if not any(engine.values()) and not more:
            return
        assert time.monotonic() < deadline, f"still held: {engine}, {more}"


def deaf_client(server: RunningServer, prompt: str) -> socket.socket:
    """Asks for a stream, and reads none of it."""
    parts = urlsplit(server.url)
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
    client.connect((parts.hostname, parts.port))
    body = json.dumps({"prompt": prompt, "max_tokens": 2000, "ignore_eos": True, "stream": True}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    )
    client.sendall(head.encode() + b"\r\n" + body)
    return client


def test_a_storm_leaves_nothing_behind(smollm2: Engine):
    options: dict[str, Any] = {"manager_factory": FACTORY, "kv_cache_memory": SMALL_POOL, "log_level": "warning"}
    with running_server(smollm2.path, frontends=2, **options) as server:
        asyncio.run(Storm(server, smollm2, 0.5).run(12))  # what is made once, is made
        before = held(server)
        storm = Storm(server, smollm2, 10)
        with ExitStack() as stack:
            for index in range(4):
                stack.enter_context(deaf_client(server, f"deaf {index}"))
            asyncio.run(storm.run(100))
        assert storm.ends["WRONG"] == 0, storm.ends
        assert min(storm.ends["right"], storm.ends["left"]) > 50, storm.ends
        assert_nothing_is_left(server, before)
        assert [line for line in server.log if '"held"' not in line] == []


@pytest.mark.slow
def test_five_minutes_of_five_hundred_clients(engine: Path):
    sys.path.insert(0, str(ROOT / "scripts"))
    from bench_serving import Soak

    with running_server(
        engine, frontends=2, manager_factory=FACTORY, kv_cache_memory="8192tokens", log_level="warning"
    ) as server:
        asyncio.run(Soak(server, 20, 1.0).run())
        before = held(server)
        soak = Soak(server, 500, 300.0)
        asyncio.run(soak.run())
        assert soak.ends["complete"] > 0
        assert {end for end in soak.ends if end.isupper()} == set(), soak.ends
        assert_nothing_is_left(server, before)
        half = len(soak.samples) // 2
        for process in soak.samples[0]:
            # Memory is what the allocators once needed: it grows at first and then stays.
            assert soak.samples[-1][process]["rss_mb"] < 1.2 * soak.samples[half][process]["rss_mb"]
