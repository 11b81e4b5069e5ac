#!/usr/bin/env python3
"""Time to the first token of prompts whose beginning is cached, and of clients that come with one beginning at once.

    python scripts/bench_prefix_cache.py ENGINE [--prefix N] [--clients N] [--threads N] [--repeats N]
        [--client-repeats N] [--json]

A prompt is a beginning of `--prefix` random tokens and an end of 16 tokens of its own. Cold: nobody has come with the
beginning before; warm: somebody has. Cold and warm prompts take turns, so that a slow moment of the machine does not
fall on one of them. Clients: that many requests with a new beginning, submitted together, with the cache and without.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections import defaultdict

from aotllm import Executor, Request, SamplingParams, _runtime

END_TOKENS = 16
ONE_TOKEN = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)


class Bench:
    """Executors with the cache and without it, and prompts that nobody has seen."""

    def __init__(self, engine: str, threads: int, prefix: int) -> None:
        self.cached = Executor(engine, num_threads=threads)
        self.uncached = Executor(engine, num_threads=threads, prefix_caching=False)
        self._rng = random.Random(0)
        self._vocab_size = self.cached.tokenizer.vocab_size
        self._prefix = prefix

    def beginning(self) -> list[int]:
        """A new one."""
        return self._tokens(self._prefix)

    def request(self, beginning: list[int]) -> Request:
        """A request for one token after `beginning` and a new end."""
        return Request(prompt_token_ids=[*beginning, *self._tokens(END_TOKENS)], sampling=ONE_TOKEN)

    def first_tokens(self, executor: Executor, beginning: list[int], clients: int) -> tuple[list[float], int]:
        """Milliseconds to the first token of each client, and prompt tokens computed for all of them."""
        before = executor.stats().context_tokens
        results = executor.generate([self.request(beginning) for _ in range(clients)])
        seconds = [result.timings.first_token_seconds or 0.0 for result in results]
        return [s * 1e3 for s in seconds], executor.stats().context_tokens - before

    def _tokens(self, count: int) -> list[int]:
        return [self._rng.randrange(100, self._vocab_size) for _ in range(count)]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine")
    parser.add_argument("--prefix", type=int, default=1024)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--threads", type=int, default=0, help="0 = the runtime's default")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--client-repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    bench = Bench(arguments.engine, arguments.threads, arguments.prefix)
    milliseconds: defaultdict[str, list[float]] = defaultdict(list)
    computed: dict[str, int] = {}
    bench.first_tokens(bench.cached, bench.beginning(), 1)  # pages of the mapped weights

    def measure(name: str, executor: Executor, beginning: list[int], clients: int = 1) -> None:
        times, computed[name] = bench.first_tokens(executor, beginning, clients)
        milliseconds[name].append(max(times))

    crowd = f"{arguments.clients} clients"
    for _ in range(arguments.repeats):
        beginning = bench.beginning()
        measure("cold", bench.cached, beginning)
        measure("warm", bench.cached, beginning)
    for _ in range(arguments.client_repeats):
        measure(f"{crowd}, last one", bench.cached, bench.beginning(), arguments.clients)
        measure(f"{crowd}, last one, no cache", bench.uncached, bench.beginning(), arguments.clients)
    medians = {name: round(statistics.median(values), 1) for name, values in milliseconds.items()}
    share = statistics.median(w / c for w, c in zip(milliseconds["warm"], milliseconds["cold"], strict=True))
    if arguments.json:
        print(json.dumps({"isa": _runtime.cpu_isa(), "milliseconds": medians, "prompt_tokens_computed": computed}))
        return
    print(f"{_runtime.cpu_isa()}; milliseconds to the first token: median (min to max); prompt tokens computed")
    for name, values in milliseconds.items():
        print(f"  {name:30} {medians[name]:9.1f}  ({min(values):.1f} to {max(values):.1f})  {computed[name]:6}")
    print(f"  warm / cold: {share:.1%} (median of pairs)")


if __name__ == "__main__":
    main()
