"""Requests that use all of sampling, and what is compared of their answers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from aotllm import Executor, Request, SamplingParams
from aotllm.request import RequestOutput
from aotllm.structured_outputs import StructuredOutputs
from tests.gpu.engines import random_prompt

ANSWER_TOKENS = 70
"""More than a block"""


def ask(prompt: Sequence[int], **sampling: Any) -> Request:
    fields = {"temperature": 0.0, "max_tokens": ANSWER_TOKENS, "ignore_eos": True, "logprobs": 2, **sampling}
    return Request(prompt_token_ids=list(prompt), sampling=SamplingParams(**fields))


def content(results: Iterable[RequestOutput]) -> list[Any]:
    return [[(output.token_ids, output.logprobs) for output in result.outputs] for result in results]


def rounded(answers: list[Any]) -> list[Any]:
    """Answers of which the host and the device say the same: their log-probabilities are up to 4e-9 apart."""

    def close(value: float) -> Any:
        return pytest.approx(value, abs=1e-8)

    def entry(logprobs: Any) -> Any:
        return logprobs.token_id, close(logprobs.logprob), [(token, close(value)) for token, value in logprobs.top]

    return [[(tokens, [entry(each) for each in logprobs]) for tokens, logprobs in outputs] for outputs in answers]


def listed(answers: list[Any]) -> list[Any]:
    """The same in the form that compares with `rounded`."""

    def entry(logprobs: Any) -> Any:
        return logprobs.token_id, logprobs.logprob, list(logprobs.top)

    return [[(tokens, [entry(each) for each in logprobs]) for tokens, logprobs in outputs] for outputs in answers]


SAMPLING: dict[str, dict[str, Any]] = {
    "plain": {},
    "many log-probabilities": {"logprobs": 20},
    "repetition": {"repetition_penalty": 1.3},
    "presence and frequency": {"presence_penalty": 0.7, "frequency_penalty": 0.4},
    "penalties that encourage": {"repetition_penalty": 0.8, "presence_penalty": -0.3, "frequency_penalty": -0.1},
    "bans": {"bad_words": ["a", "be", "cde"], "no_repeat_ngram_size": 2},
    "allowed tokens": {"allowed_token_ids": list(range(40, 90))},
    "an end that must wait": {"ignore_eos": False, "stop_token_ids": list(range(3, 200)), "min_tokens": 12},
    "a bias": {"logit_bias": {5: 3.0, 6: -3.0}},
    "all": {"repetition_penalty": 1.2, "frequency_penalty": 0.2, "bad_words": ["e"], "logprobs": 3, "top_k": 30},
}
DRAWN: dict[str, Any] = {"temperature": 1.0, "top_p": 0.9}


def varied_requests(return_logits: bool) -> list[Request]:
    """Greedy and drawn, with and without a grammar. Those that return logits are sampled on the host."""
    form = StructuredOutputs(regex="(a[0-9]{3}|b[0-9]+)(bc|de){2,9}f")
    free = {"bad_words": (), "no_repeat_ngram_size": 0}  # what could leave the grammar no token
    requests = []
    for i, sampling in enumerate(SAMPLING.values()):
        for j, extra in enumerate([{}, DRAWN | {"seed": i}, DRAWN | {"seed": i, "n": 2}]):
            request = ask(random_prompt(10 * i + j, 20 + 7 * i), **{**sampling, **extra})
            requests.append(dataclasses.replace(request, return_logits=return_logits))
        if "allowed_token_ids" not in sampling and "stop_token_ids" not in sampling:
            formed = ask(random_prompt(i, 30), **{**sampling, **DRAWN, "seed": i, **free})
            requests.append(dataclasses.replace(formed, structured_outputs=form, return_logits=return_logits))
    return requests


def assert_the_device_samples_as_the_host_does(executor: Executor) -> None:
    """For engines that are deterministic: their logits are the same whoever samples."""
    on_host = content(executor.generate(varied_requests(return_logits=True)))
    on_device = content(executor.generate(varied_requests(return_logits=False)))
    for request, got, want in zip(varied_requests(False), on_device, on_host, strict=True):
        assert listed([got]) == rounded([want]), request
