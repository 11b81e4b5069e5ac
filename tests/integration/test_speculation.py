"""Speculation changes no answer: the same tokens, greedy or drawn, whoever guesses and however well.

Verification draws each token with the numbers that it would have been drawn with anyway, so that drawn answers are the
same, too, and not only distributed alike; that they are distributed as they should be is tested against transformers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aotllm import Executor, Request, SamplingParams, StructuredOutputs
from aotllm.engines import Engine
from aotllm.request import RequestOutput
from aotllm.stats import ExecutorStats
from tests.integration.engines import build_engine, save_tiny_model
from tests.integration.prompts import varied_prompts
from tests.integration.test_architectures import CASES, random_prompt
from tests.integration.test_lora import save_adapter

PROMPTS = varied_prompts(200)
REPETITIVE = "one two three four five six, " * 8 + "one two"
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
DRAWN = SamplingParams(temperature=0.7, top_p=0.95, max_tokens=16, ignore_eos=True)


def run(engine: Engine, requests: Iterable[Request], **options: Any) -> tuple[list[RequestOutput], ExecutorStats]:
    """All requests at a time on a new executor, and its counters afterwards. N-grams guess as wildly as they can."""
    with Executor(engine, verify=False, **{"num_threads": 2, "ngram_min": 1, **options}) as executor:
        return executor.generate(requests), executor.stats()


def content(result: RequestOutput) -> list[Any]:
    """All that a client sees of the answers but their times: log-probabilities bit by bit."""
    return [
        (o.token_ids, o.text, o.finish_reason, o.stop_reason, o.logprobs, [row.tobytes() for row in o.logits])
        for o in result.outputs
    ] + [result.prompt_logprobs]


def check_counters(results: Sequence[RequestOutput], stats: ExecutorStats) -> None:
    """Counters of the requests are between their bounds, and add up to those of the engine."""
    outputs = [output for result in results for output in result.outputs]
    assert all(0 <= output.num_accepted_tokens <= output.num_draft_tokens for output in outputs)
    assert all(output.num_accepted_tokens < len(output.token_ids) for output in outputs)  # the first one is never one
    assert stats.counters["draft_tokens"] == sum(output.num_draft_tokens for output in outputs)
    assert stats.counters["accepted_tokens"] == sum(output.num_accepted_tokens for output in outputs)


@pytest.fixture(scope="module")
def greedy_answers(smollm2: Engine) -> list[tuple[int, ...]]:
    """Without speculation."""
    results, stats = run(smollm2, [Request(prompt=prompt, sampling=GREEDY) for prompt in PROMPTS])
    assert stats.counters["draft_tokens"] == 0
    return [result.token_ids for result in results]


@pytest.fixture(scope="module")
def short_draft(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """Has no room for most answers' ends: it stops guessing on the way."""
    return build_engine(smollm2_gguf, tmp_path_factory.mktemp("engines") / "short", max_seq_len=48)


@pytest.fixture
def guesser(request: pytest.FixtureRequest) -> str:
    """What `speculative` is set to: ngram, or the folder of the engine that the fixture of that name gives."""
    return "ngram" if request.param == "ngram" else str(request.getfixturevalue(request.param).path)


# The proof ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("guesser", ["ngram", "smollm2_int8"], indirect=True)
def test_two_hundred_greedy_answers(smollm2: Engine, greedy_answers: list[tuple[int, ...]], guesser: str) -> None:
    requests = [Request(prompt=prompt, sampling=GREEDY) for prompt in PROMPTS]
    results, stats = run(smollm2, requests, speculative=guesser)
    assert [result.token_ids for result in results] == greedy_answers
    check_counters(results, stats)
    assert 0 < stats.counters["accepted_tokens"] < stats.counters["draft_tokens"]  # right and wrong guesses


