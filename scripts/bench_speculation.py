#!/usr/bin/env python3
"""Speed of generation with and without speculation, by kind of text and batch size.

    python scripts/bench_speculation.py ENGINE [--draft ENGINE] [--ngram-min N...] [--tokens N] [--threads N]
        [--repeats N] [--json]

Greedy answers of an instruction-tuned model. Copying tasks have most of their answers in the prompt, free ones do not.
Prompts are in the prefix cache by a first pass, so that figures are those of generation: tokens of all answers by the
time from submission to the last one. Executors with and without speculation take turns; answers must be the same.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from typing import Any

from aotllm import Executor, Request, SamplingParams, _runtime

NAMES = ("Ada", "Brahe", "Curie", "Dirac", "Euler", "Fermi", "Gauss", "Hopper")
TOPICS = ("bridges", "whales", "bread", "glaciers", "clocks", "bees", "harbours", "volcanoes")
BATCHES = (1, 8)
NOTES = (
    "{0} opened the meeting at nine. The committee approved the budget of 4,200 euros for the new workshop. {0} will "
    "order the tools before Friday. The roof of the old mill leaks and must be repaired before winter. The next "
    "meeting is on the second Tuesday of March in the library."
)
RECORD = json.dumps(
    {"id": 17, "name": "NAME", "address": {"street": "Mill Lane 4", "city": "Leiden"}, "tags": ["new", "paid"]},
    indent=1,
)


def tasks() -> dict[str, list[str]]:
    """Prompts by kind, as many as the largest batch has."""
    return {
        "summarize notes": [f"Summarize these notes in three sentences:\n\n{NOTES.format(name)}" for name in NAMES],
        "extract sentences": [
            f"Copy every sentence that says what must be done, word by word:\n\n{NOTES.format(name)}" for name in NAMES
        ],
        "edit JSON": [
            f"Change the city to Delft and print the whole JSON again:\n\n{RECORD.replace('NAME', name)}"
            for name in NAMES
        ],
        "free text": [f"Write a short story about {topic} and a child who asks too much." for topic in TOPICS],
    }


class Bench:
    """One executor, and what it said before."""

    def __init__(self, engine: str, tokens: int, threads: int, **options: Any) -> None:
        self.executor = Executor(engine, num_threads=threads, **options)
        self._sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)

    def run(self, prompts: list[str]) -> tuple[float, list[tuple[int, ...]], float | None]:
        """Tokens per second, the answers, and the share of accepted drafts (None where there were none)."""
        messages = [[{"role": "user", "content": prompt}] for prompt in prompts]
        begin = time.perf_counter()
        results = self.executor.generate([Request(messages=each, sampling=self._sampling) for each in messages])
        seconds = time.perf_counter() - begin
        drafts = sum(result.outputs[0].num_draft_tokens for result in results)
        accepted = sum(result.outputs[0].num_accepted_tokens for result in results)
        tokens = sum(len(result.token_ids) for result in results)
        return tokens / seconds, [result.token_ids for result in results], accepted / drafts if drafts else None


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine")
    parser.add_argument("--draft", help="engine that guesses, beside n-grams")
    parser.add_argument(
        "--ngram-min", type=int, nargs="*", default=[1, 2, 3, 4], help="shortest text that is looked up"
    )
    parser.add_argument("--tokens", type=int, default=96, help="of an answer")
    parser.add_argument("--threads", type=int, default=0, help="0 = the runtime's default")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    kinds: dict[str, dict[str, Any]] = {"none": {}}
    for ngram_min in arguments.ngram_min:
        kinds[f"ngram ≥ {ngram_min}"] = {"speculative": "ngram", "ngram_min": ngram_min}
    if arguments.draft:
        kinds["draft"] = {"speculative": arguments.draft}
    benches = {
        kind: Bench(arguments.engine, arguments.tokens, arguments.threads, **options) for kind, options in kinds.items()
    }
    speeds: defaultdict[tuple[str, int, str], list[float]] = defaultdict(list)
    acceptance: dict[tuple[str, int, str], float | None] = {}
    for name, prompts in tasks().items():
        for batch in BATCHES:
            expected = None
            for repeat in range(arguments.repeats + 1):  # the first one fills the cache
                for kind, bench in benches.items():
                    speed, answers, share = bench.run(prompts[:batch])
                    expected = expected or answers
                    if answers != expected:
                        raise SystemExit(f"{name}, batch {batch}: {kind} changes the answer")
                    if repeat > 0:
                        speeds[name, batch, kind].append(speed)
                        acceptance[name, batch, kind] = share
    if arguments.json:
        rows = [
            {
                "task": task,
                "batch": batch,
                "speculative": kind,
                "tokens_per_second": round(statistics.median(values), 1),
                "acceptance": acceptance[task, batch, kind],
            }
            for (task, batch, kind), values in speeds.items()
        ]
        print(json.dumps({"isa": _runtime.cpu_isa(), "rows": rows}))
        return
    print(f"{_runtime.cpu_isa()}; tokens per second: median (min to max); accepted drafts; speed over none")
    for (task, batch, kind), values in speeds.items():
        median = statistics.median(values)
        line = f"  {task:18} batch {batch}  {kind:9} {median:7.1f}  ({min(values):.1f} to {max(values):.1f})"
        share = acceptance[task, batch, kind]
        if share is not None:
            gain = statistics.median(a / b for a, b in zip(values, speeds[task, batch, "none"], strict=True))
            line += f"  {share:6.1%}  {gain:.2f}x"
        print(line)


if __name__ == "__main__":
    main()
