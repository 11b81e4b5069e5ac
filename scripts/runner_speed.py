"""`RunnerSpeed`: what llama-bench and llama-batched-bench measure, of an engine's runner."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from aotllm import _runtime
from aotllm.engines import open_engine
from aotllm.tuning import stored_tactics


class RunnerSpeed:
    """One runner of target cpu, without manager and sampler: its steps return the logits, as llama.cpp's do.

    Sequences keep their KV blocks: what a prompt has computed for one measurement stands for the next one, and
    decoding overwrites only what lies behind it. Tokens are random.

    Args:
        engine: folder of the engine.
        threads: of the runner; 0 = the runtime's default.
        depths: tokens in the cache before a measured one is decoded, of single sequences.
        batches: sequences that decode together.
        prompt: tokens of the prompt of each of those.
        generate: tokens decoded of each sequence.
        prefills: lengths of prompts.
        greedy: decode steps return the most likely tokens in place of logits.
    """

    def __init__(
        self,
        engine: Path,
        threads: int,
        *,
        depths: Sequence[int] = (),
        batches: Sequence[int] = (),
        prompt: int = 128,
        generate: int = 128,
        prefills: Sequence[int] = (),
        greedy: bool = False,
    ) -> None:
        opened = open_engine(engine, verify=False)
        per_block = opened.manifest.limits.tokens_per_block
        self._prompt, self._generate, self._greedy = prompt, generate, greedy
        sizes = [depth + generate for depth in depths] + [prompt + generate] * max(batches, default=0)
        sizes += [max(prefills, default=32)]  # 32: of the warm-up
        tables: list[list[int]] = []
        used = 0
        for size in sizes:
            blocks = -(-size // per_block)
            tables.append(list(range(used, used + blocks)))
            used += blocks
        self.runner = _runtime.CpuRunner(str(opened.rank_file()), max(1, used), threads, stored_tactics(opened.path))
        longest = max(sizes)
        self._tokens = np.random.default_rng(0).integers(0, self.runner.vocab_size, longest).tolist()
        self._deep = dict(zip(depths, tables, strict=False))
        self._batch_tables = tables[len(depths) : -1]
        self._prefill_table = tables[-1]
        self._filled: set[int] = set()
        self._run_prompt(min(32, longest), self._prefill_table)  # pages of the mapped weights

    def prefill(self, length: int, adapter: int = 0) -> float:
        """Tokens per second of a prompt of that length, in the largest chunks that the engine takes."""
        begin = time.perf_counter()
        self._run_prompt(length, self._prefill_table, adapter)
        return length / (time.perf_counter() - begin)

    def decode(self, depth: int) -> float:
        """Tokens per second of one sequence that goes on from that depth."""
        table = self._deep[depth]
        self._fill(depth, [table])
        return self._decode(depth, [table])

    def batch(self, size: int, adapters: Sequence[int] = ()) -> float:
        """Tokens per second of so many sequences together, behind prompts of their own; `adapters`: of each, none where
        empty."""
        tables = self._batch_tables[:size]
        self._fill(self._prompt, tables)
        return self._decode(self._prompt, tables, adapters)

    def _fill(self, depth: int, tables: Sequence[list[int]]) -> None:
        for table in tables:
            if depth and table[0] not in self._filled:
                self._run_prompt(depth, table)
                self._filled.add(table[0])

    def _run_prompt(self, length: int, table: list[int], adapter: int = 0) -> None:
        chunk = self.runner.max_num_tokens
        for begin in range(0, length, chunk):
            end = min(begin + chunk, length)
            kind = "last" if end == length else "none"
            self.runner.step([self._tokens[begin:end]], [begin], [table], [kind], [adapter])

    def _decode(self, depth: int, tables: Sequence[list[int]], adapters: Sequence[int] = ()) -> float:
        batch = len(tables)
        kinds = ["last"] * batch
        begin = time.perf_counter()
        for step in range(self._generate):
            tokens = [[self._tokens[(row + step) % len(self._tokens)]] for row in range(batch)]
            starts = [depth + step] * batch
            if self._greedy:
                self.runner.next_tokens(tokens, starts, tables)
            else:
                self.runner.step(tokens, starts, tables, kinds, adapters)
        return batch * self._generate / (time.perf_counter() - begin)
