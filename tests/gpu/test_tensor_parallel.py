"""Engines split over ranks: what one rank says, up to rounding. AOTLLM_TEST_SPREAD=N spreads them over N devices.

A sum over ranks rounds each rank's part to bf16 before they are added, so logits differ in their last places; where the
two largest are clearly apart, the token is the same.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aotllm import Executor, Request, SamplingParams
from aotllm.engines import Engine
from aotllm.errors import InvalidRequest
from tests.gpu.answers import assert_the_device_samples_as_the_host_does
from tests.gpu.engines import BASE, CASES, Sequences, device_list, random_prompt, relative_error
from tests.integration.engines import build_engine, save_tiny_model

ROUNDING = 2e-2
"""Between sums over other numbers of ranks"""
PROMPT_TOKENS = 200
HEADS = {**BASE, "num_attention_heads": 8}
SPLIT_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {**HEADS, "num_key_value_heads": 4}),
    "llama, biases": ("LlamaForCausalLM", {**HEADS, "attention_bias": True, "mlp_bias": True}),
    "llama, tied": ("LlamaForCausalLM", {**HEADS, "tie_word_embeddings": True}),
    "qwen3, more ranks than KV heads": ("Qwen3ForCausalLM", HEADS),
    "gemma3, norms after sums": ("Gemma3ForCausalLM", {**CASES["gemma3"][1], "num_attention_heads": 4}),
}


def engines_of(case: str, folder: Path, **options: Any) -> dict[int, Engine]:
    """The same model for 1, 2 and 4 ranks."""
    save_tiny_model(folder / "model", *SPLIT_CASES[case], dtype="bf16")
    options = {"max_seq_len": 512, "target": "cuda", "max_num_tokens": 256, **options}
    return {n: build_engine(folder / "model", folder / f"tp{n}", tp=n, **options) for n in (1, 2, 4)}


def tokens_agree(got: np.ndarray, want: np.ndarray) -> bool:
    """The largest logits are at the same place wherever they are further apart than the two differ."""
    top = np.sort(want, axis=-1)
    clear = top[:, -1] - top[:, -2] > 2 * np.abs(got - want).max()
    assert clear.any()
    return bool((got.argmax(-1) == want.argmax(-1))[clear].all())


@pytest.fixture(scope="module", params=SPLIT_CASES)
def engines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Engine]:
    return engines_of(request.param, tmp_path_factory.mktemp("engines"))


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("deterministic", [False, True])
def test_logits_are_those_of_one_rank(engines: dict[int, Engine], ranks: int, deterministic: bool) -> None:
    prompt = random_prompt(7, PROMPT_TOKENS)
    want = Sequences(engines[1], deterministic=deterministic).logits(prompt)
    sequences = Sequences(engines[ranks], deterministic=deterministic)
    for chunk in (0, 64, 7):
        got = sequences.logits(prompt, chunk)
        error = relative_error(got, want)
        print(f"{ranks} ranks, chunks of {chunk}: relative error {error:.5f}")
        assert error <= ROUNDING
        assert tokens_agree(got, want)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("graphs", [False, True])
def test_decode_steps(engines: dict[int, Engine], ranks: int, graphs: bool) -> None:
    """Batches of single tokens, each three times: the last time the graphs of all ranks are replayed."""
    prompts = [random_prompt(100 + i, 20 + (13 * i) % 90) for i in range(9)]
    one = Sequences(engines[1], count=9)
    split = Sequences(engines[ranks], count=9, graphs=graphs)
    for sequences in (one, split):
        for i, prompt in enumerate(prompts):
            sequences.logits(prompt[:-1], index=i)
    last, starts = [prompt[-1:] for prompt in prompts], [len(prompt) - 1 for prompt in prompts]
    for size in (1, 2, 5, 9):
        for _ in range(3):
            got = np.concatenate(split.step(last[:size], starts[:size], range(size)))
            want = np.concatenate(one.step(last[:size], starts[:size], range(size)))
            assert relative_error(got, want) <= ROUNDING, size


@pytest.mark.parametrize("ranks", [2, 4])
def test_deterministic_bits_depend_on_nothing_else(engines: dict[int, Engine], ranks: int) -> None:
    prompt = random_prompt(5, PROMPT_TOKENS)
    sequences = Sequences(engines[ranks], count=2, deterministic=True)
    first = sequences.logits(prompt)
    for chunk in (1, 64, 65):
        assert np.array_equal(sequences.logits(prompt, chunk, index=1), first), chunk


def greedy(engine: Engine, prompts: list[list[int]], **options: Any) -> list[list[int]]:
    sampling = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    options = {"kv_cache_memory": "8192tokens", "devices": device_list(engine), **options}
    with Executor(engine, verify=False, **options) as executor:
        results = executor.generate([Request(prompt_token_ids=prompt, sampling=sampling) for prompt in prompts])
    return [list(result.outputs[0].token_ids) for result in results]


@pytest.mark.parametrize("ranks", [2, 4])
def test_greedy_answers(engines: dict[int, Engine], ranks: int) -> None:
    """The manager over ranks: answers of a batch are those alone, to the bit; and, but for ties of logits that rounding
    decides, those of one rank."""
    prompts = [random_prompt(i, 30 + 11 * i) for i in range(6)]
    together = greedy(engines[ranks], prompts, deterministic=True)
    alone = [greedy(engines[ranks], [prompt], deterministic=True)[0] for prompt in prompts]
    assert together == alone
    of_one = Sequences(engines[1], deterministic=True)
    for prompt, answer in zip(prompts, together, strict=True):
        logits = of_one.logits(prompt + answer[:-1])[len(prompt) - 1 :]
        chosen = np.take_along_axis(logits, np.array(answer)[:, None], axis=-1)[:, 0]
        assert (logits.max(-1) - chosen <= ROUNDING * np.abs(logits).max()).all()


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_first_rank_samples_as_the_host_does(engines: dict[int, Engine], ranks: int) -> None:
    options = {"deterministic": True, "kv_cache_memory": "20000tokens", "devices": device_list(engines[ranks])}
    with Executor(engines[ranks], verify=False, **options) as executor:
        assert_the_device_samples_as_the_host_does(executor)


def test_fp8_weights(tmp_path: Path) -> None:
    """Each rank scales its part of a row of activations by itself: other codes, as close to bf16 as one rank's."""
    prompt = random_prompt(7, PROMPT_TOKENS)
    exact = Sequences(engines_of("llama", tmp_path / "bf16")[1]).logits(prompt)
    engines = engines_of("llama", tmp_path / "fp8", quantize="fp8")
    errors = {n: relative_error(Sequences(engines[n]).logits(prompt), exact) for n in (1, 2, 4)}
    print(f"relative error by ranks: {errors}")
    assert 0 < max(errors.values()) <= 1.25 * errors[1]


def test_a_wrong_number_of_devices(engines: dict[int, Engine]) -> None:
    with pytest.raises(InvalidRequest, match="one for each of the 4 ranks or one for all, got 2") as caught:
        Executor(engines[4], verify=False, devices="0,0")
    assert caught.value.param == "devices"
