"""Logits of CUDA engines against transformers, and against themselves in other chunks and batches.

The reference computes in float32 with the engine's bf16 weights. Numbers between ops are bf16 on the GPU, as they are
in transformers when it computes in bf16: an engine may be half as far again from the reference as that is, and 2 %
where that is less.
"""

from __future__ import annotations

import copy
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aotllm.engines import Engine
from tests.gpu.engines import CASES, MIXTURES, Sequences, random_prompt, relative_error, row_errors, tiny_engine
from tests.integration.engines import build_engine
from tests.integration.engines import prompt_logits as cpu_logits

TOLERANCE = 2e-2
ROUNDING = 2e-2
"""Between two orders of the same sums: bf16 roundings that fall the other way, and what follows from them"""
PROMPT_TOKENS = 200
CHUNKS = (1, 7, 63, 64, 65, 128)


def reference_logits(model: Any, prompt: list[int], dtype: str) -> np.ndarray:
    import torch

    model = copy.deepcopy(model)
    for parameter in model.parameters():  # not the buffers: RoPE's frequencies stay float32, as in a loaded model
        parameter.data = parameter.data.to(getattr(torch, dtype))
    with torch.no_grad():
        logits: np.ndarray = model(torch.tensor([prompt])).logits[0].float().numpy()
    return logits


@pytest.mark.parametrize("case", MIXTURES)
def test_logits_of_mixtures_equal_transformers(case: str, tmp_path: Path) -> None:
    """Two experts that a row wants about equally change places when something rounds otherwise: that row, and those
    that attend to it, go other ways from there on. So most rows are compared, not each."""
    model, engine = tiny_engine(tmp_path, case)
    prompt = random_prompt(7, PROMPT_TOKENS)
    exact, rounded = reference_logits(model, prompt, "float32"), reference_logits(model, prompt, "bfloat16")
    logits = Sequences(engine).logits(prompt)
    ours, theirs = np.median(row_errors(logits, exact)), np.median(row_errors(rounded, exact))
    same = [(each.argmax(-1) == exact.argmax(-1)).mean() for each in (logits, rounded)]
    print(f"{case}: relative error of half of the rows {ours:.4f}, of transformers in bf16 {theirs:.4f}; same {same}")
    assert ours <= max(TOLERANCE, 1.5 * theirs)
    assert same[0] >= same[1] - 0.05


@pytest.mark.parametrize("case", [case for case in CASES if case not in MIXTURES])
def test_logits_equal_transformers(case: str, tmp_path: Path) -> None:
    model, engine = tiny_engine(tmp_path, case)
    prompt = random_prompt(7, PROMPT_TOKENS)
    exact, rounded = reference_logits(model, prompt, "float32"), reference_logits(model, prompt, "bfloat16")
    logits = Sequences(engine).logits(prompt)

    error, theirs = relative_error(logits, exact), relative_error(rounded, exact)
    print(f"{case}: relative error {error:.4f}, of transformers in bf16 {theirs:.4f}")
    assert error <= max(TOLERANCE, 1.5 * theirs)
    top = np.sort(exact, axis=-1)
    clear = top[:, -1] - top[:, -2] > 2 * np.abs(rounded - exact).max()
    assert clear.sum() > PROMPT_TOKENS // 5  # the case says something
    assert (logits.argmax(-1) == exact.argmax(-1))[clear].all()


@pytest.mark.parametrize("case", ["llama", "qwen3", "gemma2", "gemma3", "mixtral"])
def test_logits_equal_the_cpu_engine(case: str, tmp_path: Path) -> None:
    _, cuda = tiny_engine(tmp_path, case)
    cpu = build_engine(tmp_path / "model", tmp_path / "cpu", max_seq_len=512, max_num_tokens=256)
    prompt = random_prompt(3, PROMPT_TOKENS)
    got, want = Sequences(cuda).logits(prompt), cpu_logits(cpu, prompt)
    error = np.median(row_errors(got, want)) if case in MIXTURES else relative_error(got, want)
    print(f"{case}: relative error {error:.4f}")
    assert error <= (5e-2 if case in MIXTURES else 3e-2)