@pytest.mark.parametrize(
    "options",
    [
        {"ngram_max": 1, "num_speculative_tokens": 1},
        {"ngram_max": 1, "num_speculative_tokens": 12},
        {"ngram_min": 3, "ngram_max": 8, "num_speculative_tokens": 3},
        {"num_speculative_tokens": 64},  # more than the answers are long
        {"max_num_tokens": 7, "max_batch_size": 3},  # drafts do not always fit in a step
        {"max_chunk_tokens": 5},
        {"prefix_caching": False},
    ],
    ids=str,
)
def test_sizes_do_not_matter(smollm2: Engine, greedy_answers: list[tuple[int, ...]], options: dict[str, Any]) -> None:
    some = slice(None, None, 14)
    requests = [Request(prompt=prompt, sampling=GREEDY) for prompt in PROMPTS[some]]
    results, stats = run(smollm2, requests, speculative="ngram", **options)
    assert [result.token_ids for result in results] == greedy_answers[some]
    check_counters(results, stats)
    assert stats.counters["draft_tokens"] > 0


def test_a_draft_engine_of_shorter_sequences(
    smollm2: Engine, short_draft: Engine, greedy_answers: list[tuple[int, ...]]
) -> None:
    some = slice(None, None, 14)
    requests = [Request(prompt=prompt, sampling=GREEDY) for prompt in PROMPTS[some]]
    results, stats = run(smollm2, requests, speculative=str(short_draft.path))
    assert [result.token_ids for result in results] == greedy_answers[some]
    check_counters(results, stats)
    assert stats.counters["draft_tokens"] > 0
    for result in results:
        # A draft is made for a place below the draft engine's 48, and none is made twice.
        assert result.outputs[0].num_draft_tokens <= 4 * max(0, 48 - result.num_prompt_tokens)


# Whatever a request asks for ------------------------------------------------------------------------------------------

NAME_AND_AGE = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "ages": {"type": "array", "items": {"enum": [1, 23]}}},
    "required": ["name", "ages"],
}


def asking_for_everything(newline: int) -> list[Request]:
    """Requests of all kinds, with prompts that n-grams hit in; all of them run together."""
    seeded = [DRAWN.replace(seed=seed) for seed in range(1, 50)]
    samplings = [
        *seeded[:16],
        seeded[16].replace(temperature=2.0),
        seeded[17].replace(top_k=3, min_p=0.1),
        seeded[18].replace(n=4),
        seeded[19].replace(n=2, best_of=4),
        GREEDY.replace(n=3),
        GREEDY.replace(logprobs=3),
        seeded[20].replace(logprobs=0, n=2),
        GREEDY.replace(prompt_logprobs=1),
        seeded[21].replace(prompt_logprobs=0, logprobs=1),
        GREEDY.replace(stop_token_ids=(newline,), max_tokens=32),
        seeded[22].replace(stop_token_ids=(newline,), max_tokens=32),
        GREEDY.replace(stop=("four", "ll"), max_tokens=32),
        GREEDY.replace(ignore_eos=False, min_tokens=4),
        GREEDY.replace(repetition_penalty=1.3),
        seeded[23].replace(presence_penalty=0.8, frequency_penalty=0.5),
        GREEDY.replace(frequency_penalty=-0.5, no_repeat_ngram_size=5),
        GREEDY.replace(bad_words=("three", "the")),
        GREEDY.replace(logit_bias={newline: 4.0}, max_tokens=1),
        GREEDY.replace(max_tokens=2),
    ]
    requests = [
        Request(prompt=REPETITIVE if i % 3 == 0 else PROMPTS[i], sampling=sampling)
        for i, sampling in enumerate(samplings)
    ]
    form = StructuredOutputs(json=NAME_AND_AGE)
    for sampling in (GREEDY, seeded[24]):
        sampling = sampling.replace(max_tokens=40, ignore_eos=False)
        requests.append(Request(prompt=PROMPTS[1], sampling=sampling, structured_outputs=form))
    return [*requests, Request(prompt=REPETITIVE, sampling=GREEDY, return_logits=True)]


