"""Engines for SM80 and SM89, which run on any later GPU: with other kernels than those of SM90, the same model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aotllm import Executor, Request, SamplingParams
from aotllm.engines import Engine
from tests.gpu.engines import Sequences, random_prompt, relative_error, tiny_engine
from tests.gpu.test_logits import TOLERANCE, reference_logits
from tests.integration.engines import build_engine

CASES = ["llama", "llama, heads of 96, odd sizes", "llama, heads of 128, 8 to 1", "qwen3", "gemma2, heads of 256"]


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case: str, tmp_path: Path) -> None:
    model, engine = tiny_engine(tmp_path, case, sm=80)
    prompt = random_prompt(7, 200)
    exact, rounded = reference_logits(model, prompt, "float32"), reference_logits(model, prompt, "bfloat16")
    sequences = Sequences(engine)
    for chunk in (0, 1, 65):
        error = relative_error(sequences.logits(prompt, chunk), exact)
        print(f"{case}: chunks of {chunk}, relative error {error:.4f}")
        assert error <= max(TOLERANCE, 1.5 * relative_error(rounded, exact))


@pytest.mark.parametrize("options", [{"sm": 89, "quantize": "fp8"}, {"sm": 80, "quantize": "int8"}])
def test_quantized_engines_are_as_exact_as_those_of_sm90(options: dict[str, Any], tmp_path: Path) -> None:
    model, engine = tiny_engine(tmp_path, "llama", **options)
    other = build_engine(tmp_path / "model", tmp_path / "sm90", target="cuda", max_seq_len=512, max_num_tokens=256,
                         quantize=options["quantize"])  # fmt: skip
    prompt = random_prompt(3, 150)
    exact = reference_logits(model, prompt, "float32")
    error, usual = (relative_error(Sequences(each).logits(prompt), exact) for each in (engine, other))
    print(f"{options}: relative error {error:.4f}, with SM90's kernels {usual:.4f}")
    assert error <= max(TOLERANCE, 1.2 * usual)


def test_deterministic_logits_do_not_depend_on_chunks(tmp_path: Path) -> None:
    _, engine = tiny_engine(tmp_path, "llama", sm=80)
    prompt = random_prompt(5, 150)
    sequences = Sequences(engine, deterministic=True)
    whole = sequences.logits(prompt)
    for chunk in (1, 64, 100):
        assert np.array_equal(sequences.logits(prompt, chunk), whole)


def answers(engine: Engine, params: list[SamplingParams]) -> list[list[int]]:
    prompts = [random_prompt(i, 5 + 7 * i) for i in range(len(params))]
    with Executor(engine, verify=False) as executor:
        handles = [
            executor.submit(Request(prompt_token_ids=prompt, sampling=sampling))
            for prompt, sampling in zip(prompts, params, strict=True)
        ]
        return [handle.result().outputs[0].token_ids for handle in handles]


def test_rows_are_sampled(tmp_path: Path) -> None:
    """By one block each: a top_k of 1 is greedy; a seed, with penalties and log-probabilities, gives the same again."""
    _, engine = tiny_engine(tmp_path, "llama", sm=80)
    common: dict[str, Any] = {"max_tokens": 20, "ignore_eos": True}
    greedy = answers(engine, [SamplingParams(temperature=0.0, **common)] * 3)
    assert answers(engine, [SamplingParams(temperature=1.0, top_k=1, seed=3, **common)] * 3) == greedy
    drawn = [SamplingParams(temperature=0.9, top_p=0.8, seed=7, repetition_penalty=1.2, logprobs=3, **common)] * 3
    assert answers(engine, drawn) == answers(engine, drawn)
    assert all(len(tokens) == 20 for tokens in answers(engine, drawn))
