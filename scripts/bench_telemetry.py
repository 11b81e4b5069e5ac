#!/usr/bin/env python3
"""What telemetry costs: microseconds per token and per request, with counters in memory and in shared files.

scripts/bench_telemetry.py [--tokens 500000] [--requests 512]
"""

from __future__ import annotations

import argparse
import logging
import os
import subprocess
import sys
import tempfile
import time


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=500_000, help="tokens of all requests together")
    parser.add_argument("--requests", type=int, default=512, help="requests that run at a time, token by token in turn")
    parser.add_argument("--rate", type=float, default=20_000, help="tokens per second that the clock pretends")
    parser.add_argument("--mode", choices=("memory", "files"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.mode is not None:
        measure(options)
        return
    for mode in ("memory", "files"):
        # prometheus-client decides at its import where counters live.
        with tempfile.TemporaryDirectory() as folder:
            environment = {k: v for k, v in os.environ.items() if k != "PROMETHEUS_MULTIPROC_DIR"}
            if mode == "files":
                environment["PROMETHEUS_MULTIPROC_DIR"] = folder
            subprocess.run([sys.executable, *sys.argv, "--mode", mode], env=environment, check=True)


def measure(options: argparse.Namespace) -> None:
    from aotllm.request import Request, RequestOutput, SequenceOutput, Timings, TokenOutput
    from aotllm.serving.call import Call
    from aotllm.serving.options import ServingOptions
    from aotllm.serving.telemetry.base import NoTelemetry
    from aotllm.serving.telemetry.request_log import LOGGER
    from aotllm.serving.telemetry.request_watch import RequestWatch
    from aotllm.serving.telemetry.serving_telemetry import ServingTelemetry

    logger = logging.getLogger(LOGGER)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logger.addHandler(logging.StreamHandler(open(os.devnull, "w")))  # noqa: SIM115 lives as long as the process
    telemetry = ServingTelemetry(ServingOptions())
    now = time.monotonic()
    tick = 1 / options.rate

    def clock() -> float:
        nonlocal now
        now += tick
        return now

    def silent(_: object) -> None:
        time.monotonic()

    metrics = telemetry.metrics.of("m")
    watches = [
        RequestWatch(Call("/", NoTelemetry(), model="m"), Request(prompt="a"), metrics, telemetry._sinks, clock)
        for _ in range(options.requests)
    ]
    output = TokenOutput("x", (7,))
    rounds = options.tokens // options.requests

    def run(listeners: list) -> float:
        begin = time.perf_counter()
        for _ in range(rounds):
            for on_output in listeners:
                on_output(output)
        return time.perf_counter() - begin

    run([silent] * options.requests)
    base = run([silent] * options.requests)
    tokens = run([watch.on_output for watch in watches]) - base
    timings = Timings(0.1, 1.0, 0.05)
    answer = SequenceOutput(0, "x", (7,) * rounds, "stop", None, timings)
    result = RequestOutput(1, (1, 2, 3), 0, (answer,), timings, num_generated_tokens=rounds)
    begin = time.perf_counter()
    for watch in watches:
        watch.on_end(result, None)
    ends = time.perf_counter() - begin
    print(
        f"{options.mode}: {tokens / (rounds * options.requests) * 1e6:.2f} µs per token beyond a call that reads the "
        f"clock, {ends / options.requests * 1e6:.0f} µs per request (log included)"
    )


if __name__ == "__main__":
    main()
