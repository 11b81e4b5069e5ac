"""Amounts of KV memory: bytes, tokens, or a fraction."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from aotllm.errors import InvalidRequest
from aotllm.kv_memory import KvGroup, KvMemory, KvMemorySize, parse_bytes, parse_kv_memory


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4000000000", KvMemorySize(num_bytes=4 * 10**9)),
        ("1", KvMemorySize(num_bytes=1)),
        ("512MB", KvMemorySize(num_bytes=512 * 10**6)),
        ("2GiB", KvMemorySize(num_bytes=2 << 30)),
        ("1.5 GiB", KvMemorySize(num_bytes=3 << 29)),
        ("64kib", KvMemorySize(num_bytes=64 << 10)),
        (" 7B ", KvMemorySize(num_bytes=7)),
        ("100000tokens", KvMemorySize(tokens=100_000)),
        ("8 Tokens", KvMemorySize(tokens=8)),
        ("0.5", KvMemorySize(fraction=0.5)),
        (".25", KvMemorySize(fraction=0.25)),
        ("1.0", KvMemorySize(fraction=1.0)),
        ("1.", KvMemorySize(fraction=1.0)),
    ],
)
def test_three_units(text: str, size: KvMemorySize):
    assert parse_kv_memory(text) == size


@pytest.mark.parametrize(
    "text",
    ["", "much", "-1", "0", "0.0", "1.5", "0GiB", "1.5tokens", "0tokens", "2G", "50%", "1e9", "nan", "9" * 30, "1 2"],
)
def test_what_is_no_amount_is_refused_by_name(text: str):
    with pytest.raises(InvalidRequest, match=r"512MB or 1\.5GiB") as caught:
        parse_kv_memory(text, "some_name")
    assert caught.value.param == "some_name"


@pytest.mark.parametrize(("text", "num_bytes"), [("0", 0), ("10", 10), ("2MiB", 2 << 20)])
def test_bytes_only(text: str, num_bytes: int):
    assert parse_bytes(text, "x") == num_bytes


@pytest.mark.parametrize("text", ["0.5", "5tokens", "some"])
def test_bytes_are_no_tokens_or_fraction(text: str):
    with pytest.raises(InvalidRequest) as caught:
        parse_bytes(text, "x")
    assert caught.value.param == "x"


def test_what_it_buys_comes_from_the_runtime():
    group = SimpleNamespace(window=512, bytes_per_block=10, device_blocks=3, host_blocks=2)
    fields = {"tokens_per_block": 16, "max_seq_len": 64, "device_bytes": 30, "host_bytes": 20}
    memory = KvMemory.from_native(SimpleNamespace(groups=[group], **fields, tokens=48, sequences_at_max_len=0))
    assert memory == KvMemory((KvGroup(512, 10, 3, 2),), 16, 64, 30, 20, 48, 0)
    assert memory.groups[0].num_bytes == 50
