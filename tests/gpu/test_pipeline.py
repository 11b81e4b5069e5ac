"""Engines cut into pipeline stages: what one stage says, to the bit, since rows are only copied.

All stages share a device, unless AOTLLM_TEST_SPREAD=N spreads them over N.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from aotllm import Executor, Request, SamplingParams
from aotllm.engines import Engine
from aotllm.errors import InvalidRequest
from tests.gpu.engines import BASE, CASES, Sequences, device_list, random_prompt, relative_error
from tests.integration.engines import build_engine, save_tiny_model

PROMPT_TOKENS = 200
ROUNDING = 2e-2
"""Between norms that are made with a sum over ranks and norms after it, and between numbers of ranks"""
HEADS = {**BASE, "num_attention_heads": 8, "num_key_value_heads": 4}
PIPELINE_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, biases": ("LlamaForCausalLM", {**HEADS, "attention_bias": True, "mlp_bias": True}),
    "qwen3, tied": ("Qwen3ForCausalLM", {**HEADS, "tie_word_embeddings": True}),
    "gemma3": ("Gemma3ForCausalLM", {**CASES["gemma3"][1], "num_attention_heads": 4}),
}
SPLITS = {"one": {}, "pp2": {"pp": 2}, "pp3": {"pp": 3}, "tp2": {"tp": 2}, "pp2 tp2": {"pp": 2, "tp": 2}}


@pytest.fixture(scope="module", params=PIPELINE_CASES)
def engines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Engine]:
    folder = tmp_path_factory.mktemp("engines")
    save_tiny_model(folder / "model", *PIPELINE_CASES[request.param], dtype="bf16")
    options = {"max_seq_len": 512, "target": "cuda", "max_num_tokens": 256}
    return {name: build_engine(folder / "model", folder / name, **options, **split) for name, split in SPLITS.items()}


@pytest.mark.parametrize("stages", ["pp2", "pp3"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_logits_are_those_of_one_stage(engines: dict[str, Engine], stages: str, deterministic: bool) -> None:
    prompt = random_prompt(7, PROMPT_TOKENS)
    one = Sequences(engines["one"], deterministic=deterministic)
    cut = Sequences(engines[stages], deterministic=deterministic)
    for chunk in (0, 64, 7):
        assert np.array_equal(cut.logits(prompt, chunk), one.logits(prompt, chunk)), chunk


@pytest.mark.parametrize("deterministic", [False, True])
def test_stages_of_several_ranks(engines: dict[str, Engine], deterministic: bool) -> None:
    prompt = random_prompt(7, PROMPT_TOKENS)
    want = Sequences(engines["tp2"], deterministic=deterministic).logits(prompt)
    both = Sequences(engines["pp2 tp2"], deterministic=deterministic)
    for chunk in (0, 64):
        got = both.logits(prompt, chunk)
        assert relative_error(got, want) <= ROUNDING
        assert not deterministic or np.array_equal(got, want)


@pytest.mark.parametrize("stages", ["pp2", "pp3", "pp2 tp2"])
@pytest.mark.parametrize("graphs", [False, True])
def test_decode_steps(engines: dict[str, Engine], stages: str, graphs: bool) -> None:
    """Batches of single tokens, each three times: the last time the graphs of all stages are replayed."""
    prompts = [random_prompt(100 + i, 20 + (13 * i) % 90) for i in range(9)]
    reference = engines["tp2" if "tp2" in stages else "one"]
    one = Sequences(reference, count=9, graphs=graphs)
    cut = Sequences(engines[stages], count=9, graphs=graphs)
    for sequences in (one, cut):
        for i, prompt in enumerate(prompts):
            sequences.logits(prompt[:-1], index=i)
    last, starts = [prompt[-1:] for prompt in prompts], [len(prompt) - 1 for prompt in prompts]
    for size in (1, 2, 5, 9):
        for _ in range(3):
            got = np.concatenate(cut.step(last[:size], starts[:size], range(size)))
            want = np.concatenate(one.step(last[:size], starts[:size], range(size)))
            assert relative_error(got, want) <= (ROUNDING if "tp2" in stages else 0.0), size


def greedy(engine: Engine, prompts: list[list[int]], **options: Any) -> list[list[int]]:
    sampling = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    options = {"kv_cache_memory": "8192tokens", "devices": device_list(engine), **options}
    with Executor(engine, verify=False, **options) as executor:
        results = executor.generate([Request(prompt_token_ids=prompt, sampling=sampling) for prompt in prompts])
    return [list(result.outputs[0].token_ids) for result in results]


@pytest.mark.parametrize("stages", ["pp2", "pp3"])
def test_greedy_answers(engines: dict[str, Engine], stages: str) -> None:
    """The manager over stages; tokens are sampled on the last one."""
    prompts = [random_prompt(i, 30 + 11 * i) for i in range(6)]
    together = greedy(engines[stages], prompts, deterministic=True)
    assert together == greedy(engines["one"], prompts, deterministic=True)


def test_kv_memory_is_what_all_stages_have(engines: dict[str, Engine]) -> None:
    """A block takes less where a stage has a part of the layers, so the same memory of each stage holds more."""
    blocks = {}
    for name in ("one", "pp3"):
        with Executor(engines[name], verify=False, kv_cache_memory="4MB", devices="0") as executor:
            blocks[name] = executor.memory().groups[0].device_blocks
    assert blocks["pp3"] > blocks["one"]


def test_a_wrong_number_of_devices(engines: dict[str, Engine]) -> None:
    with pytest.raises(InvalidRequest, match="one for each of the 4 ranks or one for all, got 2") as caught:
        Executor(engines["pp2 tp2"], verify=False, devices="0,0")
    assert caught.value.param == "devices"
