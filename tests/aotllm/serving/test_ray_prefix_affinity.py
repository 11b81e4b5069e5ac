"""Where requests go: same prefix, same replica, as long as it has room."""

from __future__ import annotations

import json
import math
from collections import Counter
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aotllm.serving.ray.prefix_affinity import PrefixAffinity, routing_key

NAMES = st.text("abcdefgh", min_size=1, max_size=6)
LOADS = st.dictionaries(NAMES, st.integers(0, 200), min_size=1, max_size=12)
KEYS = st.text(max_size=20)


@given(KEYS, LOADS, st.sampled_from([1.125, 1.25, 2.0, 4.0]), st.integers(1, 50))
def test_the_chosen_replica_keeps_to_the_bound(key: str, loads: dict[str, int], load_bound: float, free_load: int):
    order = PrefixAffinity(load_bound, free_load).order(key, loads)
    most = max(free_load, math.ceil(Fraction(load_bound) * Fraction(sum(loads.values()) + 1, len(loads))))
    assert sorted(order) == sorted(loads)
    assert loads[order[0]] + 1 <= most


@given(KEYS, st.sets(NAMES, min_size=2, max_size=12))
def test_a_replica_that_goes_moves_its_own_keys_only(key: str, replicas: set[str]):
    affinity = PrefixAffinity()
    order = affinity.order(key, dict.fromkeys(replicas, 0))
    for gone in replicas:
        rest = affinity.order(key, dict.fromkeys(replicas - {gone}, 0))
        assert rest == [replica for replica in order if replica != gone]


@given(KEYS, LOADS, st.randoms())
def test_the_order_does_not_depend_on_that_of_the_replicas(key: str, loads: dict[str, int], random: Any):
    items = list(loads.items())
    random.shuffle(items)
    assert PrefixAffinity().order(key, dict(items)) == PrefixAffinity().order(key, loads)


@given(LOADS)
def test_without_a_key_the_least_loaded_replica_is_best(loads: dict[str, int]):
    order = PrefixAffinity().order(None, loads)
    assert [loads[replica] for replica in order] == sorted(loads.values())


def test_a_hot_prefix_fills_one_replica_after_the_other():
    affinity, loads = PrefixAffinity(load_bound=1.25, free_load=4), dict.fromkeys("abcd", 0)
    favourites = affinity.order("hot", loads)
    for _ in range(4):
        loads[affinity.order("hot", loads)[0]] += 1
    assert loads[favourites[0]] == 4
    for _ in range(96):
        loads[affinity.order("hot", loads)[0]] += 1
    assert max(loads.values()) <= math.ceil(1.25 * 100 / 4)
    assert [loads[replica] for replica in favourites] == sorted(loads.values(), reverse=True)


def test_many_prefixes_spread_over_all_replicas():
    affinity, loads = PrefixAffinity(), dict.fromkeys("abcd", 0)
    first = Counter(affinity.order(f"prefix {i}", loads)[0] for i in range(4000))
    # 4000 draws of four: a count is within 5 standard deviations (27) of 1000 unless the hash is no hash.
    assert all(abs(first[replica] - 1000) < 5 * 28 for replica in loads)


def test_there_may_be_no_replica():
    assert PrefixAffinity().order("key", {}) == []


@pytest.mark.parametrize(("load_bound", "free_load"), [(1.0, 1), (0.5, 1), (1.25, 0)])
def test_bounds_that_cannot_be_kept_are_refused(load_bound: float, free_load: int):
    with pytest.raises(ValueError, match="must be"):
        PrefixAffinity(load_bound, free_load)


def key_of(prefix_chars: int = 32, **body: Any) -> str | None:
    return routing_key(json.dumps(body).encode(), prefix_chars)


SYSTEM = {"role": "system", "content": "You are a helpful assistant."}
QUESTION = {"role": "user", "content": "What is a load bound?"}
ANSWER = {"role": "assistant", "content": "A limit."}
LONG = "x" * 32


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"prompt": LONG + "a"}, {"prompt": LONG + "b"}),
        ({"prompt": LONG, "temperature": 0}, {"prompt": LONG, "temperature": 1}),
        ({"prompt": [LONG, "a"]}, {"prompt": LONG}),
        ({"prompt": list(range(100))}, {"prompt": [list(range(200))]}),
        ({"messages": [SYSTEM, QUESTION]}, {"messages": [SYSTEM, QUESTION, ANSWER, QUESTION]}),
        ({"text_input": LONG}, {"text_input": LONG + "a"}),
    ],
)
def test_a_common_prefix_gives_a_common_key(one: dict[str, Any], other: dict[str, Any]):
    assert key_of(**one) == key_of(**other) != None  # noqa: E711


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"prompt": "a"}, {"prompt": "b"}),
        ({"prompt": "a", "model": "m"}, {"prompt": "a", "model": "n"}),
        ({"prompt": "a", "cache_salt": "s"}, {"prompt": "a"}),
        ({"messages": [QUESTION]}, {"messages": [SYSTEM, QUESTION]}),
        ({"messages": [QUESTION]}, {"messages": [QUESTION], "tools": [{"type": "function"}]}),
    ],
)
def test_what_the_cache_keeps_apart_has_keys_apart(one: dict[str, Any], other: dict[str, Any]):
    assert key_of(512, **one) != key_of(512, **other)


FIELDS = st.sampled_from(["messages", "prompt", "text_input", "role", "tools", "model"])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(FIELDS, inner, max_size=4),
)


@given(st.binary(max_size=60) | JSON.map(lambda value: json.dumps(value).encode()))
def test_any_body_has_a_key_or_none(body: bytes):
    key = routing_key(body, 64)
    assert key is None or isinstance(key, str)


def test_a_body_without_prompt_has_none():
    assert [routing_key(body, 64) for body in (b"", b"{", b"[]", b"{}", b'{"prompt": ""}')] == [None] * 5
