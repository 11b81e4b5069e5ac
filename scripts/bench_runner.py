#!/usr/bin/env python3
"""Speed of an engine's runner without manager and tokenizer: prefill, and decode by batch size.

    python scripts/bench_runner.py ENGINE [--threads N] [--prompt N] [--depth N] [--json] [--profile]

Prefill runs a prompt of 512 tokens; decode runs one token of each of B sequences at depth 128, and gives logits or,
with `--greedy`, tokens. Each figure is the median of `--repeats` passes over all configurations, so that a slow moment
of the machine does not fall on one of them. `--profile` shows where the time of each goes instead, op by op.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from aotllm import _runtime
from aotllm.engines import open_engine
from runner_speed import RunnerSpeed

PROMPT_TOKENS = 512  # of a prompt, unless said otherwise
DEPTH = 128  # of a decoded token, unless said otherwise
DECODE_STEPS = 16


class Bench:
    """One runner with room for the largest batch."""

    def __init__(
        self,
        engine: str,
        threads: int,
        batches: list[int],
        prompt_tokens: int = PROMPT_TOKENS,
        depth: int = DEPTH,
        greedy: bool = False,
    ) -> None:
        self.prompt_tokens = prompt_tokens
        largest = open_engine(engine).manifest.limits.max_batch_size
        self.batches = [b for b in batches if b <= largest]
        self._speed = RunnerSpeed(
            Path(engine),
            threads,
            batches=self.batches,
            prompt=depth,
            generate=DECODE_STEPS,
            prefills=[prompt_tokens],
            greedy=greedy,
        )
        self.runner = self._speed.runner
        self._speed.batch(max(self.batches))  # contexts are computed once, and not while anything is measured

    def prefill(self, adapter: int = 0) -> float:
        """Tokens per second."""
        return self._speed.prefill(self.prompt_tokens, adapter)

    def decode(self, batch: int, adapters: Sequence[int] = ()) -> float:
        """Tokens per second over all sequences; `adapters`: of each, none where empty."""
        return self._speed.batch(batch, adapters)

    def profile(self, run: Callable[[], object], repeats: int) -> dict[str, Any]:
        """The profile of `repeats` times `run`."""
        self.runner.set_profiling(True)
        for _ in range(repeats):
            run()
        profile: dict[str, Any] = self.runner.profile()
        self.runner.set_profiling(False)
        return profile


def print_profile(title: str, profile: dict[str, Any]) -> None:
    """Milliseconds of a step by op: what a thread spends on average, and the rate at which weights are read."""
    steps, threads = profile["steps"], profile["threads"]
    print(f"\n{title}: {1e3 * profile['seconds'] / steps:.3f} ms a step")
    print(f"  {'op':16} {'prepare':>8} {'compute':>8} {'wait':>8} {'total':>8} {'share':>6} {'GB/s':>6}  weights")
    totals = [0.0, 0.0, 0.0]
    rows = [
        (op, [1e3 * op[f"{part}_seconds"] / steps / threads for part in ("prepare", "compute", "wait")])
        for op in profile["ops"]
    ]
    whole = 1e3 * profile["seconds"] / steps
    for op, parts in rows:
        totals = [a + b for a, b in zip(totals, parts, strict=True)]
        rate = f"{op['bytes'] / parts[1] / 1e6:6.1f}" if op["bytes"] else " " * 6
        shape = f"{op['count']} x ({op['shape']})" if op["shape"] else f"{op['count']} x"
        cells = " ".join(f"{value:8.3f}" for value in [*parts, sum(parts)])
        print(f"  {op['op']:16} {cells} {sum(parts) / whole:6.1%} {rate}  {shape}")
    cells = " ".join(f"{value:8.3f}" for value in [*totals, sum(totals)])
    print(f"  {'all':16} {cells} {sum(totals) / whole:6.1%}")


def show_profiles(bench: Bench, repeats: int) -> None:
    """Profiles of prefill and of each batch size."""
    bench.prefill()
    print_profile(f"prefill {bench.prompt_tokens}", bench.profile(bench.prefill, repeats))
    for batch in bench.batches:
        print_profile(f"decode, batch {batch}", bench.profile(functools.partial(bench.decode, batch), repeats))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine")
    parser.add_argument("--threads", type=int, default=0, help="0 = the runtime's default")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--prompt", type=int, default=PROMPT_TOKENS, help="tokens of the prompt of prefill")
    parser.add_argument("--depth", type=int, default=DEPTH, help="tokens before the first decoded one")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    parser.add_argument(
        "--greedy", action="store_true", help="decode steps give tokens, as they do in a server, not logits"
    )
    parser.add_argument("--profile", action="store_true", help="where the time goes, op by op")
    arguments = parser.parse_args()
    bench = Bench(
        arguments.engine,
        arguments.threads,
        arguments.batches,
        arguments.prompt,
        arguments.depth,
        arguments.greedy,
    )
    samples: defaultdict[str, list[float]] = defaultdict(list)
    if arguments.profile:
        show_profiles(bench, arguments.repeats)
        return
    for _ in range(arguments.repeats):
        samples[f"prefill {arguments.prompt}"].append(bench.prefill())
        for batch in bench.batches:
            samples[f"decode, batch {batch}"].append(bench.decode(batch))
    threads = arguments.threads or _runtime.default_num_threads()
    if arguments.json:
        medians = {name: round(statistics.median(values), 1) for name, values in samples.items()}
        print(json.dumps({"isa": _runtime.cpu_isa(), "threads": threads, "tokens_per_second": medians}))
        return
    print(f"{_runtime.cpu_isa()}, {threads} threads; tokens per second: median (min to max)")
    for name, values in samples.items():
        print(f"  {name:18} {statistics.median(values):8.1f}  ({min(values):.1f} to {max(values):.1f})")


if __name__ == "__main__":
    main()
