#!/usr/bin/env python3
"""What `aotllm serve` adds to its engine: tokens per second, refusals under overload, and a soak.

    python scripts/bench_serving.py streams ENGINE [--frontends N] [--streams N] [--tokens N] [--protocol chat]
    python scripts/bench_serving.py overhead ENGINE [--concurrency N] [--tokens N] [--repeats N]
    python scripts/bench_serving.py overload ENGINE [--clients N] [--queue N]
    python scripts/bench_serving.py soak ENGINE [--clients N] [--seconds N]

`streams`, `overload` and `soak` serve an oracle model (`aotllm.oracle_manager`): the real runtime without kernels, with
the tokenizer of ENGINE. `overhead` serves ENGINE itself, and runs the same load through an `Executor` in turns. All
print one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import uvloop

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from stream_client import Outcome, post, stream  # noqa: E402

from aotllm.oracle_manager import OracleModel  # noqa: E402
from aotllm.serving.process.supervisor import ENGINE_PROCESS, FRONT_END  # noqa: E402
from tests.integration.running_server import RunningServer, running_server  # noqa: E402

ORACLE = "bench_serving:oracle"
PACED_ORACLE = "bench_serving:paced_oracle"
SLOW_ORACLE = "bench_serving:slow_oracle"
GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
SMALL_ORACLE = "bench_serving:small_oracle"

_SAYS = tuple(range(65, 91))
oracle = OracleModel(vocab_size=256, spoken_tokens=_SAYS)
# 64 streams of a token each 3.2 ms: 20,000 tokens/s.
paced_oracle = OracleModel(vocab_size=256, spoken_tokens=_SAYS, step_seconds=0.0032)
slow_oracle = OracleModel(vocab_size=256, spoken_tokens=_SAYS, step_seconds=0.02, max_batch_size=32)
small_oracle = OracleModel(vocab_size=256, spoken_tokens=_SAYS, step_seconds=0.004, max_batch_size=64)


def body(protocol: str, prompt: str, tokens: int) -> bytes:
    """A streamed request of exactly so many tokens."""
    common: dict[str, Any] = {
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if protocol == "chat":
        return post("/v1/chat/completions", {"messages": [{"role": "user", "content": prompt}], **common})
    return post("/v1/completions", {"prompt": prompt, **common})


def cpu_seconds(pids: list[int]) -> float:
    """User and system time of processes so far."""
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def address(server: RunningServer) -> tuple[str, int]:
    """Of HTTP."""
    parts = urlsplit(server.url)
    return parts.hostname or "", parts.port or 0


def run_streams(arguments: argparse.Namespace) -> dict[str, Any]:
    """As many tokens as the server can stream."""
    model = PACED_ORACLE if arguments.paced else ORACLE
    with running_server(
        arguments.engine, frontends=arguments.frontends, manager_factory=model, log_level="warning"
    ) as server:
        host, port = address(server)
        request = body(arguments.protocol, "hello", arguments.tokens)

        async def load(count: int) -> tuple[list[Outcome], float]:
            start = time.perf_counter()
            outcomes = await asyncio.gather(*(stream(host, port, request) for _ in range(count)))
            return outcomes, time.perf_counter() - start

        uvloop.run(load(8))
        groups = {
            "engine process": server.children(ENGINE_PROCESS),
            "front ends": server.children(FRONT_END),
            "client": [os.getpid()],
        }
        before = {name: cpu_seconds(pids) for name, pids in groups.items()}
        outcomes, seconds = uvloop.run(load(arguments.streams))
        used = {name: cpu_seconds(pids) - before[name] for name, pids in groups.items()}
    tokens = sum(outcome.tokens for outcome in outcomes)
    assert all(outcome.complete and outcome.tokens == arguments.tokens for outcome in outcomes)
    return {
        "tokens_per_second": tokens / seconds,
        "tokens_per_event": tokens / sum(outcome.events for outcome in outcomes),
        "bytes_per_token": sum(outcome.bytes for outcome in outcomes) / tokens,
        "cpu_us_per_token": {name: 1e6 * value / tokens for name, value in used.items()},
        "first_byte_ms_p99": 1e3 * sorted(o.first_byte_seconds for o in outcomes)[int(len(outcomes) * 0.99)],
    }


def run_overhead(arguments: argparse.Namespace) -> dict[str, Any]:
    """Tokens per second through HTTP over those of an `Executor`, the same load in turns."""
    from aotllm import Executor, Request, SamplingParams

    prompts = [f"Write {number} words about the sea." for number in range(arguments.concurrency)]
    sampling = SamplingParams(max_tokens=arguments.tokens, temperature=0, ignore_eos=True)
    rates: dict[str, list[float]] = {"executor": [], "http": []}
    tokens = arguments.tokens * arguments.concurrency

    async def over_http(host: str, port: int) -> None:
        requests = [body("completions", prompt, arguments.tokens) for prompt in prompts]
        outcomes = await asyncio.gather(*(stream(host, port, request) for request in requests))
        assert sum(outcome.tokens for outcome in outcomes) == tokens

    options: dict[str, Any] = {"no_prefix_caching": True, "frontends": arguments.frontends}
    with (
        running_server(arguments.engine, **options) as server,
        Executor(arguments.engine, prefix_caching=False) as executor,
    ):
        runs: dict[str, Callable[[], Any]] = {
            "executor": lambda: executor.generate([Request(prompt=p, sampling=sampling) for p in prompts]),
            "http": lambda: uvloop.run(over_http(*address(server))),
        }
        for run in runs.values():
            run()
        for repeat in range(arguments.repeats):
            # First one, then the other first: a machine that slows down meanwhile favours neither.
            for name, run in list(runs.items())[:: 1 if repeat % 2 == 0 else -1]:
                start = time.perf_counter()
                run()
                rates[name].append(tokens / (time.perf_counter() - start))
    medians = {name: statistics.median(values) for name, values in rates.items()}
    return {"tokens_per_second": rates, "medians": medians, "ratio": medians["http"] / medians["executor"]}


def run_overload(arguments: argparse.Namespace) -> dict[str, Any]:
    """Clients far beyond the queue: how fast they are refused, and what that costs those who run."""
    with running_server(
        arguments.engine, manager_factory=SLOW_ORACLE, max_queue_size=arguments.queue, frontends=arguments.frontends
    ) as server:
        host, port = address(server)
        running, extra = body("completions", "hello", 100), body("completions", "hello", 10)

        def gaps(outcomes: list[Outcome]) -> float:
            return statistics.median(
                later - sooner
                for outcome in outcomes
                for sooner, later in zip(outcome.reads, outcome.reads[1:], strict=False)
            )

        async def both() -> tuple[float, float, list[Outcome]]:
            calm = await asyncio.gather(*(stream(host, port, running, keep_times=True) for _ in range(32)))
            busy = [asyncio.ensure_future(stream(host, port, running, keep_times=True)) for _ in range(32)]
            await asyncio.sleep(0.5)
            others = await asyncio.gather(*(stream(host, port, extra) for _ in range(arguments.clients)))
            return gaps(calm), gaps(list(await asyncio.gather(*busy))), others

        calm, busy, others = uvloop.run(both())
    refused = sorted(outcome.seconds for outcome in others if outcome.status == 503)
    assert all(b"retry-after" in outcome.headers.lower() for outcome in others if outcome.status == 503)
    return {
        "statuses": Counter(outcome.status for outcome in others),
        "refused_ms": {
            "median": 1e3 * statistics.median(refused),
            "p99": 1e3 * refused[int(0.99 * len(refused))],
            "max": 1e3 * refused[-1],
        },
        "inter_token_ms": {"alone": 1e3 * calm, "beside the refused": 1e3 * busy},
    }


class Soak:
    """Clients that come, stream, and leave at random, for a time."""

    def __init__(self, server: RunningServer, clients: int, seconds: float) -> None:
        self._server = server
        self._host, self._port = address(server)
        self._clients, self._seconds = clients, seconds
        self.ends: Counter[str] = Counter()
        self.samples: list[dict[str, Any]] = []

    async def run(self) -> None:
        """All clients, and a sample of what the server holds every few seconds."""
        end = time.monotonic() + self._seconds
        sampling = asyncio.create_task(self._sample(end))
        slow = [
            asyncio.create_task(stream(self._host, self._port, body("completions", "slow", 200), slow=1.0))
            for _ in range(4)
        ]
        await asyncio.gather(*(self._client(random.Random(seed), end) for seed in range(self._clients)))
        await sampling
        for task in slow:
            task.cancel()
        await asyncio.gather(*slow, return_exceptions=True)

    async def _client(self, rng: random.Random, end: float) -> None:
        while time.monotonic() < end:
            tokens = rng.randint(1, 120)
            request = body(rng.choice(["chat", "completions"]), "sea " * rng.randint(1, 60), tokens)
            leave_after = rng.randint(1, 6000) if rng.random() < 0.5 else None
            outcome = await stream(self._host, self._port, request, leave_after=leave_after)
            if outcome.status == 503:
                self.ends["refused"] += 1
                await asyncio.sleep(rng.random())
            elif outcome.complete:
                self.ends["complete" if outcome.tokens == tokens else "WRONG LENGTH"] += 1
            else:
                self.ends["left" if leave_after else "BROKEN"] += 1

    async def _sample(self, end: float) -> None:
        while time.monotonic() < end:
            await asyncio.sleep(min(5.0, self._seconds / 10))
            self.samples.append(self.held())

    def held(self) -> dict[str, Any]:
        """Memory and file descriptors of each process."""
        pids = {f"front end {i}": pid for i, pid in enumerate(self._server.children(FRONT_END))}
        (pids["engine process"],) = self._server.children(ENGINE_PROCESS)
        return {
            name: {"rss_mb": _resident(pid) / 1e6, "fds": len(os.listdir(f"/proc/{pid}/fd"))}
            for name, pid in pids.items()
        }


def _resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _gauge(metrics: list[str], name: str) -> float:
    return next(float(line.split()[-1]) for line in metrics if line.startswith(name + "{"))


def run_soak(arguments: argparse.Namespace) -> dict[str, Any]:
    """Nothing is left behind, and memory does not grow."""
    import httpx

    with running_server(
        arguments.engine,
        manager_factory=SMALL_ORACLE,
        frontends=arguments.frontends,
        kv_cache_memory="8192tokens",
        log_level="warning",
    ) as server:
        soak = Soak(server, arguments.clients, arguments.seconds)
        before = soak.held()
        uvloop.run(soak.run())
        deadline = time.monotonic() + 10
        while True:
            metrics = httpx.get(server.metrics).text.splitlines()
            held = {name: _gauge(metrics, f"aotllm:{name}") for name in GAUGES}
            if not any(held.values()) or time.monotonic() > deadline:
                break
        for pid in server.children(FRONT_END):
            os.kill(pid, 10)  # SIGUSR1
        time.sleep(1)
        left = [json.loads(line)["held"] for line in server.log if '"held"' in line]
        after = soak.held()
    return {
        "ends": soak.ends,
        "engine_at_the_end": held,
        "front_ends_at_the_end": left,
        "before": before,
        "samples": soak.samples[:: max(1, len(soak.samples) // 8)],
        "after": after,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=["streams", "overhead", "overload", "soak"])
    parser.add_argument("engine")
    parser.add_argument("--frontends", type=int, default=2)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--protocol", choices=["chat", "completions"], default="completions")
    parser.add_argument("--paced", action="store_true", help="streams: 20,000 tokens/s come with 64 streams")
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--queue", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=300.0)
    arguments = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "scripts")])
    run = {"streams": run_streams, "overhead": run_overhead, "overload": run_overload, "soak": run_soak}[arguments.mode]
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
    print(json.dumps({"mode": arguments.mode, "commit": commit.strip(), **run(arguments)}, indent=1))


if __name__ == "__main__":
    main()
