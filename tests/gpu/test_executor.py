"""The manager over the CUDA runner: what else runs, what was cached and what was preempted changes no answer.

With `deterministic` that holds to the bit, so any fault of scheduling, blocks or graphs shows as another token.
"""

from __future__ import annotations

import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from aotllm import Executor, Request, SamplingParams
from aotllm.engines import Engine
from aotllm.structured_outputs import StructuredOutputs
from tests.gpu.answers import ANSWER_TOKENS, ask, assert_the_device_samples_as_the_host_does, content, listed, rounded
from tests.gpu.engines import random_prompt, tiny_engine


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """Full attention; windows in most layers, and so two groups of blocks."""
    return tiny_engine(tmp_path_factory.mktemp("engines"), request.param)[1]


def start(engine: Engine, **options: Any) -> Executor:
    return Executor(engine, verify=False, **{"deterministic": True, "kv_cache_memory": "20000tokens", **options})


def mixed_requests() -> list[Request]:
    """Prompts that share no block, some tokens of one, whole blocks, and a token more and less; greedy and drawn."""
    shared = random_prompt(1, 200)
    prompts = [shared[:length] + random_prompt(50 + length, 20) for length in (0, 1, 40, 63, 64, 65, 128, 200)]
    prompts += [prompts[3], shared[:1]]
    drawn = {"temperature": 1.0, "top_p": 0.9}
    return [ask(prompt, **(drawn | {"seed": i} if i % 2 else {})) for i, prompt in enumerate(prompts)]


def idle(executor: Executor) -> None:
    """Nothing runs, waits or holds a block any more."""
    end = time.monotonic() + 30
    while True:
        executor.submit(ask([5], max_tokens=1)).result(30)
        stats = executor.stats()
        if (stats.running, stats.queued, stats.blocks_used) == (0, 0, 0) or time.monotonic() > end:
            break
    assert (stats.running, stats.queued, stats.blocks_used) == (0, 0, 0)
    assert stats.counters["failed"] == 0


@pytest.fixture(scope="module")
def alone(engine: Engine) -> list[Any]:
    """The answers to `mixed_requests`, one after the other without cache."""
    with start(engine, prefix_caching=False) as executor:
        results = [executor.submit(request).result() for request in mixed_requests()]
    assert all(result.num_cached_tokens == 0 for result in results)
    return content(results)


# A request of 220 + 70 tokens takes 5 blocks of 64; gemma3's windows take fewer.
OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "no cache": {"prefix_caching": False},
    "chunks across blocks": {"max_chunk_tokens": 23},
    "a token at a time": {"max_chunk_tokens": 1},
    "batches of three": {"max_batch_size": 3},
    "a small pool": {"kv_cache_memory": "640tokens"},
    "a small pool with a host tier": {"kv_cache_memory": "640tokens", "kv_host_memory": "64MiB"},
    "guaranteed": {"kv_cache_memory": "640tokens", "capacity_policy": "guaranteed_no_evict"},
    "speculation": {"speculative": "ngram", "ngram_min": 1},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_answers_are_those_alone(engine: Engine, alone: list[Any], options: dict[str, Any]) -> None:
    with start(engine, **options) as executor:
        requests = mixed_requests()
        together = executor.generate(requests)
        again = [executor.submit(request).result() for request in requests]
        if "speculative" in options:  # the host draws where there are drafts
            assert listed(content(together)) == rounded(alone), "all at a time"
            assert listed(content(again)) == rounded(alone), "one by one, over what is cached"
        else:
            assert content(together) == alone, "all at a time"
            assert content(again) == alone, "one by one, over what is cached"
        cached = sum(result.num_cached_tokens for result in together + again)
        assert (cached > 0) == options.get("prefix_caching", True)
        idle(executor)


def test_preempted_answers_are_the_same(engine: Engine) -> None:
    requests = [ask(random_prompt(i, 60 + i), max_tokens=200) for i in range(8)]
    with start(engine, prefix_caching=False) as executor:
        expected = content(executor.submit(request).result() for request in requests)
    with start(engine, kv_cache_memory="900tokens") as executor:
        assert content(executor.generate(requests)) == expected
        assert executor.stats().preemptions > 0
        idle(executor)


@pytest.mark.parametrize("options", [{}, {"deterministic": False}, {"kv_cache_memory": "1400tokens"}], ids=str)
def test_steps_begin_before_the_tokens_of_the_last_are_known(engine: Engine, options: dict[str, Any]) -> None:
    """Requests that want nothing but tokens; those with log-probabilities wait for each token, and say the same ones.
    Some end early, by a token that the other half of them says soon."""
    prompts = [random_prompt(300 + i, 20 + 11 * i) for i in range(8)]
    with start(engine, **options) as executor:
        waiting = executor.generate(
            [ask(prompt, temperature=0.8 * (i % 2), seed=i) for i, prompt in enumerate(prompts)]
        )
        assert executor.stats().counters["steps_queued"] == 0
        said = [result.outputs[0].token_ids for result in waiting]
        stops = [{} if i % 3 else {"stop_token_ids": [said[i][9 + i]]} for i in range(len(prompts))]
        requests = [
            ask(prompt, temperature=0.8 * (i % 2), seed=i, logprobs=None, **stops[i])
            for i, prompt in enumerate(prompts)
        ]
        results = [result.outputs[0].token_ids for result in executor.generate(requests)]
        if "deterministic" not in options:
            for got, whole, stop in zip(results, said, stops, strict=True):
                ends = whole.index(stop["stop_token_ids"][0]) + 1 if stop else len(whole)
                assert got == whole[:ends]
        assert executor.stats().counters["steps_queued"] > ANSWER_TOKENS // 2
        idle(executor)


