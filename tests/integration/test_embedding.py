"""Embeddings: pooled hidden states after the final norm, as transformers has them; the same bits in any company."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from aotllm import Executor, Request, SamplingParams
from aotllm.engines import Engine
from aotllm.serving import app_of
from tests.integration.engines import build_engine, save_tiny_model
from tests.integration.test_architectures import CASES, random_prompt
from tests.integration.test_lora import save_adapter

POOLINGS: tuple[Any, ...] = ("last", "mean")


def reference(model: Any, prompt: Sequence[int]) -> dict[str, np.ndarray]:
    """What transformers gives for each pooling."""
    import torch

    with torch.no_grad():
        # The last of them is that after the final norm.
        hidden = model(torch.tensor([list(prompt)]), output_hidden_states=True).hidden_states[-1][0].numpy()
    return {"last": hidden[-1], "mean": hidden.mean(0, dtype=np.float64)}


@pytest.mark.parametrize("case", ["llama", "llama, odd sizes", "mistral, window", "qwen2", "qwen3", "gemma2", "gemma3"])
def test_equals_transformers(case: str, tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model", *CASES[case])
    engine = build_engine(tmp_path / "model", tmp_path / "engine", max_seq_len=64)
    prompts = [random_prompt(seed, length) for seed, length in enumerate([1, 2, 17, 40, 64])]
    with Executor(engine, num_threads=2) as executor:
        for pooling in POOLINGS:
            outputs = executor.embed(prompts, pooling, normalize=False)
            for prompt, output in zip(prompts, outputs, strict=True):
                expected = reference(model, prompt)[pooling]
                assert output.embedding.shape == expected.shape
                assert np.abs(output.embedding - expected).max() <= 1e-4


def test_adapters_apply(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model", *CASES["llama"])
    engine = build_engine(tmp_path / "model", tmp_path / "engine", max_seq_len=64)
    adapted = save_adapter(tmp_path / "adapter", model, seed=1, r=8, lora_alpha=16)
    prompt = random_prompt(5)
    with Executor(engine, num_threads=2) as executor:
        executor.load_lora("a", tmp_path / "adapter")
        for pooling in POOLINGS:
            plain, other = (
                executor.embed(Request(prompt_token_ids=prompt, adapter=name), pooling, normalize=False)[0].embedding
                for name in (None, "a")
            )
            assert np.abs(other - reference(adapted, prompt)[pooling]).max() <= 1e-4
            assert np.abs(other - plain).max() > 1e-2


def embeddings(engine: Engine, prompts: list[list[int]], pooling: Any, **options: Any) -> list[bytes]:
    with Executor(engine, verify=False, **{"num_threads": 2, **options}) as executor:
        return [output.embedding.tobytes() for output in executor.embed(prompts, pooling)]


@pytest.mark.parametrize("pooling", POOLINGS)
def test_the_same_bits_whatever_runs_beside(smollm2: Engine, pooling: Any) -> None:
    text = smollm2.tokenizer().encode("The keeper of the lighthouse wrote down what he saw: a ship, two gulls. " * 6)
    prompts = [text[: 3 + 17 * i] for i in range(6)]
    alone = [embeddings(smollm2, [prompt], pooling, prefix_caching=False, num_threads=1)[0] for prompt in prompts]

    assert embeddings(smollm2, prompts, pooling, prefix_caching=False) == alone, "in a batch"
    assert embeddings(smollm2, prompts, pooling, max_chunk_tokens=7) == alone, "in chunks"
    assert embeddings(smollm2, prompts, pooling, num_kv_blocks=9) == alone, "with little memory"
    with Executor(smollm2, verify=False, num_threads=2) as executor:
        talk = [
            executor.submit(Request(prompt="Once", sampling=SamplingParams(max_tokens=40, seed=i))) for i in range(3)
        ]
        for round_number in range(2):
            outputs = executor.embed(prompts, pooling)
            assert [output.embedding.tobytes() for output in outputs] == alone, "beside answers"
            cached = [output.num_cached_tokens for output in outputs]
            if pooling == "mean":
                assert cached == [0] * 6
            elif round_number == 1:
                assert cached == [len(prompt) - 1 for prompt in prompts]
        for handle in talk:
            assert handle.result().finish_reason in ("length", "stop")
        assert executor.stats().blocks_used == 0


def test_related_texts_are_nearer(smollm2: Engine) -> None:
    texts = ["The cat sleeps on the sofa.", "A kitten naps on the couch.", "Interest rates rose by half a percent."]
    with Executor(smollm2, verify=False) as executor:
        cat, kitten, rates = (output.embedding for output in executor.embed(texts))
    assert np.linalg.norm(cat) == pytest.approx(1.0, abs=1e-6)
    assert cat @ kitten > cat @ rates


def test_over_http(smollm2: Engine) -> None:
    """The official client gets, through base64, the very numbers."""
    texts = ["The cat sleeps on the sofa.", "A kitten naps on the couch."]
    with Executor(smollm2, verify=False) as executor:
        expected = [output.embedding.tolist() for output in executor.embed(texts, "last")]
        transport = httpx.ASGITransport(app_of({"m": executor}))

        async def ask() -> list[list[float]]:
            async with httpx.AsyncClient(transport=transport) as http:
                client = openai.AsyncOpenAI(base_url="http://test/v1", api_key="none", http_client=http)
                answer = await client.embeddings.create(model="m", input=texts, extra_body={"pooling": "last"})
                return [each.embedding for each in answer.data]

        assert asyncio.run(ask()) == expected
