"""Engines of target cpu in several ranks and stages: what one rank says, and the same bits whatever the batch."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aotllm import Executor, Request, SamplingParams, _runtime
from aotllm.engines import Engine
from aotllm.errors import EngineError, EngineIncompatible, InvalidRequest, UnsupportedModel
from tests.integration.engines import build_engine, prompt_logits, runner, save_tiny_model
from tests.integration.test_architectures import BASE, GEMMA, random_prompt

ROUNDING = 2e-4
"""Of logits of about 10 whose sums are made in another order, in float32 but for an int16 cache"""
HEADS = {**BASE, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 131}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", HEADS),
    "llama, biases": ("LlamaForCausalLM", {**HEADS, "attention_bias": True, "mlp_bias": True}),
    "llama, tied": ("LlamaForCausalLM", {**HEADS, "tie_word_embeddings": True, "intermediate_size": 100}),
    "qwen2": ("Qwen2ForCausalLM", HEADS),
    "qwen3, fewer KV heads than ranks": ("Qwen3ForCausalLM", {**HEADS, "num_key_value_heads": 2}),
    "gemma2": ("Gemma2ForCausalLM", {**GEMMA, "attn_logit_softcapping": 20.0, "final_logit_softcapping": 10.0}),
    "gemma3": ("Gemma3ForCausalLM", {**GEMMA, "vocab_size": 131}),
}
PROMPT = 40


def engines_of(case: str, folder: Path, splits: tuple[dict[str, int], ...], dtype: str = "f32") -> list[Engine]:
    """One model, built once for each way to split it."""
    save_tiny_model(folder / "model", *CASES[case], dtype=dtype)
    return [
        build_engine(folder / "model", folder / f"engine{i}", max_seq_len=128, **split)
        for i, split in enumerate(splits)
    ]


def tokens_agree(got: np.ndarray, want: np.ndarray) -> bool:
    """The largest logits are at the same place wherever they are further apart than the two differ."""
    top = np.sort(want, axis=-1)
    clear = top[:, -1] - top[:, -2] > 2 * np.abs(got - want).max(axis=-1)
    assert clear.sum() > len(want) // 4
    return bool((got.argmax(-1) == want.argmax(-1))[clear].all())


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and a.tobytes() == b.tobytes()


def among_others(engine: Engine, prompt: list[int], num_threads: int) -> np.ndarray:
    """Logits of a prompt whose first part shares its step with another prompt, and whose rest comes one by one."""
    run = runner(engine, num_threads=num_threads)
    tables = [[5, 1, 9], [3, 7, 2]]
    first = run.step([random_prompt(99, 20), prompt[:33]], [0, 0], tables, ["none", "all"])
    rest = [run.step([[prompt[i]]], [i], tables[1:], ["all"]) for i in range(33, len(prompt))]
    return np.concatenate([first, *rest])


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_one_rank(case: str, tmp_path: Path) -> None:
    one, two, four = engines_of(case, tmp_path, ({}, {"tp": 2}, {"tp": 4}))
    prompt = random_prompt(7)
    want = prompt_logits(one, prompt)
    for engine in (two, four):
        got = prompt_logits(engine, prompt)
        assert np.abs(got - want).max() <= ROUNDING
        assert not same_bits(got, want)  # else nothing was split
        assert tokens_agree(got, want)
        for chunk, threads in ((1, 1), (7, 3), (16, 5), (PROMPT, 8)):
            assert same_bits(prompt_logits(engine, prompt, chunk, threads), got), (chunk, threads)
            assert same_bits(among_others(engine, prompt, threads), got)


@pytest.mark.parametrize("case", CASES)
def test_stages_say_to_the_bit_what_one_says(case: str, tmp_path: Path) -> None:
    one, two, three, tp2, both = engines_of(case, tmp_path, ({}, {"pp": 2}, {"pp": 3}, {"tp": 2}, {"pp": 2, "tp": 2}))
    layers = [two.plan(rank)["pp"]["layers"] for rank in range(2)]
    assert layers == ([[0, 2], [2, 3]] if len(one.plan()["kv"]["layers"]) == 3 else [[0, 3], [3, 6]])
    prompt = random_prompt(7)
    for want, engines in ((one, (two, three)), (tp2, (both,))):
        logits = prompt_logits(want, prompt)
        for engine in engines:
            for chunk, threads in ((0, 2), (1, 1), (7, 3), (16, 5)):
                assert same_bits(prompt_logits(engine, prompt, chunk, threads), logits), (chunk, threads)
            assert same_bits(among_others(engine, prompt, 3), logits)


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_half_precision_weights(dtype: str, tmp_path: Path) -> None:
    one, three = engines_of("llama", tmp_path, ({}, {"tp": 4}), dtype)
    prompt = random_prompt(11)
    got, want = prompt_logits(three, prompt), prompt_logits(one, prompt)
    assert np.abs(got - want).max() <= 5e-3  # the cache is int16
    assert tokens_agree(got, want)


def greedy(engine: Engine, prompts: list[list[int]], **options: Any) -> list[list[int]]:
    sampling = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    with Executor(engine, verify=False, kv_cache_memory="2048tokens", **options) as executor:
        results = executor.generate([Request(prompt_token_ids=prompt, sampling=sampling) for prompt in prompts])
    return [list(result.outputs[0].token_ids) for result in results]


@pytest.mark.parametrize("split", [{"tp": 2}, {"tp": 2, "pp": 3}])
def test_greedy_answers(split: dict[str, int], tmp_path: Path) -> None:
    """The manager over ranks: answers of a batch are those alone; those of one rank but for ties."""
    one, two = engines_of("llama", tmp_path, ({}, split))
    prompts = [random_prompt(i, 10 + 7 * i) for i in range(6)]
    together = greedy(two, prompts, num_threads=3)
    assert together == [greedy(two, [prompt], num_threads=1)[0] for prompt in prompts]
    for prompt, answer in zip(prompts, together, strict=True):
        logits = prompt_logits(one, prompt + answer[:-1])[len(prompt) - 1 :]
        chosen = np.take_along_axis(logits, np.array(answer)[:, None], axis=-1)[:, 0]
        assert (logits.max(-1) - chosen <= 2 * ROUNDING).all()


@pytest.mark.parametrize("split", [{"tp": 2}, {"pp": 3}, {"tp": 2, "pp": 2}])
def test_kv_memory_is_reported_as_one(split: dict[str, int], tmp_path: Path) -> None:
    engines = engines_of("llama", tmp_path, ({}, split))
    blocks = []
    for engine in engines:
        with Executor(engine, verify=False, kv_cache_memory="1MB") as executor:
            (group,) = executor.memory().groups
            blocks.append((group.device_blocks, group.bytes_per_block))
    assert blocks[0] == blocks[1]


def test_block_formats_keep_their_values(smollm2_gguf: Path, tmp_path: Path) -> None:
    """Q4_1, with tokens that one rank says, too."""
    one, three = (build_engine(smollm2_gguf, tmp_path / f"tp{n}", max_seq_len=256, tp=n) for n in (1, 3))
    ids = one.tokenizer().encode("The sea was calm that night, and the lighthouse keeper wrote in his diary:")
    got, want = prompt_logits(three, ids), prompt_logits(one, ids)
    # Activations are rounded to 8 bits: a sum that differs in its last place is, now and then, another code.
    assert np.linalg.norm(got - want) <= 5e-2 * np.linalg.norm(want)
    assert tokens_agree(got, want)
    assert same_bits(prompt_logits(three, ids, chunk=5, num_threads=4), got)


def test_what_cannot_be_split(smollm2_gguf: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="tp=2: 9 query heads cannot be dealt out evenly; .*--tp 1"):
        build_engine(smollm2_gguf, tmp_path / "engine", tp=2)
    with pytest.raises(UnsupportedModel, match="tp=9: 1536 neurons of an MLP cannot be dealt out evenly; .*--tp 3"):
        build_engine(smollm2_gguf, tmp_path / "engine", tp=9)


def test_an_adapter_is_refused(tmp_path: Path) -> None:
    (engine,) = engines_of("llama", tmp_path, ({"tp": 2},))
    run = runner(engine)
    with pytest.raises(InvalidRequest, match="several ranks"):
        run.load_adapter(1, _runtime.Adapter())


@pytest.mark.parametrize("split", [{"tp": 2}, {"pp": 2}])
def test_a_rank_that_is_missing(split: dict[str, int], tmp_path: Path) -> None:
    (engine,) = engines_of("llama", tmp_path, (split,))
    engine.rank_file(1).unlink()
    with pytest.raises(EngineError, match=r"rank1\.engine"):
        runner(engine)
    with pytest.raises(EngineError, match=r"rank1\.engine"):
        Executor(engine, verify=False)


@pytest.mark.parametrize("split", [{"tp": 2}, {"pp": 2}])
def test_ranks_of_different_builds(split: dict[str, int], tmp_path: Path) -> None:
    """Equal in everything that a plan says."""
    folders = [tmp_path / "a", tmp_path / "b"]
    engines = []
    for seed, folder in enumerate(folders):
        save_tiny_model(folder / "model", *CASES["llama"], max_gain=1.0 + seed)
        engines.append(build_engine(folder / "model", folder / "engine", max_seq_len=128, **split))
    assert engines[0].plan(1) == engines[1].plan(1)
    shutil.copy(engines[1].rank_file(1), engines[0].rank_file(1))
    with pytest.raises(EngineIncompatible, match=r"rank1\.engine: is from another build than .*rank0\.engine"):
        runner(engines[0])


def test_ranks_in_the_wrong_places(tmp_path: Path) -> None:
    (engine,) = engines_of("llama", tmp_path, ({"tp": 2},))
    shutil.copy(engine.rank_file(0), engine.rank_file(1))
    assert engine.manifest.parallel.tp == 2
    with pytest.raises(EngineIncompatible, match=r"rank1\.engine: is rank 0 of 2, expected rank 1 of 2"):
        runner(engine)
