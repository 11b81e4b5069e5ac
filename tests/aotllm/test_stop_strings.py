"""Stop strings against a naive oracle, over any way of cutting the text into pieces."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from aotllm.stop_strings import StopStrings

TEXTS = st.text("ab\n€", max_size=24)
STOPS = st.lists(st.text("ab\n€", min_size=1, max_size=5), max_size=4)


def expected(text: str, stops: list[str], include: bool, start: int = 0) -> tuple[str, str | None]:
    """The definition, at its simplest: grow the text until it ends with a stop string, which needs more than the first
    `start` characters."""
    for end in range(start + 1, len(text) + 1):
        for stop in stops:
            if text[:end].endswith(stop):
                return text[: end if include else end - len(stop)], stop
    return text, None


def longest_possible_start(text: str, stops: list[str]) -> int:
    """Length of the longest suffix of `text` that a stop string goes on from."""
    return max((n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)


@st.composite
def pieces(draw: st.DrawFn) -> list[str]:
    text = draw(TEXTS)
    cuts = sorted(draw(st.lists(st.integers(0, len(text)))))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@given(pieces(), STOPS, st.booleans())
@example(["abc"], ["abc", "b"], False)
@example(["a", "a", "ab"], ["aab"], False)
def test_any_cutting_gives_the_text_up_to_the_first_stop(parts: list[str], stops: list[str], include: bool):
    found = StopStrings(stops, include)
    text = "".join([*map(found.append, parts), found.flush()])
    assert (text, found.matched) == expected("".join(parts), stops, include)


@given(pieces(), STOPS)
def test_holds_back_what_may_become_a_stop_string_and_nothing_else(parts: list[str], stops: list[str]):
    found, given_out, seen = StopStrings(stops), "", ""
    for part in parts:
        given_out += found.append(part)
        seen += part
        if found.matched is not None:
            return
        assert given_out == seen[: len(seen) - longest_possible_start(seen, stops)]


@given(pieces(), STOPS, st.booleans(), st.integers(0, 8))
@example(["aa", "ab"], ["a"], False, 1)
@example(["a", "b"], ["ab"], False, 1)  # begins unarmed, completes armed
@example(["ab", "c"], ["ab", "abc", "b"], True, 1)
def test_what_completes_unarmed_is_text(parts: list[str], stops: list[str], include: bool, unarmed: int):
    found, given_out, seen, start = StopStrings(stops, include), "", "", 0
    for index, part in enumerate(parts):
        given_out += found.append(part, armed=index >= unarmed)
        seen += part
        if index < unarmed:
            start = len(seen)
        if found.matched is None:
            assert given_out == seen[: len(seen) - longest_possible_start(seen, stops)]
    assert (given_out + found.flush(), found.matched) == expected(seen, stops, include, start)


@pytest.mark.parametrize(
    ("stops", "text", "matched", "shown"),
    [
        (["abc", "b"], "abc", "b", "a"),  # completes first, though it is found inside the other
        (["bc", "abc"], "xabc", "bc", "xa"),  # same end: the first listed
        (["abc", "bc"], "xabc", "abc", "x"),
        (["a", "a"], "ba", "a", "b"),
        (["🌊b"], "a🌊b", "🌊b", "a"),
        (["aaaa"], "aaaaaa", "aaaa", ""),
    ],
)
def test_which_stop_string_wins(stops: list[str], text: str, matched: str, shown: str):
    found = StopStrings(stops)
    assert found.append(text) == shown
    assert found.matched == matched


def test_nothing_comes_after_a_match():
    found = StopStrings(["."])
    assert found.append("a.b") == "a"
    assert found.append("c") == ""
    assert found.flush() == ""


def test_text_that_cannot_start_a_stop_string_is_not_delayed():
    found = StopStrings(["\nObservation:"])
    for token in ("The", " sea", " is", " wide"):
        assert found.append(token) == token


def test_an_empty_stop_string_is_refused():
    with pytest.raises(ValueError, match="empty"):
        StopStrings([""])
