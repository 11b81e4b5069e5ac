"""What can be seen to be wrong with a form before anything is compiled."""

from __future__ import annotations

import json
from typing import Any

import pytest

from aotllm.errors import InvalidRequest
from aotllm.structured_outputs import MAX_CHOICES, MAX_GRAMMAR_BYTES, StructuredOutputs
from tests.aotllm.grammar_oracle import form


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    ("given", "param", "says"),
    [
        ({}, "structured_outputs", "exactly one of json, json_object, regex, choice, grammar, got none"),
        ({"json": {}, "regex": "a"}, "structured_outputs", "got json and regex"),
        ({"json": False, "choice": ["a"]}, "structured_outputs", "got json and choice"),
        ({"json_object": "yes"}, "structured_outputs.json_object", "must be a boolean"),
        ({"regex": ""}, "structured_outputs.regex", "not empty"),
        ({"regex": 3}, "structured_outputs.regex", "must be a string"),
        ({"grammar": ""}, "structured_outputs.grammar", "not empty"),
        ({"choice": []}, "structured_outputs.choice", "at least one"),
        ({"choice": "yes"}, "structured_outputs.choice", "must be a list"),
        ({"choice": [""]}, "structured_outputs.choice", "not empty"),
        ({"choice": [1]}, "structured_outputs.choice", "must hold strings"),
        ({"choice": ["a"] * (MAX_CHOICES + 1)}, "structured_outputs.choice", "at most"),
        ({"regex": "a", "param": "guided_regex", "choice": ["a"]}, "guided_regex", "got regex and choice"),
    ],
)
def test_refused_when_made(given: dict[str, Any], param: str, says: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        form(**given)
    assert refused.value.param == param
    assert says in refused.value.message


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"json": "{"}, "is not JSON"),
        ({"json": 5}, "must be a JSON schema"),
        ({"json": [1]}, "must be a JSON schema"),
        ({"json": {"const": {1, 2}}}, "is not JSON"),
        ({"json": {"const": float("nan")}}, "is not JSON"),
        ({"json": nested(10_000)}, "nested too deeply"),
        ({"json": "[" * 10_000}, "nested too deeply"),
        ({"json": {"const": "x" * MAX_GRAMMAR_BYTES}}, "at most"),
        ({"json": '"' + "x" * MAX_GRAMMAR_BYTES + '"'}, "at most"),
        ({"json": {"const": "\ud800"}}, "surrogate"),
        ({"regex": "a" * (MAX_GRAMMAR_BYTES + 1)}, "at most"),
        ({"regex": "a\0"}, "NUL"),
        ({"regex": "\ud800"}, "surrogate"),
        ({"grammar": "no rules at all"}, "has no start"),
        ({"grammar": 'root ::= "a'}, "cannot be read as GBNF"),
        ({"grammar": "root ::= " + "(" * 10_000}, "grammar"),
        ({"grammar": 'start: "a"' + " " * MAX_GRAMMAR_BYTES}, "at most"),
    ],
)
def test_refused_when_translated(given: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        form(**given).to_grammar()
    assert refused.value.param == f"structured_outputs.{next(iter(given))}"
    assert says in refused.value.message
    assert len(refused.value.message) < 500


def test_a_schema_keeps_its_order_and_its_own_spacing() -> None:
    schema = {"x-guidance": {"whitespace_flexible": False}, "properties": {"z": {}, "a": {}}}
    assert json.loads(StructuredOutputs(json=schema).to_grammar().text) == schema
    assert list(json.loads(StructuredOutputs(json=json.dumps(schema)).to_grammar().text)["properties"]) == ["z", "a"]


@pytest.mark.parametrize(
    ("regex", "text"),
    [
        (r"\d", "[0-9]"),
        (r"\\d", r"\\d"),
        (r"[\w-]\D", r"[[0-9A-Za-z_]-]\D"),
        (r"\\\d", r"\\[0-9]"),
        ("a\\", "a\\"),
    ],
)
def test_classes_are_ascii(regex: str, text: str) -> None:
    assert StructuredOutputs(regex=regex).to_grammar().text == text
