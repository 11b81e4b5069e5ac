"""Records: what JSON they take, and what they say of the rest."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from aotllm.engines.record import Record, RecordError


@dataclass(frozen=True)
class Part(Record):
    size: int


@dataclass(frozen=True)
class Whole(Record):
    POSITIVE: ClassVar = frozenset({"count"})

    name: str
    count: int
    ids: tuple[int, ...]
    parts: dict[str, Part]
    note: str | None
    version: int = 1


GOOD: dict[str, Any] = {"name": "n", "count": 2, "ids": [1, 2], "parts": {"a": {"size": 3}}, "note": None}


def test_what_is_written_is_read():
    whole = Whole.model_validate(GOOD)
    assert whole == Whole("n", 2, (1, 2), {"a": Part(3)}, None, 1)
    record = whole.model_dump(mode="json")
    assert record == {**GOOD, "version": 1}
    assert Whole.model_validate(json.loads(json.dumps(record))) == whole
    assert whole.model_copy(update={"count": 5}).count == 5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": 5}, "name: expected a string, got 5"),
        ({"count": "2"}, "count: expected an integer, got '2'"),
        ({"count": True}, "count: expected an integer, got True"),
        ({"count": 2.0}, "count: expected an integer, got 2.0"),
        ({"count": 0}, "count: expected an integer above 0, got 0"),
        ({"ids": 1}, "ids: expected a list, got 1"),
        ({"ids": [1, None]}, "ids.1: expected an integer, got None"),
        ({"parts": []}, r"parts: expected an object, got \[\]"),
        ({"parts": {"a": 1}}, "parts.a: expected an object, got 1"),
        ({"parts": {"a": {}}}, "parts.a.size: is missing"),
        ({"note": 1}, "note: expected a string, got 1"),
        ({"extra": 1}, "extra: no such field is known"),
    ],
)
def test_what_is_wrong_is_named(change: dict[str, Any], message: str):
    with pytest.raises(RecordError, match=f"^{message}$"):
        Whole.model_validate({**GOOD, **change})


@pytest.mark.parametrize("name", GOOD)
def test_no_field_may_be_missing(name: str):
    with pytest.raises(RecordError, match=f"{name}: is missing"):
        Whole.model_validate({key: value for key, value in GOOD.items() if key != name})


@pytest.mark.parametrize("value", [None, [], "x", 3])
def test_a_record_is_an_object(value: Any):
    with pytest.raises(RecordError, match="whole: expected an object"):
        Whole.model_validate(value)
