"""Constrained answers of a real model: valid, whatever is in the batch, and no concern of the others in it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import numpy as np
import pytest

from aotllm import Executor, Request, SamplingParams
from aotllm.engines import Engine
from aotllm.errors import InvalidRequest
from aotllm.grammars import Grammars
from aotllm.request import RequestOutput
from aotllm.structured_outputs import StructuredOutputs

NAMES = ("person", "city", "order", "book", "animal", "recipe", "team", "event", "song", "ship")

FREE_PROMPTS = [f"Tell me something about a {name}." for name in NAMES]


def schema(index: int) -> dict[str, Any]:
    """Fifty different schemas, every kind of value among them; all answers are bounded."""
    word = {"type": "string", "maxLength": 12}
    kinds: list[dict[str, Any]] = [
        {"type": "integer", "minimum": -index, "maximum": 10 * index},
        {"enum": [f"{name}-{index}" for name in NAMES[:3]]},
        {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 1 + index % 4},
        {"anyOf": [{"type": "null"}, {"type": "string", "pattern": "^[A-Z]{2}[0-9]{2}$"}]},
        {"type": "object", "properties": {"note": word}, "required": ["note"], "additionalProperties": False},
        {"type": "string", "format": "date"},
        {"const": {"version": index, "text": "fixed \u00e9\n"}},
    ]
    fields = [kinds[(index + shift) % len(kinds)] for shift in range(1 + index % 3)]
    return {
        "type": "object",
        "properties": {"kind": {"const": NAMES[index % len(NAMES)]}}
        | {f"field_{i}": value for i, value in enumerate(fields)},
        "required": ["kind", *(f"field_{i}" for i in range(len(fields)))],
        "additionalProperties": False,
    }


def ask(prompt: str, form: StructuredOutputs | None, max_tokens: int, temperature: float = 0.0) -> Request:
    sampling = SamplingParams(temperature=temperature, seed=11, max_tokens=max_tokens)
    return Request(messages=[{"role": "user", "content": prompt}], sampling=sampling, structured_outputs=form)


@pytest.fixture(scope="module")
def executor(smollm2: Engine) -> Iterator[Executor]:
    with Executor(smollm2, num_threads=2) as executor:
        yield executor


def result_of(executor: Executor, request: Request) -> RequestOutput:
    return executor.submit(request).result()


def test_fifty_schemas_beside_free_answers(executor: Executor) -> None:
    constrained = [
        ask(f"Describe a {NAMES[i % 10]} as JSON.", StructuredOutputs(json=schema(i)), 400, temperature=i % 2)
        for i in range(50)
    ]
    free = [ask(prompt, None, 24, temperature=i % 2) for i, prompt in enumerate(FREE_PROMPTS)]
    alone = [result_of(executor, request) for request in free]
    handles = []
    for i, request in enumerate(constrained):
        handles.append(executor.submit(request))
        if i % 5 == 0:
            handles.append(executor.submit(free[i // 5]))
    results = [handle.result() for handle in handles]
    together = [result for i, result in enumerate(results) if i % 6 == 1]
    answers = [result for i, result in enumerate(results) if i % 6 != 1]

    assert [result.token_ids for result in together] == [result.token_ids for result in alone]
    assert [result.text for result in together] == [result.text for result in alone]
    for i, answer in enumerate(answers):
        assert answer.finish_reason == "stop", (i, answer.text)
        jsonschema.validate(json.loads(answer.text), schema(i))


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        (StructuredOutputs(regex=r"\d{3}-\d{4}"), r"[0-9]{3}-[0-9]{4}"),
        (StructuredOutputs(choice=["yes", "no", "perhaps not"]), "yes|no|perhaps not"),
        (StructuredOutputs(grammar='start: "<b>" /[a-z]{1,20}/ "</b>"'), "<b>[a-z]{1,20}</b>"),
        (StructuredOutputs(grammar='root ::= [0-9] ("," [0-9]) ("," [0-9])'), "[0-9],[0-9],[0-9]"),
        (StructuredOutputs(regex="[é日🎉]{4}"), "[é日🎉]{4}"),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 2.0])
def test_other_grammars(executor: Executor, form: StructuredOutputs, pattern: str, temperature: float) -> None:
    answer = result_of(executor, ask("Say something.", form, 200, temperature))
    assert answer.finish_reason == "stop"
    assert re.fullmatch(pattern, answer.text)


def test_streams_and_logprobs_go_on_as_ever(executor: Executor) -> None:
    form = StructuredOutputs(json={"type": "array", "items": {"type": "integer"}, "minItems": 3, "maxItems": 3})
    sampling = SamplingParams(temperature=0, max_tokens=100, logprobs=2)
    request = Request(prompt="Three numbers: ", sampling=sampling, structured_outputs=form)
    handle = executor.submit(request)
    pieces = list(handle)
    result = handle.result()
    assert "".join(piece.text for piece in pieces) == result.text
    assert len(json.loads(result.text)) == 3
    assert len(result.logprobs) == len(result.token_ids)


def test_one_that_does_not_compile_has_no_effect(executor: Executor) -> None:
    before = executor.stats()
    for form in (StructuredOutputs(json={"type": 5}), StructuredOutputs(regex="(?=a)")):
        with pytest.raises(InvalidRequest):
            executor.submit(ask("x", form, 5))
    after = executor.stats()
    assert (after.finished, after.queued, after.running) == (before.finished, 0, 0)
    assert result_of(executor, ask("x", StructuredOutputs(regex="ok"), 5)).text == "ok"


def test_one_that_fails_on_the_way_ends_alone(executor: Executor) -> None:
    other = ask(FREE_PROMPTS[0], None, 24)
    alone = result_of(executor, other)
    failing = executor.submit(ask("x", StructuredOutputs(regex="(a{1000}){1000}"), 50))
    beside = executor.submit(other)
    with pytest.raises(Exception, match="grammar of structured_outputs.regex"):
        failing.result()
    assert beside.result().token_ids == alone.token_ids


@pytest.fixture(scope="module")
def grammars(executor: Executor) -> Grammars:
    """Over the real vocabulary."""
    return Grammars(executor.tokenizer, executor.engine.manifest.eos_token_ids, executor._manager.vocab_size)


def test_random_walks_over_allowed_tokens_are_valid(executor: Executor, grammars: Grammars) -> None:
    """The grammar alone, without the model's taste."""
    vocab_size = executor._manager.vocab_size
    rng = np.random.default_rng(3)
    for i in range(20):
        state = grammars.compile(StructuredOutputs(json=schema(i))).clone()
        tokens: list[int] = []
        while not state.finished:
            forced = state.take_forced(int(rng.integers(0, 8)))
            tokens += forced
            if state.finished:
                break
            bits = np.unpackbits(state.mask(vocab_size).view(np.uint8), bitorder="little")
            token = int(rng.choice(np.flatnonzero(bits)))
            if token in executor.engine.manifest.eos_token_ids:
                break
            state.accept(token)
            tokens.append(token)
        text = executor.tokenizer.decode(tokens, skip_special_tokens=False)
        jsonschema.validate(json.loads(text), schema(i))


def test_forced_tokens_are_mostly_those_of_the_tokenizer(executor: Executor, grammars: Grammars) -> None:
    tokenizer = executor.tokenizer
    keys = ["name", "order_id", "customerAddress", "total", "is_active", "created_at", "phoneNumber", "latitude"]
    texts = [f'"{key}": ' for key in keys] + [f'{{"{key}":' for key in keys] + ["The quick brown fox, isn't it?"]
    canonical = 0
    for text in texts:
        forced = grammars.compile(StructuredOutputs(choice=[text])).clone().take_forced(100)
        assert tokenizer.decode(forced) == text
        canonical += forced == tokenizer.encode(text, add_special_tokens=False)
    assert canonical >= 0.9 * len(texts)
