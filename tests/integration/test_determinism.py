"""The same logits, bit for bit, whatever the batch, the chunk, the threads and the manager's scheduling."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from aotllm import _runtime
from aotllm.engines import Engine
from tests.integration.engines import build_engine, prompt_logits, runner, save_tiny_model
from tests.integration.test_architectures import CASES

PROMPT = "The sea was calm that night, and the lighthouse keeper wrote in his diary: " * 3
OTHERS = [f"Prompt number {i} " * (i + 1) for i in range(15)]
LENGTHS = (1, 7, 64)


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and a.tobytes() == b.tobytes()


def batched_logits(engine: Engine, prompts: list[list[int]], chunk: int) -> np.ndarray:
    """Logits of the first prompt's tokens while all prompts run together, `chunk` tokens of each in a step."""
    run = runner(engine, num_blocks=512)
    tables, next_block = [], 0
    for prompt in prompts:
        blocks = -(-len(prompt) // run.tokens_per_block)
        tables.append(list(range(next_block, next_block + blocks)))
        next_block += blocks
    rows = []
    for start in range(0, max(map(len, prompts)), chunk):
        live = [i for i, prompt in enumerate(prompts) if start < len(prompt)]
        live.sort(key=lambda i: -i)  # the prompt that we look at is not the first of the batch
        parts = [prompts[i][start : start + chunk] for i in live]
        logits = run.step(
            parts, [start] * len(live), [tables[i] for i in live], ["all" if i == 0 else "last" for i in live]
        )
        if 0 in live:
            rows.append(logits[len(live) - 1 :])
    return np.concatenate(rows)


@pytest.fixture(params=["smollm2", "smollm2_bf16_cache", "smollm2_int8"])
def engine(request: pytest.FixtureRequest) -> Engine:
    """One model with an int16, a bf16 and an int8 cache."""
    return request.getfixturevalue(request.param)  # type: ignore[no-any-return]


@pytest.mark.parametrize("chunk", LENGTHS)
def test_chunk_size_does_not_matter(engine: Engine, chunk: int) -> None:
    ids = engine.tokenizer().encode(PROMPT)
    whole = prompt_logits(engine, ids)
    assert same_bits(whole, prompt_logits(engine, ids, chunk=chunk))


@pytest.mark.parametrize("threads", [1, 3])
def test_thread_count_does_not_matter(engine: Engine, threads: int) -> None:
    ids = engine.tokenizer().encode(PROMPT)
    assert same_bits(prompt_logits(engine, ids), prompt_logits(engine, ids, num_threads=threads))


@pytest.mark.parametrize("chunk", [1, 7])
def test_batch_of_sixteen_does_not_matter(engine: Engine, chunk: int) -> None:
    tokenizer = engine.tokenizer()
    prompts = [tokenizer.encode(text) for text in (PROMPT, *OTHERS)]
    assert same_bits(prompt_logits(engine, prompts[0]), batched_logits(engine, prompts, chunk))


@pytest.mark.parametrize("case", ["llama, odd sizes", "qwen3", "mixtral", "qwen3_moe, odd sizes", "gemma2", "gemma3"])
@pytest.mark.parametrize(
    ("dtype", "kv"), [("f32", "auto"), ("bf16", "auto"), ("f16", "auto"), ("f32", "bf16"), ("f32", "int8")]
)
def test_float_models_too(case: str, dtype: str, kv: str, tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "model", *CASES[case], dtype=dtype)
    engine = build_engine(tmp_path / "model", tmp_path / "engine", max_seq_len=256, kv_cache_dtype=kv)
    rng = np.random.default_rng(5)
    prompts = [rng.integers(3, 128, n).tolist() for n in (70, *range(1, 16))]
    alone = prompt_logits(engine, prompts[0])
    for chunk in LENGTHS:
        assert same_bits(alone, prompt_logits(engine, prompts[0], chunk=chunk, num_threads=1))
    assert same_bits(alone, batched_logits(engine, prompts, 7))


def manager_logits(engine: Engine, prompts: list[list[int]], watch: int, **config: int) -> list[bytes]:
    """Logits rows of a greedy answer to prompt `watch` out of the manager, while it serves all prompts."""
    settings = _runtime.ManagerConfig()
    for name, value in config.items():
        setattr(settings, name, value)
    manager = _runtime.GptManager(str(engine.rank_file()), settings)
    ids = []
    for i, prompt in enumerate(prompts):
        request = _runtime.Request()
        request.prompt_token_ids = prompt
        request.return_logits = i == watch
        request.sampling.temperature = 0.0
        request.sampling.max_tokens = 12
        request.sampling.ignore_eos = True
        ids.append(manager.submit(request))
    rows: list[bytes] = []
    finished = 0
    while finished < len(ids):
        responses = manager.poll(60.0)
        assert responses, "no response within a minute"
        for response in responses:
            if response.request_id == ids[watch]:
                rows += [row.tobytes() for row in response.logits]
            finished += response.finish_reason is not None
    manager.shutdown()
    return rows


@pytest.mark.parametrize(
    "config",
    [
        {"max_chunk_tokens": 1},
        {"max_chunk_tokens": 7},
        {"max_chunk_tokens": 64},
        {"max_batch_size": 3},
        {"num_kv_blocks": 24},  # two long sequences do not fit together: requests are preempted and computed again
        {"num_threads": 1},
    ],
    ids=str,
)
def test_the_manager_gives_the_logits_of_a_lone_request(smollm2: Engine, config: dict[str, int]) -> None:
    tokenizer = smollm2.tokenizer()
    prompts = [tokenizer.encode(text) for text in (*OTHERS[:8], PROMPT, *OTHERS[8:])]
    alone = manager_logits(smollm2, [prompts[8]], 0)
    assert len(alone) == 12
    assert manager_logits(smollm2, prompts, 8, **config) == alone
