"""What is cached changes no answer: the same tokens and log-probabilities, bit for bit, whatever was found in the
prefix cache, and however large pool, host tier, chunks and batches are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from aotllm import Executor, Request, SamplingParams
from aotllm.engines import Engine
from aotllm.request import RequestOutput

TEXT = "The keeper of the lighthouse wrote down what he saw: a ship, two gulls, three clouds and the moon. "
TOKENS_PER_BLOCK = 16
ANSWER_TOKENS = 6


def prompts_that_share(engine: Engine, prefix_tokens: int, lengths: Sequence[int]) -> list[list[int]]:
    """Prompts of `prefix_tokens` + 12 tokens that are alike for `lengths` tokens, and two of them altogether."""
    ids = engine.tokenizer().encode(TEXT * (prefix_tokens // 16 + 2))
    own = engine.tokenizer().encode("Blue ink, red paper, green stamps: he had it all in the drawer.")
    prompts = [[*ids[:length], *own, *ids[length:]][: prefix_tokens + 12] for length in lengths]
    return [*prompts, prompts[0]]


def requests_of(prompts: Iterable[Sequence[int]]) -> list[Request]:
    """Greedy and drawn answers with log-probabilities."""
    samplings = (
        SamplingParams(temperature=0.0, logprobs=2, max_tokens=ANSWER_TOKENS, ignore_eos=True),
        SamplingParams(temperature=1.0, seed=3, logprobs=0, max_tokens=ANSWER_TOKENS, ignore_eos=True),
    )
    return [Request(prompt_token_ids=ids, sampling=samplings[i % 2]) for i, ids in enumerate(prompts)]


def content(result: RequestOutput) -> tuple[Any, ...]:
    return result.token_ids, result.logprobs


def check(engine: Engine, requests: list[Request], expected: list[tuple[Any, ...]], options: dict[str, Any]) -> int:
    """Two rounds on one executor, one request after the other and all at a time; the cached prompt tokens of both."""
    with Executor(engine, verify=False, **{"num_threads": 2, **options}) as executor:
        results = executor.generate(requests)
        assert [content(result) for result in results] == expected, "all at a time"
        for request, wanted in zip(requests, expected, strict=True):
            results.append(executor.submit(request).result())
            assert content(results[-1]) == wanted, "one by one"
        return sum(result.num_cached_tokens for result in results)


def answers_without_cache(engine: Engine, requests: list[Request]) -> list[tuple[Any, ...]]:
    with Executor(engine, verify=False, num_threads=2, prefix_caching=False) as executor:
        results = [executor.submit(request).result() for request in requests]
        assert all(result.num_cached_tokens == 0 for result in results)
        assert executor.stats().context_tokens == sum(len(request.prompt_token_ids or ()) for request in requests)
    return [content(result) for result in results]


OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "a token at a time": {"max_chunk_tokens": 1},
    "chunks across blocks": {"max_chunk_tokens": 23},
    "one at a time": {"max_batch_size": 1},
    "batches of three": {"max_batch_size": 3, "max_num_tokens": 37},
    "no cache": {"prefix_caching": False},
    "one thread": {"num_threads": 1},
    "longest prefix first": {"queue_policy": "longest_prefix", "max_batch_size": 2},
}


def tight(engine_blocks: int) -> dict[str, dict[str, Any]]:
    """Pools that hold one sequence and a little more, so that cached blocks are evicted all the time."""
    pool = {"num_kv_blocks": engine_blocks}
    return {
        "small pool": pool,
        "small pool, no cache": {**pool, "prefix_caching": False},
        "small pool, chunks": {**pool, "max_chunk_tokens": 7},
        "small pool, host tier": {**pool, "kv_host_memory": "64MiB"},
        "small pool, answers reserved": {**pool, "capacity_policy": "guaranteed_no_evict"},
    }


# SmolLM2, int16 and int8 cache ----------------------------------------------------------------------------------------

SMOLLM2_OPTIONS = {**OPTIONS, **tight(8)}
SHARED = (1, 15, 16, 17, 48, 79)
"""Tokens alike: no block, some tokens of a block, whole blocks, and one token more and less"""


INT8_OPTIONS = ("defaults", "chunks across blocks", "small pool", "small pool, host tier")

Answers = tuple[Engine, list[Request], list[tuple[Any, ...]]]
"""An engine, requests, and their answers without cache, one by one"""


def answers_of(engine: Engine, prompts: list[list[int]]) -> Answers:
    requests = requests_of(prompts)
    return engine, requests, answers_without_cache(engine, requests)


@pytest.fixture(scope="module")
def smollm2_answers(smollm2: Engine) -> Answers:
    return answers_of(smollm2, prompts_that_share(smollm2, 68, SHARED))


@pytest.fixture(scope="module")
def int8_answers(smollm2_int8: Engine) -> Answers:
    return answers_of(smollm2_int8, prompts_that_share(smollm2_int8, 68, SHARED))


@pytest.mark.parametrize("options", SMOLLM2_OPTIONS.values(), ids=SMOLLM2_OPTIONS)
def test_answers_are_those_without_cache(smollm2_answers: Answers, options: dict[str, Any]) -> None:
    cached = check(*smollm2_answers, options)
    assert (cached > 0) == options.get("prefix_caching", True)


@pytest.mark.parametrize("name", INT8_OPTIONS)
def test_answers_with_an_int8_cache(int8_answers: Answers, name: str) -> None:
    assert check(*int8_answers, SMOLLM2_OPTIONS[name]) > 0


def test_a_small_pool_evicts_and_a_host_tier_keeps(smollm2_answers: Answers) -> None:
    engine, requests, expected = smollm2_answers
    cached = {}
    for name in ("small pool", "small pool, host tier"):
        with Executor(engine, verify=False, num_threads=2, **SMOLLM2_OPTIONS[name]) as executor:
            for _ in range(2):
                results = [executor.submit(request).result() for request in requests]
                assert [content(result) for result in results] == expected
            cached[name] = sum(result.num_cached_tokens for result in results)  # of the second round
            counters = executor.stats().counters["cache"]
        assert counters.evicted_blocks > 0 or counters.offloaded_blocks > 0
        assert (counters.onloaded_blocks > 0) == ("host" in name)
    # With everything kept, all but the last token of each prompt is found again.
    assert cached["small pool"] < cached["small pool, host tier"]
    assert cached["small pool, host tier"] == sum(len(request.prompt_token_ids or ()) - 1 for request in requests)


def test_four_sequences_hold_one_copy_of_the_prompt(smollm2: Engine) -> None:
    prompt_blocks, n = 9, 4
    prompt = smollm2.tokenizer().encode(TEXT * 10)[: prompt_blocks * TOKENS_PER_BLOCK]
    answer_blocks = 2
    sampling = SamplingParams(temperature=1.0, seed=1, n=n, max_tokens=answer_blocks * 16, ignore_eos=True)
    pool = prompt_blocks + n * answer_blocks
    with Executor(smollm2, num_threads=2, num_kv_blocks=pool) as executor:
        handle = executor.submit(Request(prompt_token_ids=prompt, sampling=sampling))
        used = [executor.stats().blocks_used for _ in handle]
        result = handle.result()
        stats = executor.stats()
    # All four ran to their ends in a pool that holds the prompt once, and nobody had to give a block back for it.
    assert [len(output.token_ids) for output in result.outputs] == [answer_blocks * 16] * n
    assert stats.preemptions == 0
    assert stats.context_tokens <= len(prompt) + n - 1  # each needs the logits of the last token
    assert stats.blocks_used == 0
    assert prompt_blocks < max(used) <= pool


# Gemma 3, whose layers look back 512 tokens but for every sixth -------------------------------------------------------

GEMMA3_OPTIONS = (
    "defaults",
    "chunks across blocks",
    "batches of three",
    "small pool",
    "small pool, chunks",
    "small pool, host tier",
)


@pytest.fixture(scope="module")
def gemma3_answers(gemma3: Engine) -> Answers:
    """Prompts longer than the window, alike up to places before and behind it."""
    return answers_of(gemma3, prompts_that_share(gemma3, 580, (579, 544, 100)))


@pytest.mark.slow
@pytest.mark.parametrize("name", GEMMA3_OPTIONS)
def test_answers_with_sliding_windows(gemma3_answers: Answers, name: str) -> None:
    assert check(*gemma3_answers, {**OPTIONS, **tight(48)}[name]) > 0
