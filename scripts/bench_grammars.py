#!/usr/bin/env python3
"""Times of constrained output without the model: compiling a grammar, cloning its state, computing masks.

`python scripts/bench_grammars.py ENGINE`. Masks are those along random walks over allowed tokens.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from aotllm.engines import open_engine
from aotllm.grammars import Grammars
from aotllm.structured_outputs import StructuredOutputs

WORD = {"type": "string"}
SCHEMAS: dict[str, dict[str, Any]] = {
    "any object": {"type": "object"},
    "person": {
        "type": "object",
        "properties": {"name": WORD, "age": {"type": "integer"}, "tags": {"type": "array", "items": WORD}},
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    "orders": {
        "type": "array",
        "items": {
            "type": "object",
            "properties": {
                "id": {"type": "string", "pattern": "^[A-Z]{3}-[0-9]{4}$"},
                "quantity": {"type": "integer", "minimum": 1, "maximum": 100},
                "status": {"enum": ["open", "closed", "pending"]},
                "note": {"type": "string", "maxLength": 40},
            },
            "required": ["id", "quantity", "status", "note"],
            "additionalProperties": False,
        },
    },
}


def mask_times(start: Any, vocab_size: int, ends: set[int], walks: int, seed: int = 1) -> list[float]:
    """Microseconds per mask."""
    rng = random.Random(seed)
    times = []
    for _ in range(walks):
        state = start.clone()
        for _ in range(60):
            began = time.perf_counter()
            mask = state.mask(vocab_size)
            times.append((time.perf_counter() - began) * 1e6)
            token = int(rng.choice(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))))
            if token in ends:
                break
            state.accept(token)
            if state.finished:
                break
    return times


def main() -> None:
    """Print one line per schema."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", type=Path)
    parser.add_argument("--walks", type=int, default=50)
    arguments = parser.parse_args()
    engine = open_engine(arguments.engine)
    tokenizer, ends = engine.tokenizer(), engine.manifest.eos_token_ids
    began = time.perf_counter()
    grammars = Grammars(tokenizer, ends, tokenizer.vocab_size)
    grammars.compile(StructuredOutputs(regex="a"))
    print(f"first grammar, vocabulary of {tokenizer.vocab_size}: {time.perf_counter() - began:.2f} s")
    for name, schema in SCHEMAS.items():
        began = time.perf_counter()
        start = grammars.compile(StructuredOutputs(json=schema))
        compiled = time.perf_counter()
        start.clone()
        cloned = time.perf_counter()
        times = mask_times(start, tokenizer.vocab_size, set(ends), arguments.walks)
        p50, p99 = statistics.median(times), statistics.quantiles(times, n=100)[98]
        print(
            f"{name}: compile {(compiled - began) * 1e3:.1f} ms, clone {(cloned - compiled) * 1e6:.0f} µs, "
            f"mask median {p50:.0f} µs, mean {statistics.mean(times):.0f} µs, p99 {p99:.0f} µs of {len(times)}"
        )


if __name__ == "__main__":
    main()