@pytest.fixture(scope="module")
def everything(smollm2: Engine) -> tuple[list[Request], list[list[Any]]]:
    """Requests of all kinds with their answers without speculation."""
    (newline,) = smollm2.tokenizer().encode("\n", add_special_tokens=False)
    requests = asking_for_everything(newline)
    return requests, [content(result) for result in run(smollm2, requests)[0]]


@pytest.mark.parametrize("guesser", ["ngram", "smollm2_int8"], indirect=True)
def test_all_that_a_request_may_ask_for(
    smollm2: Engine, everything: tuple[list[Request], list[list[Any]]], guesser: str
) -> None:
    requests, expected = everything
    results, stats = run(smollm2, requests, speculative=guesser)
    for request, result, content_expected in zip(requests, results, expected, strict=True):
        assert content(result) == content_expected, request
    assert 0 < stats.counters["accepted_tokens"] <= stats.counters["draft_tokens"]


@pytest.mark.parametrize("guesser", ["ngram", "smollm2_int8"], indirect=True)
def test_preemption(smollm2: Engine, guesser: str) -> None:
    samplings = [GREEDY, DRAWN.replace(seed=1, n=2, logprobs=1), GREEDY.replace(logprobs=0), DRAWN.replace(seed=2)]
    requests = [
        Request(prompt=prompt, sampling=sampling.replace(max_tokens=40))
        for prompt, sampling in zip(PROMPTS[2:6], samplings, strict=True)
    ]
    expected, _ = run(smollm2, requests)
    for _ in range(5):  # on a busy machine they may come one after the other
        # The longest sequence alone needs eight blocks.
        results, stats = run(smollm2, requests, speculative=guesser, num_speculative_tokens=6, num_kv_blocks=12)
        assert [content(result) for result in results] == [content(result) for result in expected]
        if stats.preemptions > 0:
            return
    pytest.fail("nobody was preempted")
    check_counters(results, stats)


def test_repetitive_text_takes_fewer_steps(smollm2: Engine) -> None:
    request = Request(prompt=REPETITIVE, sampling=GREEDY.replace(max_tokens=40))
    (plain,), without = run(smollm2, [request])
    (result,), stats = run(smollm2, [request], speculative="ngram")
    check_counters([result], stats)
    output = result.outputs[0]
    assert result.token_ids == plain.token_ids
    # A step samples one token, and one more for each guess that was right.
    assert without.steps - stats.steps == output.num_accepted_tokens > 20
    assert result.draft_acceptance == output.num_accepted_tokens / output.num_draft_tokens


# On random models: adapters, and the distribution ---------------------------------------------------------------------


