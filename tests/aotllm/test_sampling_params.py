from __future__ import annotations

import dataclasses
import pickle

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
        ("temperature", 10**400),
        ("typical_p", 0),
        ("typical_p", 1.1),
        ("typical_p", float("nan")),
        ("repetition_penalty", 0),
        ("repetition_penalty", -1),
        ("repetition_penalty", float("inf")),
        ("presence_penalty", 2.1),
        ("presence_penalty", float("nan")),
        ("frequency_penalty", -2.1),
        ("no_repeat_ngram_size", -1),
        ("no_repeat_ngram_size", 2.0),
        ("logit_bias", {1: 100.5}),
        ("logit_bias", {1: float("nan")}),
        ("logit_bias", {1: "a"}),
        ("logit_bias", {1: None}),
        ("logit_bias", {"a": 1}),
        ("logit_bias", {"": 1}),
        ("logit_bias", {"²": 1}),
        ("logit_bias", {-1: 1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {True: 1}),
        ("logit_bias", {1.0: 1}),
        ("logit_bias", {2**31: 1}),
        ("logit_bias", [1, 2]),
        ("logit_bias", "12"),
        ("logit_bias", 3),
        ("logit_bias", dict.fromkeys(range(1025), 1)),
        ("allowed_token_ids", []),
        ("allowed_token_ids", 1.5),
        ("stop", object()),
        ("stop", ["\ud800"]),
        ("stop_token_ids", float("nan")),
        ("bad_words", 1j),
        ("allowed_token_ids", [-1]),
        ("allowed_token_ids", ["1"]),
        ("bad_words", [""]),
        ("bad_words", [3]),
        ("bad_words", ["x"] * 257),
        ("min_tokens", -1),
        ("min_tokens", 1.5),
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
        ("logit_bias", {7: 1, 3: -0.5}, ((3, -0.5), (7, 1.0))),
        ("logit_bias", {"7": 1, "03": -0.5}, ((3, -0.5), (7, 1.0))),  # JSON has no other keys
        ("logit_bias", [(7, 1), (3, -0.5)], ((3, -0.5), (7, 1.0))),
        ("logit_bias", {}, ()),
        ("logit_bias", None, ()),
        ("allowed_token_ids", None, None),
        ("allowed_token_ids", [2, 1], (2, 1)),
        ("allowed_token_ids", 5, (5,)),
        ("bad_words", "no", ("no",)),
        ("bad_words", None, ()),
        ("repetition_penalty", 2, 2.0),
    ],
)
def test_values_are_normalized(field: str, value: object, normal: object):
    assert getattr(SamplingParams(**{field: value}), field) == normal


def test_the_message_says_what_was_got_and_what_is_allowed():
    with pytest.raises(InvalidRequest, match=r"top_p must be a number > 0 and ≤ 1, got 2"):
        SamplingParams(top_p=2)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"logit_bias": {"5": 101}}, r"logit_bias must be .*from an integer ≥ 0.*to a number ≥ -100.*got \{5: 101\}"),
        ({"logit_bias": {"x": 1}}, r"got \{'x': 1\}"),
        ({"allowed_token_ids": []}, r"allowed_token_ids has 0 elements; at least 1"),
        ({"max_tokens": 4, "min_tokens": 5}, r"min_tokens must be at most max_tokens, which is 4, got 5"),
    ],
)
def test_messages_about_several_values(given: dict[str, object], message: str):
    with pytest.raises(InvalidRequest, match=message):
        SamplingParams(**given)


def test_min_tokens_may_be_all_and_more_than_an_unknown_maximum():
    assert SamplingParams(max_tokens=4, min_tokens=4).min_tokens == 4
    assert SamplingParams(min_tokens=10**6).max_tokens is None


def test_mappings_are_plain_values():
    params = SamplingParams(logit_bias={3: 1.0}, bad_words=["a"])
    assert params.replace(top_k=1).logit_bias == params.logit_bias
    assert pickle.loads(pickle.dumps(params)) == params
    assert hash(params) == hash(params.replace())
    assert dict(params.logit_bias) == {3: 1.0}


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
        "typical_p": 0.9,
        "repetition_penalty": 1.1,
        "no_repeat_ngram_size": 3,
        "bos_token_id": 1,
        "do_sample": True,
    }
    assert SamplingParams.from_generation_config(config) == SamplingParams(
        temperature=0.6, top_k=20, max_tokens=99, typical_p=0.9, repetition_penalty=1.1, no_repeat_ngram_size=3
    )
