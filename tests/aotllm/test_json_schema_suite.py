"""The official JSON-Schema-Test-Suite: valid instances can be generated, invalid ones cannot.

`python -m tests.aotllm.test_json_schema_suite` writes known.json anew, after an update of llguidance, say.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from aotllm.errors import InvalidRequest
from aotllm.grammars import Grammars
from tests.aotllm.grammar_oracle import accepts, byte_grammars, form

SUITE = Path(__file__).parent.parent / "data" / "json_schema_test_suite"
KNOWN = SUITE / "known.json"
FILES = sorted(path.stem for path in SUITE.glob("*.json") if path != KNOWN)

MAX_ORDERS = 200


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return byte_grammars()


def orders(value: Any) -> Iterator[Any]:
    """`value` with the properties of its objects in every order: the grammar has one, the standard none."""
    if isinstance(value, dict):
        for keys in itertools.permutations(value):
            for values in itertools.product(*(list(orders(value[key])) for key in keys)):
                yield dict(zip(keys, values, strict=True))
    elif isinstance(value, list):
        yield from map(list, itertools.product(*(list(orders(element)) for element in value)))
    else:
        yield value


def differences(file: str, grammars: Grammars) -> dict[str, Any]:
    """Group -> "refused", or test -> "accepted" | "rejected" where that is not what the suite says."""
    found: dict[str, Any] = {}
    for group in json.loads((SUITE / f"{file}.json").read_text(encoding="utf-8")):
        try:
            start = grammars.compile(form(json=group["schema"]))
        except InvalidRequest:
            found[group["description"]] = "refused"
            continue
        wrong = {}
        for test in group["tests"]:
            texts = (json.dumps(v, ensure_ascii=False) for v in itertools.islice(orders(test["data"]), MAX_ORDERS))
            accepted = any(accepts(start, text) for text in texts)
            if accepted != test["valid"]:
                wrong[test["description"]] = "accepted" if accepted else "rejected"
        if wrong:
            found[group["description"]] = wrong
    return found


@pytest.mark.parametrize("file", FILES)
def test_agrees_with_the_suite(file: str, grammars: Grammars) -> None:
    assert differences(file, grammars) == json.loads(KNOWN.read_text(encoding="utf-8")).get(file, {})


def test_most_of_the_suite_counts() -> None:
    """The list of exceptions does not swallow what it is an exception to."""
    known = json.loads(KNOWN.read_text(encoding="utf-8"))
    groups = sum(len(json.loads((SUITE / f"{file}.json").read_text(encoding="utf-8"))) for file in FILES)
    refused = sum(difference == "refused" for file in known.values() for difference in file.values())
    accepted = [
        test
        for name, file in known.items()
        for difference in file.values()
        if difference != "refused" and not name.startswith("format-")  # leap years and Punycode are beyond a grammar
        for test, verdict in difference.items()
        if verdict == "accepted"
    ]
    assert groups > 150
    assert refused / groups < 0.25
    assert accepted == []


if __name__ == "__main__":
    compiler = byte_grammars()
    result = {file: found for file in FILES if (found := differences(file, compiler))}
    KNOWN.write_text(json.dumps(result, indent=1, ensure_ascii=False, sort_keys=True) + "\n", encoding="utf-8")
