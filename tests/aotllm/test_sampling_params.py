from __future__ import annotations

import dataclasses

import pytest

from aotllm import SamplingParams
from aotllm.errors import InvalidRequest
from aotllm.parameters import parameters


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("max_tokens", "3"),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", None),
        ("top_k", -2),
        ("top_p", 0),
        ("top_p", 1.01),
        ("min_p", -0.5),
        ("seed", 2**64),
        ("seed", -(2**63) - 1),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", [1]),
        ("stop", ["x"] * 17),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", ["a"]),
        ("logprobs", 21),
        ("logprobs", -1),
        ("ignore_eos", 1),
    ],
)
def test_a_bad_value_is_refused_by_name(field: str, value: object):
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**{field: value})
    assert caught.value.param == field
    assert field in caught.value.message


@pytest.mark.parametrize(
    ("field", "value", "normal"),
    [
        ("temperature", 0, 0.0),
        ("top_p", 1, 1.0),
        ("top_k", -1, 0),
        ("stop", "end", ("end",)),
        ("stop", ["a", "b"], ("a", "b")),
        ("stop", None, ()),
        ("stop_token_ids", 7, (7,)),
        ("stop_token_ids", [7, 8], (7, 8)),
        ("seed", 2**64 - 1, 2**64 - 1),
        ("seed", -1, -1),
        ("max_tokens", None, None),
    ],
)
def test_values_are_normalized(field: str, value: object, normal: object):
    assert getattr(SamplingParams(**{field: value}), field) == normal


def test_the_message_says_what_was_got_and_what_is_allowed():
    with pytest.raises(InvalidRequest, match=r"top_p must be a number > 0 and ≤ 1, got 2"):
        SamplingParams(top_p=2)


def test_every_field_is_declared_with_its_meaning_and_documented():
    declared = {name for name, _, _ in parameters(SamplingParams)}
    assert declared == {field.name for field in dataclasses.fields(SamplingParams)}
    for name, _, spec in parameters(SamplingParams):
        assert f"{name}: {spec.doc}" in (SamplingParams.__doc__ or "")


def test_engine_defaults_come_from_the_generation_config():
    config = {
        "temperature": 0.6,
        "top_k": 20,
        "top_p": None,
        "max_new_tokens": 99,
        "bos_token_id": 1,
        "do_sample": True,
    }
    assert SamplingParams.from_generation_config(config) == SamplingParams(temperature=0.6, top_k=20, max_tokens=99)
