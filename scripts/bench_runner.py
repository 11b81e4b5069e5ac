#!/usr/bin/env python3
"""Speed of an engine's runner without manager and tokenizer: prefill, and decode by batch size.

    python scripts/bench_runner.py ENGINE [--threads N] [--json]

Prefill runs a 512-token prompt; decode runs one token of each of B sequences at depth 128. Each figure is the median of
`--repeats` passes over all configurations, so that a slow moment of the machine does not fall on one of them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from aotllm import _runtime
from aotllm.engines import open_engine

PROMPT_TOKENS = 512
DEPTH = 128
DECODE_STEPS = 16


class Bench:
    """One runner with room for the largest batch."""

    def __init__(self, engine: str, threads: int, batches: list[int]) -> None:
        opened = open_engine(engine)
        per_block = opened.manifest.limits.tokens_per_block
        self.blocks = (DEPTH + DECODE_STEPS) // per_block + 1
        prompt_blocks = PROMPT_TOKENS // per_block + 1
        self.batches = [b for b in batches if b <= opened.manifest.limits.max_batch_size]
        num_blocks = max(max(self.batches) * self.blocks, prompt_blocks)
        self.runner = _runtime.CpuRunner(str(opened.rank_file()), num_blocks, threads)
        self.prompt = np.random.default_rng(0).integers(0, self.runner.vocab_size, PROMPT_TOKENS).tolist()
        self.prompt_table = list(range(prompt_blocks))

    def prefill(self, adapter: int = 0) -> float:
        """Tokens per second."""
        chunk = self.runner.max_num_tokens
        begin = time.perf_counter()
        for i in range(0, PROMPT_TOKENS, chunk):
            last = "last" if i + chunk >= PROMPT_TOKENS else "none"
            self.runner.step([self.prompt[i : i + chunk]], [i], [self.prompt_table], [last], [adapter])
        return PROMPT_TOKENS / (time.perf_counter() - begin)

    def decode(self, batch: int, adapters: Sequence[int] = ()) -> float:
        """Tokens per second over all sequences; `adapters`: of each, none where empty."""
        tables = [list(range(i * self.blocks, (i + 1) * self.blocks)) for i in range(batch)]
        tokens = [[self.prompt[i % PROMPT_TOKENS]] for i in range(batch)]
        begin = time.perf_counter()
        for step in range(DECODE_STEPS):
            self.runner.step(tokens, [DEPTH + step] * batch, tables, ["last"] * batch, adapters)
        return batch * DECODE_STEPS / (time.perf_counter() - begin)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine")
    parser.add_argument("--threads", type=int, default=0, help="0 = the runtime's default")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    bench = Bench(arguments.engine, arguments.threads, arguments.batches)
    samples: defaultdict[str, list[float]] = defaultdict(list)
    bench.decode(1)  # pages of the mapped weights
    for _ in range(arguments.repeats):
        samples[f"prefill {PROMPT_TOKENS}"].append(bench.prefill())
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