@pytest.fixture(scope="module", params=["llama", "mistral, window", "gemma3"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return tiny_engine(tmp_path_factory.mktemp("engines"), request.param)[1]


@pytest.mark.parametrize("chunk", CHUNKS)
def test_chunked_prefill_is_prefill(engine: Engine, chunk: int) -> None:
    prompt = random_prompt(11, PROMPT_TOKENS)
    sequences = Sequences(engine, count=2)
    error = relative_error(sequences.logits(prompt, chunk, index=1), sequences.logits(prompt))
    print(f"chunks of {chunk}: {error:.5f}")
    assert error <= ROUNDING


LENGTHS = (1, 3, 64, 65, 17, 90, 1, 2)


def mixed_step(sequences: Sequences, prompts: list[list[int]], starts: list[int]) -> list[np.ndarray]:
    """Every prompt up to its start by itself, then what is left of all of them in one step."""
    for i, (prompt, start) in enumerate(zip(prompts, starts, strict=True)):
        if start:
            sequences.logits(prompt[:start], index=i)
    rest = [prompt[start:] for prompt, start in zip(prompts, starts, strict=True)]
    return sequences.step(rest, starts, range(len(prompts)))


def test_a_batch_is_its_sequences_alone(engine: Engine) -> None:
    """Prompts, chunks that go on, and generations (one token at the end) side by side."""
    prompts = [random_prompt(i, length + 70 * (i % 3)) for i, length in enumerate(LENGTHS)]
    starts = [70 * (i % 3) for i in range(len(prompts))]
    sequences = Sequences(engine, count=len(prompts) + 1)
    together = mixed_step(sequences, prompts, starts)
    for i, (prompt, start) in enumerate(zip(prompts, starts, strict=True)):
        alone = sequences.logits(prompt, index=len(prompts))[start:]
        assert relative_error(together[i], alone) <= ROUNDING, i


def test_decode_batches_of_every_padded_size(engine: Engine) -> None:
    """Batch sizes about those that CUDA graphs exist for: each row is what it is alone."""
    prompts = [random_prompt(100 + i, 1 + (13 * i) % 150) for i in range(32)]
    sequences = Sequences(engine, count=33)
    alone = [sequences.logits(prompt, index=32)[-1] for prompt in prompts]
    for i, prompt in enumerate(prompts):
        if len(prompt) > 1:
            sequences.logits(prompt[:-1], index=i)
    for size in (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32):
        starts = [len(prompt) - 1 for prompt in prompts[:size]]
        for _ in range(3):  # the second one makes the graph, the third one replays it
            rows = sequences.step([prompt[-1:] for prompt in prompts[:size]], starts, range(size))
            for i, row in enumerate(rows):
                assert relative_error(row[0], alone[i]) <= ROUNDING, (size, i)


def test_deterministic_bits_depend_on_nothing_else(engine: Engine) -> None:
    check_determinism(engine)


def test_experts_are_deterministic(tmp_path: Path) -> None:
    check_determinism(tiny_engine(tmp_path, "qwen3_moe")[1])


def check_determinism(engine: Engine) -> None:
    prompts = [random_prompt(i, length + 70 * (i % 3)) for i, length in enumerate(LENGTHS)]
    starts = [70 * (i % 3) for i in range(len(prompts))]
    sequences = Sequences(engine, count=len(prompts) + 1, deterministic=True)
    together = mixed_step(sequences, prompts, starts)
    for i, (prompt, start) in enumerate(zip(prompts, starts, strict=True)):
        alone = [sequences.logits(prompt, chunk, index=len(prompts))[start:] for chunk in (0, *CHUNKS)]
        for one, other in pairwise([together[i], *alone]):
            assert np.array_equal(one, other), i


def test_the_same_step_gives_the_same_bits(engine: Engine) -> None:
    """Without that option, too: nothing depends on timing."""
    sequences = Sequences(engine, count=2)
    prompt = random_prompt(5, PROMPT_TOKENS)
    first = sequences.logits(prompt, 64)
    for _ in range(3):
        assert np.array_equal(sequences.logits(prompt, 64, index=1), first)