def test_several_answers_to_one_prompt(engine: Engine) -> None:
    drawn = ask(random_prompt(3, 100), n=4, temperature=1.0, seed=7)
    with start(engine) as executor:
        (together,) = content([executor.submit(drawn).result()])
        assert len({tokens for tokens, _ in together}) > 1
        (greedy,) = content([executor.submit(ask(random_prompt(3, 100), n=3)).result()])
        assert greedy[0] == greedy[1] == greedy[2]
        idle(executor)
    with start(engine, kv_cache_memory="640tokens", max_batch_size=2) as executor:
        assert content([executor.submit(drawn).result()]) == [together]


def test_cancelled_requests_leave_the_others_alone(engine: Engine, alone: list[Any]) -> None:
    with start(engine) as executor:
        victims = [executor.submit(ask(random_prompt(200 + i, 90), max_tokens=400)) for i in range(6)]
        handles = [executor.submit(request) for request in mixed_requests()]
        for victim in victims[::2]:
            victim.cancel()
        results = [handle.result() for handle in handles]
        for victim in victims[1::2]:
            victim.cancel()
        reasons = [victim.result().outputs[0].finish_reason for victim in victims]
        assert "cancelled" in reasons
        assert content(results) == alone
        idle(executor)


def test_many_threads_at_once(engine: Engine, alone: list[Any]) -> None:
    requests = mixed_requests()
    with start(engine, max_batch_size=8) as executor:
        answers: dict[int, list[Any]] = {}

        def client(number: int) -> None:
            answers[number] = content([executor.submit(requests[number % len(requests)]).result()])

        threads = [threading.Thread(target=client, args=(i,)) for i in range(40)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [answers[i][0] for i in range(40)] == [alone[i % len(requests)] for i in range(40)]
        idle(executor)


def test_prompts_without_determinism_are_cached_too(engine: Engine) -> None:
    """Here bits may differ; that all of the prompt is found again, and that answers come, must hold."""
    request = ask(random_prompt(9, 200))
    with start(engine, deterministic=False) as executor:
        first, second = executor.submit(request).result(), executor.submit(request).result()
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 199)
    assert len(second.outputs[0].token_ids) == ANSWER_TOKENS


def test_constrained_answers(engine: Engine) -> None:
    form = StructuredOutputs(regex="a[0-9]{3}(bc|de){2,4}f")
    sampling = SamplingParams(temperature=1.0, seed=1, max_tokens=40)
    formed = [
        Request(prompt_token_ids=random_prompt(i, 30), sampling=sampling, structured_outputs=form) for i in (1, 2)
    ]
    with start(engine) as executor:
        results = executor.generate([*formed, ask(random_prompt(3, 30))])
    for result in results[: len(formed)]:
        assert re.fullmatch("a[0-9]{3}(bc|de){2,4}f", result.outputs[0].text), result.outputs[0].text


@pytest.mark.parametrize(
    "options",
    [{}, {"kv_cache_memory": "1000tokens", "max_batch_size": 12}],
    ids=["defaults", "preemptions"],
)
def test_the_device_samples_as_the_host_does(engine: Engine, options: dict[str, Any]) -> None:
    with start(engine, **options) as executor:
        assert_the_device_samples_as_the_host_does(executor)
        idle(executor)


def test_prompt_logprobs_and_penalties(engine: Engine) -> None:
    """What the GPU's sampler does not do itself goes by the host's, and says the same."""
    prompt = random_prompt(4, 100)
    with start(engine, prefix_caching=False) as executor:
        plain = executor.submit(ask(prompt, max_tokens=20)).result().outputs[0]
        penalised = executor.submit(ask(prompt, max_tokens=20, repetition_penalty=1.3)).result().outputs[0]
        banned = plain.token_ids[0]
        biased = executor.submit(ask(prompt, max_tokens=20, logit_bias={banned: -100.0})).result().outputs[0]
        scored = executor.submit(ask(prompt, max_tokens=1, prompt_logprobs=1)).result()
    assert len(penalised.token_ids) == 20
    assert banned not in biased.token_ids
    assert len(scored.prompt_logprobs) == len(prompt) - 1
    assert all(entry.logprob <= 0.0 for entry in scored.prompt_logprobs)


@pytest.mark.parametrize("kv_cache_dtype", ["bf16", "fp8"])
def test_cache_types(kv_cache_dtype: str, tmp_path: Path) -> None:
    _, engine = tiny_engine(tmp_path, "llama", kv_cache_dtype=kv_cache_dtype)
    requests = mixed_requests()
    with start(engine, prefix_caching=False) as executor:
        expected = content(executor.submit(request).result() for request in requests)
    with start(engine) as executor:
        assert content(executor.generate(requests)) == expected


@pytest.mark.parametrize("tokens_per_block", [16, 32, 128])
def test_block_sizes(tokens_per_block: int, tmp_path: Path) -> None:
    _, engine = tiny_engine(tmp_path, "gemma3", tokens_per_block=tokens_per_block)
    requests = mixed_requests()
    with start(engine, prefix_caching=False) as executor:
        expected = content(executor.submit(request).result() for request in requests)
    with start(engine, kv_cache_memory="1024tokens") as executor:
        assert content(executor.generate(requests)) == expected


def test_fp8_weights_answer(tmp_path: Path) -> None:
    _, engine = tiny_engine(tmp_path, "llama", quantize="fp8")
    requests = mixed_requests()
    with start(engine) as executor:
        assert content(executor.generate(requests)) == content(executor.submit(r).result() for r in requests)