class Tiny:
    """Two random models of the same tokens: one that answers and one that guesses."""

    def __init__(self, folder: Path) -> None:
        model_class, parameters = CASES["llama"]
        self.reference = save_tiny_model(folder / "model", model_class, parameters)
        self.engine = build_engine(folder / "model", folder / "engine", max_seq_len=128)
        save_tiny_model(folder / "draft_model", model_class, {**parameters, "num_hidden_layers": 2})
        self.draft = build_engine(folder / "draft_model", folder / "draft", max_seq_len=128)
        self.adapter = folder / "adapter"
        self.reference = save_adapter(self.adapter, self.reference, seed=1, r=8, lora_alpha=16).unload()

    def guesser(self, name: str) -> str:
        return {"ngram": "ngram", "self": str(self.engine.path), "other": str(self.draft.path)}[name]

    def probabilities(self, rows: Sequence[Sequence[int]]) -> np.ndarray:
        """Of the token behind each of `rows`, which are equally long, `[rows, vocab]`."""
        import torch

        with torch.no_grad():
            logits = self.reference(torch.tensor([list(row) for row in rows])).logits[:, -1]
            probabilities: np.ndarray = torch.softmax(logits.double(), dim=-1).numpy()
        return probabilities


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return Tiny(tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize("guesser", ["ngram", "self", "other"])
def test_adapters(tiny: Tiny, guesser: str) -> None:
    period = random_prompt(3, 6)
    requests = [
        Request(
            prompt_token_ids=[*period * 3, seed],
            adapter="a" if seed % 2 else None,
            sampling=SamplingParams(temperature=float(seed % 3), seed=seed, max_tokens=24, ignore_eos=True),
        )
        for seed in range(3, 15)
    ]

    def answers(**options: Any) -> tuple[list[RequestOutput], ExecutorStats]:
        with Executor(tiny.engine, num_threads=2, ngram_min=1, **options) as executor:
            executor.load_lora("a", tiny.adapter)
            return executor.generate(requests), executor.stats()

    expected, _ = answers()
    results, stats = answers(speculative=tiny.guesser(guesser))
    assert [result.token_ids for result in results] == [result.token_ids for result in expected]
    check_counters(results, stats)
    assert stats.counters["accepted_tokens"] > 0


def expected_counts(tiny: Tiny, prompt: list[int], top_k: int, length: int, draws: int) -> dict[tuple[int, ...], float]:
    """How often each answer is expected when every token is one of its `top_k` most likely ones."""
    expected: dict[tuple[int, ...], float] = {(): float(draws)}
    for _ in range(length):
        rows = tiny.probabilities([[*prompt, *answer] for answer in expected])
        longer = {}
        for (answer, count), row in zip(expected.items(), rows, strict=True):
            best = np.argsort(row)[-top_k:]
            for token in best:
                longer[(*answer, int(token))] = count * float(row[token] / row[best].sum())
        expected = longer
    return expected


@pytest.mark.parametrize("guesser", ["ngram", "self", "other"])
def test_drawn_answers_are_distributed_as_the_model_says(tiny: Tiny, guesser: str) -> None:
    top_k, length, seeds, n = 3, 4, 32, 128
    prompt = random_prompt(2, 6) * 3
    sampling = SamplingParams(temperature=1.0, top_k=top_k, max_tokens=length + 2, n=n, ignore_eos=True)
    requests = [Request(prompt_token_ids=prompt, sampling=sampling.replace(seed=seed)) for seed in range(seeds)]
    results, stats = run(tiny.engine, requests, speculative=tiny.guesser(guesser), num_speculative_tokens=3)
    check_counters(results, stats)
    assert stats.counters["accepted_tokens"] < stats.counters["draft_tokens"]
    assert stats.counters["accepted_tokens"] > 0 or guesser == "other"  # which is always wrong here

    expected = expected_counts(tiny, prompt, top_k, length, draws=seeds * n)
    drawn = Counter(output.token_ids[:length] for result in results for output in result.outputs)
    assert drawn.keys() <= expected.keys()
    bound = chi_square_bound(len(expected) - 1)
    assert chi_square(drawn, expected) < bound
    assert chi_square(drawn, dict.fromkeys(expected, seeds * n / len(expected))) > bound  # it tells them apart


def chi_square(drawn: Counter[tuple[int, ...]], expected: dict[tuple[int, ...], float]) -> float:
    """Pearson's statistic; answers expected fewer than five times count as one."""
    rare = [answer for answer, count in expected.items() if count < 5]
    pairs = [(drawn[answer], count) for answer, count in expected.items() if count >= 5]
    if rare:
        pairs.append((sum(drawn[answer] for answer in rare), sum(expected[answer] for answer in rare)))
    return sum((got - wanted) ** 2 / wanted for got, wanted in pairs)


def chi_square_bound(degrees: int) -> float:
    """Exceeded by chance once in 30,000 times (Wilson and Hilferty's cube root of a normal variable, at 4 sigma)."""
    return float(degrees * (1 - 2 / (9 * degrees) + 4 * (2 / (9 * degrees)) ** 0.5) ** 3)
