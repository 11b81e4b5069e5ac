"""The latencies of one request, from chunks at known times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from aotllm.bench.record import RequestRecord

Chunk = tuple[float, str, "int | None"]  # time, text, tokens so far as the server says


@dataclass
class Case:
    chunks: Sequence[Chunk]
    finished: float
    usage: int | None
    expected: dict[str, Any]


CASES = {
    "one token per chunk": Case(
        [(10.5, "a", None), (10.6, "b", None), (10.9, "c", None)],
        10.9,
        3,
        {"ttft": 0.5, "tpot": 0.2, "itls": [0.1, 0.3], "num_output_tokens": 3},
    ),
    "a chunk without content is no token: a chat begins with the role": Case(
        [(10.1, "", None), (10.5, "a", None), (10.7, "b", None)],
        10.7,
        2,
        {"ttft": 0.5, "tpot": 0.2, "itls": [0.2]},
    ),
    "the end token has no text and comes with the finish reason": Case(
        [(10.5, "a", None), (10.6, "b", None)],
        10.9,
        3,
        {"ttft": 0.5, "tpot": 0.2, "itls": [0.1]},
    ),
    "a chunk that is counted as three tokens is three gaps of a third": Case(
        [(10.5, "a", 1), (10.8, "bcd", 4), (11.0, "e", 5)],
        11.0,
        5,
        {"ttft": 0.5, "tpot": 0.125, "itls": [0.1, 0.1, 0.1, 0.2], "num_output_tokens": 5},
    ),
    "a counted token counts though its text is still held back": Case(
        [(10.4, "", 1), (10.5, "é", 2)],
        10.5,
        2,
        {"ttft": 0.4, "tpot": 0.1, "itls": [0.1]},
    ),
    "text that brings no new token is none": Case(
        [(10.4, "", 1), (10.5, "a", 1), (10.6, "b", 2)],
        10.6,
        2,
        {"ttft": 0.4, "itls": [0.2]},
    ),
    "a count with the last chunk only says nothing of the chunks": Case(
        [(10.5, "a", None), (10.7, "b", None), (10.9, "c", 3)],
        10.9,
        3,
        {"ttft": 0.5, "tpot": 0.2, "itls": [0.2, 0.2], "num_output_tokens": 3},
    ),
    "three tokens a chunk that are counted at the end": Case(
        [(10.5, "abc", None), (10.8, "def", None)],
        10.8,
        6,
        {"ttft": 0.5, "tpot": 0.06, "itls": [0.3]},
    ),
    "an answer of one token has no time per output token": Case(
        [(10.5, "a", None)], 10.5, 1, {"ttft": 0.5, "tpot": None, "itls": []}
    ),
    "an answer of the end token only": Case(
        [(10.3, "", None)], 10.4, 1, {"ttft": 0.4, "tpot": None, "itls": [], "num_output_tokens": 1}
    ),
    "an answer of nothing": Case([], 10.4, 0, {"ttft": None, "tpot": None, "itls": [], "num_output_tokens": 0}),
    "without counts, chunks are": Case(
        [(10.5, "a", None), (10.6, "b", None)], 10.6, None, {"ttft": 0.5, "tpot": 0.1, "num_output_tokens": 2}
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_latencies(case: Case):
    record = RequestRecord(sent=10.0)
    for now, text, total in case.chunks:
        record.chunk(now, text, total_tokens=total)
    record.finished = case.finished
    record.usage(5, case.usage, 2)
    record.ended = case.finished + 0.25
    for name, value in case.expected.items():
        assert getattr(record, name) == pytest.approx(value), name
    assert record.e2el == pytest.approx(case.finished + 0.25 - 10.0)
    assert record.text == "".join(text for _, text, _ in case.chunks)
    assert (record.prompt_tokens, record.cached_tokens, record.ok) == (5, 2, True)


def test_the_gaps_of_counted_chunks_add_up_to_the_time_between_first_and_last():
    record = RequestRecord()
    for now, total in ((1.0, 2), (1.5, 5), (1.6, 6), (3.0, 10)):
        record.chunk(now, "x", total_tokens=total)
    assert sum(record.itls) == pytest.approx(2.0)
    assert len(record.itls) == 10 - 2


def test_reasoning_and_tool_calls_are_tokens_without_text():
    record = RequestRecord(sent=1.0)
    record.chunk(1.5, "", visible=True)
    record.chunk(1.7, "a")
    assert (record.ttft, record.text) == (0.5, "a")


@pytest.mark.parametrize(
    ("chunks", "usage", "expected"),
    [
        ([(1.0, "a", 2), (2.0, "b", 5)], 5, [(1.0, 2.0), (2.0, 3.0)]),
        ([(1.0, "a", None), (2.0, "b", None)], 6, [(1.0, 3.0), (2.0, 3.0)]),
        ([(1.0, "a", None), (2.0, "b", None)], None, [(1.0, 1.0), (2.0, 1.0)]),
        ([], 1, [(3.0, 1.0)]),
    ],
)
def test_when_tokens_arrived(chunks: list[Chunk], usage: int | None, expected: list[tuple[float, float]]):
    record = RequestRecord()
    for now, text, total in chunks:
        record.chunk(now, text, total_tokens=total)
    record.finished = 3.0
    record.usage(None, usage, None)
    assert record.token_arrivals() == expected
