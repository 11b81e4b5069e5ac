"""Sampling on a running engine against the logits processors of transformers, and the same answers in any batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from aotllm import _runtime
from aotllm.engines import Engine
from tests.integration.engines import build_engine, save_tiny_model
from tests.integration.test_architectures import BASE, VOCAB

EOS = 2
NEW_TOKENS = 24
PROMPT = np.random.default_rng(1).integers(3, VOCAB, 30).tolist()

CASES: dict[str, dict[str, Any]] = {
    "repetition_penalty": {"repetition_penalty": 1.8},
    "no_repeat_ngram_size 1": {"no_repeat_ngram_size": 1},
    "no_repeat_ngram_size 2": {"no_repeat_ngram_size": 2, "repetition_penalty": 0.5},
    "bad_words": {"bad_words": [[5], *([odd, even] for odd in range(1, VOCAB, 2) for even in range(0, VOCAB, 2))]},
    "min_tokens": {"min_tokens": 5, "ignore_eos": False, "logit_bias": {EOS: 100.0}},
    "logit_bias": {"logit_bias": {4: 3.0, 5: -2.0}, "repetition_penalty": 1.2},
    "all": {"repetition_penalty": 0.7, "no_repeat_ngram_size": 3, "bad_words": [[5]], "logit_bias": {4: 2.0}},
}
FILTERS: dict[str, dict[str, Any]] = {
    "typical_p": {"typical_p": 0.5},
    "typical_p, hot": {"typical_p": 0.2, "temperature": 2.0},
    "top_k, top_p, typical_p": {"top_k": 20, "top_p": 0.8, "typical_p": 0.6, "temperature": 1.5},
    "min_p": {"min_p": 0.2, "repetition_penalty": 1.5},
}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder = tmp_path_factory.mktemp("sampling")
    save_tiny_model(folder / "model", "LlamaForCausalLM", BASE)
    return build_engine(folder / "model", folder / "engine", max_seq_len=128)


def answer_all(engine: Engine, samplings: list[dict[str, Any]], **config: int) -> list[list[_runtime.Response]]:
    """The responses to PROMPT under each of `samplings`, all in flight together."""
    settings = _runtime.ManagerConfig()
    settings.eos_token_ids = [EOS]
    for name, value in config.items():
        setattr(settings, name, value)
    manager = _runtime.GptManager(str(engine.rank_file()), settings)
    responses: dict[int, list[_runtime.Response]] = {}
    for sampling in samplings:
        request = _runtime.Request()
        request.prompt_token_ids = PROMPT
        request.return_logits = True
        params = _runtime.SamplingParams()
        for name, value in ({"max_tokens": NEW_TOKENS, "ignore_eos": True} | sampling).items():
            setattr(params, name, value)
        request.sampling = params
        responses[manager.submit(request)] = []
    while not all(parts and parts[-1].finish_reason for parts in responses.values()):
        polled = manager.poll(60.0)
        assert polled, "no response within a minute"
        for response in polled:
            assert response.error_message is None
            responses[response.request_id].append(response)
    manager.shutdown()
    return list(responses.values())


def tokens_of(responses: list[_runtime.Response]) -> list[int]:
    return [token for response in responses for token in response.token_ids]


def reference(sampling: dict[str, Any]) -> Callable[[list[int], np.ndarray], np.ndarray]:
    """(text, raw logits) -> the logits that transformers draws from."""
    import torch
    from transformers.generation import logits_process as hf

    steps: list[Any] = []
    if "logit_bias" in sampling:
        steps.append(hf.SequenceBiasLogitsProcessor({(t,): float(b) for t, b in sampling["logit_bias"].items()}))
    if "bad_words" in sampling:
        steps.append(hf.NoBadWordsLogitsProcessor(sampling["bad_words"]))
    if "no_repeat_ngram_size" in sampling:
        steps.append(hf.NoRepeatNGramLogitsProcessor(sampling["no_repeat_ngram_size"]))
    if "min_tokens" in sampling:
        steps.append(hf.MinNewTokensLengthLogitsProcessor(len(PROMPT), sampling["min_tokens"], EOS))
    if "repetition_penalty" in sampling:
        steps.append(hf.RepetitionPenaltyLogitsProcessor(sampling["repetition_penalty"]))
    if sampling.get("temperature"):
        steps.append(hf.TemperatureLogitsWarper(sampling["temperature"]))
    for name, warper in {
        "min_p": hf.MinPLogitsWarper,
        "top_k": hf.TopKLogitsWarper,
        "top_p": hf.TopPLogitsWarper,
        "typical_p": hf.TypicalLogitsWarper,
    }.items():
        if name in sampling:
            steps.append(warper(sampling[name]))

    def processed(text: list[int], logits: np.ndarray) -> np.ndarray:
        row = torch.tensor(logits)[None]
        for step in steps:
            row = step(torch.tensor([text]), row)
        return row[0].numpy()

    return processed


@pytest.mark.parametrize("case", CASES)
def test_greedy_answers_are_those_of_the_processors_of_transformers(engine: Engine, case: str) -> None:
    sampling = {"temperature": 0.0, **CASES[case]}
    (responses,) = answer_all(engine, [sampling])
    processed, text, changed = reference(sampling), list(PROMPT), 0
    for response in responses:
        (token,), (logits,) = response.token_ids, response.logits
        assert token == processed(text, logits).argmax()
        changed += token != logits.argmax()
        text.append(token)
    assert changed > 0  # the case says something
    if "min_tokens" in sampling:
        assert text[len(PROMPT) :].index(EOS) == sampling["min_tokens"]


@pytest.mark.parametrize("case", FILTERS)
def test_draws_are_among_what_the_filters_of_transformers_leave(engine: Engine, case: str) -> None:
    sampling = FILTERS[case]
    processed, seen = reference(sampling), set()
    for responses in answer_all(engine, [sampling | {"seed": seed} for seed in range(4)]):
        text = list(PROMPT)
        for response in responses:
            (token,), (logits,) = response.token_ids, response.logits
            left = processed(text, logits)
            assert left[token] > -np.inf
            seen.add((token, int((left > -np.inf).sum())))
            text.append(token)
    assert len(seen) > 20  # the filters leave a choice


@pytest.mark.parametrize("config", [{"max_batch_size": 3}, {"max_chunk_tokens": 7}, {"num_kv_blocks": 12}], ids=str)
def test_seeds_reproduce_whatever_else_runs(engine: Engine, config: dict[str, int]) -> None:
    samplings = [case | {"seed": seed} for seed, case in enumerate((*CASES.values(), *FILTERS.values()))]
    alone = [tokens_of(answer_all(engine, [sampling])[0]) for sampling in samplings]
    assert len(set(map(tuple, alone))) == len(alone)
    assert [tokens_of(parts) for parts in answer_all(engine, samplings, **config)] == alone
