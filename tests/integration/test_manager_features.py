"""What the manager offers beyond one sequence of one prompt, on the real runtime and against transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aotllm import BeamSearchParams, Executor, Request, SamplingParams
from aotllm.engines import Engine
from tests.aotllm.serving.http_client import Client
from tests.integration.engines import build_engine, save_tiny_model
from tests.integration.test_architectures import CASES

PROMPT = [int(token) for token in np.random.default_rng(3).integers(3, 128, 50)]
EOS = 2


class Tiny:
    """A random float32 model as transformers has it, and as an engine."""

    def __init__(self, folder: Path) -> None:
        self.reference = save_tiny_model(folder / "model", *CASES["llama, odd sizes"])
        self.engine = build_engine(folder / "model", folder / "engine", max_seq_len=256)

    def logprobs(self, ids: Sequence[int]) -> np.ndarray:
        """Log-probabilities of the next token at each position, `[tokens, vocab]`."""
        import torch

        with torch.no_grad():
            rows: np.ndarray = torch.log_softmax(self.reference(torch.tensor([list(ids)])).logits[0], dim=-1).numpy()
        return rows


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return Tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def start(tiny: Tiny) -> Iterator[Callable[..., Executor]]:
    """A new executor, whose cache is empty."""
    executors: list[Executor] = []

    def start(**options: Any) -> Executor:
        executors.append(Executor(tiny.engine, num_threads=2, **options))
        return executors[-1]

    yield start
    for executor in executors:
        executor.shutdown()


def request(prompt: Sequence[int] = PROMPT, **sampling: Any) -> Request:
    options = {name: sampling.pop(name) for name in ("timeout", "cache_salt") if name in sampling}
    params = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True, **sampling}
    return Request(prompt_token_ids=prompt, sampling=SamplingParams(**params), **options)


# Several sequences ----------------------------------------------------------------------------------------------------


def test_four_sequences_compute_their_prompt_once(start: Callable[..., Executor]) -> None:
    executor = start()
    result = executor.submit(request(n=4, temperature=1.0, seed=5)).result()
    # What is left of the last block is computed by each sequence for itself.
    tail = len(PROMPT) % executor.memory().tokens_per_block
    assert executor.stats().context_tokens == len(PROMPT) + 3 * tail
    answers = [output.token_ids for output in result.outputs]
    assert [len(answer) for answer in answers] == [12] * 4
    assert len(set(answers)) > 1  # each draws for itself


def test_sequences_are_the_same_in_any_company(start: Callable[..., Executor]) -> None:
    executor = start()
    alone = executor.submit(request(n=3, temperature=1.0, seed=9)).result()
    crowd = [executor.submit(request(PROMPT[i:], n=2, temperature=1.0, seed=i)) for i in range(6)]
    again = executor.submit(request(n=3, temperature=1.0, seed=9)).result()
    assert [o.token_ids for o in again.outputs] == [o.token_ids for o in alone.outputs]
    assert all(handle.result().finish_reason == "length" for handle in crowd)


def test_greedy_sequences_are_that_of_a_lone_request(start: Callable[..., Executor]) -> None:
    executor = start()
    alone = executor.submit(request()).result().token_ids
    assert [o.token_ids for o in executor.submit(request(n=3)).result().outputs] == [alone] * 3


def test_one_of_several_sequences_can_be_cancelled(start: Callable[..., Executor]) -> None:
    executor = start()
    handle = executor.submit(request(n=3, max_tokens=180))
    next(handle)
    handle.cancel(1)
    reasons = [(o.finish_reason, len(o.token_ids)) for o in handle.result().outputs]
    assert reasons[0] == reasons[2] == ("length", 180)
    assert reasons[1][0] == "cancelled"
    assert reasons[1][1] < 180
    assert executor.submit(request()).result().finish_reason == "length"


def test_best_of_keeps_the_likeliest(start: Callable[..., Executor]) -> None:
    executor = start()
    everything = executor.submit(request(n=5, temperature=1.0, seed=2, logprobs=0)).result().outputs
    best = executor.submit(request(n=2, best_of=5, temperature=1.0, seed=2)).result()
    ranked = sorted(everything, key=lambda o: (-o.mean_logprob, o.index))
    assert [o.token_ids for o in best.outputs] == [o.token_ids for o in ranked[:2]]
    assert best.num_generated_tokens == 60


# Log-probabilities ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"max_chunk_tokens": 7}], ids=str)
def test_prompt_logprobs_are_those_of_transformers(
    start: Callable[..., Executor], tiny: Tiny, options: dict[str, int]
) -> None:
    executor = start(**options)
    executor.submit(request()).result()  # a cached prefix must be scored all the same
    scored = executor.submit(request(prompt_logprobs=3)).result().prompt_logprobs
    expected = tiny.logprobs(PROMPT)
    assert [entry.token_id for entry in scored] == PROMPT[1:]
    for position, entry in enumerate(scored):
        assert entry.logprob == pytest.approx(expected[position, entry.token_id], abs=1e-3)
        top = np.sort(expected[position])[::-1][:3]
        assert [logprob for _, logprob in entry.top] == pytest.approx(top, abs=1e-3)


def test_logprobs_of_the_answer_are_those_of_transformers(start: Callable[..., Executor], tiny: Tiny) -> None:
    result = start().submit(request(logprobs=2, n=2, temperature=1.0, seed=1)).result()
    for output in result.outputs:
        expected = tiny.logprobs([*PROMPT, *output.token_ids])[len(PROMPT) - 1 : -1]
        got = [entry.logprob for entry in output.logprobs]
        assert got == pytest.approx(
            [row[token] for row, token in zip(expected, output.token_ids, strict=True)], abs=1e-3
        )
        assert output.cumulative_logprob == pytest.approx(sum(got))


def test_echo_scores_the_prompt_over_http(start: Callable[..., Executor], tiny: Tiny) -> None:
    client = Client({"m": start()})
    body = {"prompt": PROMPT, "echo": True, "logprobs": 1, "max_tokens": 0}
    choice = client.post("/v1/completions", body).json()["choices"][0]
    expected = tiny.logprobs(PROMPT)
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert choice["logprobs"]["token_logprobs"][1:] == pytest.approx(
        [expected[position, token] for position, token in enumerate(PROMPT[1:])], abs=1e-3
    )


# Beam search ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("early_stopping", ["true", "false", "never"])
@pytest.mark.parametrize(("width", "length_penalty"), [(1, 1.0), (2, 1.0), (4, 0.0), (4, 2.0)])
def test_beam_search_finds_what_transformers_finds(
    start: Callable[..., Executor], tiny: Tiny, width: int, length_penalty: float, early_stopping: str
) -> None:
    import torch

    ends = [EOS, *range(40, 60)]  # so that some answers end
    executor = start()
    result = executor.beam_search(
        request(n=width, max_tokens=8, stop_token_ids=ends), BeamSearchParams(width, length_penalty, early_stopping)
    )
    if width == 1:
        best = executor.submit(request(max_tokens=8, stop_token_ids=ends)).result()
        assert [o.token_ids for o in result.outputs] == [best.token_ids]
        return
    rows = tiny.reference.generate(
        torch.tensor([PROMPT]),
        num_beams=width,
        num_return_sequences=width,
        length_penalty=length_penalty,
        early_stopping={"true": True, "false": False}.get(early_stopping, early_stopping),
        max_new_tokens=8,
        eos_token_id=ends,
        pad_token_id=0,
        do_sample=False,
    )[:, len(PROMPT) :].tolist()
    expected = []
    for row in rows:
        end = next((place for place, token in enumerate(row) if token in ends), len(row) - 1)
        expected.append(tuple(row[: end + 1]))
    assert [o.token_ids for o in result.outputs] == expected


def test_a_step_of_beam_search_computes_little(start: Callable[..., Executor], tiny: Tiny) -> None:
    executor = start()
    executor.beam_search(request(max_tokens=6), BeamSearchParams(3))
    # The prompt once; then per beam and step at most a block's worth of tokens that no full block holds yet.
    tokens_per_block = tiny.engine.manifest.limits.tokens_per_block
    assert executor.stats().context_tokens <= len(PROMPT) + 5 * 3 * tokens_per_block


# Time limits and the prefix cache -------------------------------------------------------------------------------------


def test_a_time_out_keeps_what_there_is(start: Callable[..., Executor]) -> None:
    executor = start()
    result = executor.submit(request(n=2, max_tokens=200, timeout=1e-6)).result()
    assert [o.finish_reason for o in result.outputs] == ["timeout"] * 2
    assert executor.submit(request()).result().finish_reason == "length"


def test_an_equal_prompt_finds_its_prefix_and_the_same_answer(start: Callable[..., Executor]) -> None:
    executor = start()
    first, second = (executor.submit(request()).result() for _ in range(2))
    assert first.num_cached_tokens == 0
    assert 0 < second.num_cached_tokens < len(PROMPT)
    assert second.token_ids == first.token_ids


def test_a_salt_keeps_prefixes_apart(start: Callable[..., Executor]) -> None:
    executor = start()
    salts = [{}, {"cache_salt": "a"}, {"cache_salt": "b"}, {"cache_salt": "a"}]
    results = [executor.submit(request(**salt)).result() for salt in salts]
    assert [result.num_cached_tokens > 0 for result in results] == [False, False, False, True]
    assert len({result.token_ids for result in results}) == 1


def test_without_prefix_caching_nothing_is_kept(start: Callable[..., Executor]) -> None:
    executor = start(prefix_caching=False)
    assert [executor.submit(request()).result().num_cached_tokens for _ in range(2)] == [0, 0]


@pytest.mark.parametrize(
    "options",
    [
        {"speculative": "ngram"},
        {"capacity_policy": "guaranteed_no_evict"},
        {"queue_policy": "longest_prefix"},
        {"queue_policy": "fcfs"},
        {"kv_host_memory": "16MiB"},
        {"kv_cache_memory": "1024tokens"},
    ],
    ids=str,
)
def test_no_option_changes_an_answer(start: Callable[..., Executor], options: dict[str, Any]) -> None:
    prompts = [PROMPT[i:] for i in range(0, 40, 5)]
    expected = [r.token_ids for r in start(prefix_caching=False).generate([request(p) for p in prompts])]
    executor = start(**options)
    for _ in range(2):
        assert [r.token_ids for r in executor.generate([request(p) for p in prompts])] == expected


def test_a_draft_engine_changes_no_answer(start: Callable[..., Executor], tiny: Tiny) -> None:
    expected = start().submit(request()).result().token_ids
    result = start(speculative=str(tiny.engine.path), num_speculative_tokens=3).submit(request()).result()
    assert result.token_ids == expected
    assert result.draft_acceptance == 1.0  # the engine guesses for itself


def test_memory_says_what_fits(start: Callable[..., Executor]) -> None:
    memory = start(kv_cache_memory="1024tokens").memory()
    assert memory.tokens >= 1024
    assert memory.device_bytes == sum(group.bytes_per_block * group.device_blocks for group in memory.groups)
    assert memory.sequences_at_max_len >= memory.tokens // memory.max_seq_len


def test_a_real_engine_streams_several_choices(smollm2: Engine) -> None:
    with Executor(smollm2, num_threads=2) as executor:
        sampling = SamplingParams(n=3, temperature=0.8, seed=4, max_tokens=16)
        handle = executor.submit(Request(prompt="Once upon a time", sampling=sampling))
        texts = ["", "", ""]
        for output in handle:
            texts[output.index] += output.text
        assert texts == [o.text for o in handle.result().outputs]
        assert len(set(texts)) == 3
