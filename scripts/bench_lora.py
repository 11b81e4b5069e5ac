#!/usr/bin/env python3
"""What adapters cost: prefill and decode of an engine's runner without one, with one for all, and with one for each.

    python scripts/bench_lora.py ENGINE [--rank N] [--threads N] [--repeats N] [--json]

Adapters are random and update all seven modules of every layer. Prefill runs a prompt of 512 tokens; decode runs one
token of each of B sequences at depth 128. Passes over all configurations are interleaved, so that a slow moment of the
machine does not fall on one of them; figures are medians in tokens per second.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict

import numpy as np
from bench_runner import Bench
from safetensors import safe_open

from aotllm import _runtime
from aotllm.engines import open_engine

BATCHES = (1, 8)


def random_adapter(rank_file: str, rank: int, seed: int) -> _runtime.Adapter:
    """An adapter for the linears of the engine's plan; Q, K and V are rows of one of them."""
    with safe_open(rank_file, "np") as file:
        plan = json.loads(file.metadata()["plan"])
    rng = np.random.default_rng(seed)
    adapter = _runtime.Adapter()

    def add(layer: int, module: str, size_in: int, size_out: int) -> None:
        a = rng.normal(0, size_in**-0.5, (rank, size_in)).astype(np.float32)
        adapter.add(layer, module, a, rng.normal(0, 0.01, (size_out, rank)).astype(np.float32))

    heads = [op for op in plan["ops"] if op["op"] == "norm_qkv_rope"]
    for op in heads:
        layer, head_dim = op["layer"], op["head_dim"]
        size_in = plan["linears"][op["linear"]]["k"]
        for module, count in (("q", op["num_heads"]), ("k", op["num_kv_heads"]), ("v", op["num_kv_heads"])):
            add(layer, module, size_in, count * head_dim)
        for module in ("o", "gate", "up", "down"):
            linear = plan["linears"][f"layers.{layer}.{module}"]
            add(layer, module, linear["k"], linear["n"])
    return adapter


def main() -> None:
    """Prints one line per configuration."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()

    bench = Bench(args.engine, args.threads, list(BATCHES))
    rank_file = str(open_engine(args.engine).rank_file())
    for id in range(1, max(BATCHES) + 1):
        bench.runner.load_adapter(id, random_adapter(rank_file, args.rank, seed=id))
    kinds = {"none": lambda i: 0, "one for all": lambda i: 1, "one for each": lambda i: i + 1}
    speeds: dict[str, list[float]] = defaultdict(list)
    for _ in range(args.repeats):
        for kind, adapter_of in kinds.items():
            if kind != "one for each":
                speeds[f"prefill 512, {kind}"].append(bench.prefill(adapter_of(0)))
            for batch in BATCHES:
                if batch > 1 or kind != "one for each":
                    adapters = [adapter_of(i) for i in range(batch)]
                    speeds[f"decode, batch {batch}, {kind}"].append(bench.decode(batch, adapters))
    medians = {name: round(statistics.median(values), 1) for name, values in sorted(speeds.items())}
    if args.json:
        print(json.dumps({"tokens_per_second": medians, "rank": args.rank, "isa": _runtime.cpu_isa()}))
        return
    print(f"rank {args.rank}, {bench.runner.adapter_bytes / max(BATCHES) / 2**20:.1f} MiB an adapter")
    for name, values in sorted(speeds.items()):
        print(f"{name:32} {medians[name]:8.1f} ({min(values):.1f} to {max(values):.1f})")


if __name__ == "__main__":
    main()
