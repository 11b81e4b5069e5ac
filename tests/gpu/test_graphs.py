"""CUDA graphs: a step has the same bits whether its kernels are launched one by one or replayed.

Steps are padded alike in both cases. Each shape comes three times with other tokens and, within its padding, other
lengths: launched the first time, captured the second, replayed from then on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aotllm.engines import Engine
from tests.gpu.engines import BASE, Sequences, random_prompt, tiny_engine
from tests.integration.engines import build_engine, save_tiny_model

REPEATS = 3
COUNT = 24
"""Sequences"""
HEADS = {**BASE, "num_attention_heads": 8, "num_key_value_heads": 4}


@dataclass(frozen=True)
class Step:
    """Tokens of some sequences, from where they are on."""

    tokens: list[list[int]]
    starts: list[int]
    indices: list[int]


def random_steps(seed: int, count: int, limit: int) -> Iterator[Step]:
    """Single tokens and chunks of prompts side by side, some of either kind alone; up to `limit` tokens."""
    rng = np.random.default_rng(seed)
    position = [0] * COUNT
    for _ in range(count):
        decodes, prompts = int(rng.integers(0, 17)), int(rng.integers(0, 5))
        longest = int(rng.integers(2, 150))
        for repeat in range(REPEATS):
            lengths = [1] * (decodes - min(repeat, decodes // 4)) + [max(2, longest - repeat)] * prompts
            while sum(lengths) > limit:
                lengths.pop()
            order = rng.permutation(COUNT)[: max(1, len(lengths))]
            step = Step([], [], [])
            for index, length in zip(order.tolist(), lengths or [1], strict=True):
                if position[index] + length > 400:
                    position[index] = 0
                step.tokens.append(rng.integers(3, 400, length).tolist())
                step.starts.append(position[index])
                step.indices.append(index)
                position[index] += length
            yield step


def check(engine: Engine, **options: Any) -> None:
    """Logits, and tokens drawn on the device, of the same steps with graphs and without, each run in turn."""
    plain = Sequences(engine, COUNT, graphs=False, **options)
    graphs = Sequences(engine, COUNT, **options)
    for number, step in enumerate(random_steps(5, 40, engine.manifest.limits.max_num_tokens)):
        want = plain.step(step.tokens, step.starts, step.indices)
        got = graphs.step(step.tokens, step.starts, step.indices)
        for i, (one, other) in enumerate(zip(got, want, strict=True)):
            assert np.isfinite(other).all()
            assert np.array_equal(one, other), (number, i)
        tables = [graphs.table(i) for i in step.indices]
        tokens = graphs.runner.next_tokens(step.tokens, step.starts, tables)
        assert tokens == plain.runner.next_tokens(step.tokens, step.starts, tables), number


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("case", ["llama", "gemma3", "qwen3_moe"])
def test_graphs_change_no_bit(case: str, deterministic: bool, tmp_path: Path) -> None:
    """Full attention; windows and two groups of blocks; experts."""
    check(tiny_engine(tmp_path, case)[1], deterministic=deterministic)


@pytest.mark.parametrize("options", [{"quantize": "fp8"}, {"kv_cache_dtype": "fp8"}], ids=str)
def test_fp8(options: dict[str, Any], tmp_path: Path) -> None:
    check(tiny_engine(tmp_path, "llama", **options)[1])


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2), (2, 2)])
def test_ranks_and_stages(tp: int, pp: int, tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "model", "LlamaForCausalLM", HEADS, dtype="bf16")
    options = {"max_seq_len": 512, "target": "cuda", "max_num_tokens": 256, "tp": tp, "pp": pp}
    check(build_engine(tmp_path / "model", tmp_path / "engine", **options))


def test_answers_depend_on_no_earlier_step(tmp_path: Path) -> None:
    """What a replayed step pads its rows with is what others have left there."""
    engine = tiny_engine(tmp_path, "llama")[1]
    fresh, used = Sequences(engine, COUNT), Sequences(engine, COUNT)
    for step in random_steps(11, 30, 256):
        used.step(step.tokens, step.starts, step.indices)
    prompts = [random_prompt(i, 9 + 5 * i) for i in range(6)]
    for _ in range(REPEATS):
        want = run_all(fresh, prompts)
        for one, other in zip(run_all(used, prompts), want, strict=True):
            assert np.array_equal(one, other)


def run_all(sequences: Sequences, prompts: Sequence[list[int]]) -> list[np.ndarray]:
    return sequences.step(prompts, [0] * len(prompts), range(len(prompts)))
