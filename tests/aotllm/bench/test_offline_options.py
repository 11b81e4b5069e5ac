"""Options of the offline verbs: sweeps, ranges, and what is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from aotllm.bench.offline_options import LatencyOptions, PromptOptions, ThroughputOptions
from aotllm.errors import InvalidRequest


def test_sweeps():
    assert ThroughputOptions().sweep() == [None]
    assert ThroughputOptions(concurrency="1, 2,8").sweep() == [1, 2, 8]
    assert (LatencyOptions().sizes(), LatencyOptions().depths()) == ([1], [0])
    assert LatencyOptions(batch_sizes="4,1", depth="0,1024").sizes() == [4, 1]
    assert LatencyOptions(depth="0,1024").depths() == [0, 1024]


@pytest.mark.parametrize(
    ("make", "param"),
    [
        (lambda: ThroughputOptions(concurrency="0"), "concurrency"),
        (lambda: ThroughputOptions(concurrency="1,,2"), "concurrency"),
        (lambda: ThroughputOptions(repeats=0), "repeats"),
        (lambda: ThroughputOptions(range_ratio=1.5), "range_ratio"),
        (lambda: LatencyOptions(batch_sizes="1.5"), "batch_sizes"),
        (lambda: LatencyOptions(batch_sizes="many"), "batch_sizes"),
        (lambda: LatencyOptions(depth="-1"), "depth"),
        (lambda: LatencyOptions(batch_sizes="²"), "batch_sizes"),
        (lambda: PromptOptions(input_len=0), "input_len"),
        (lambda: PromptOptions(temperature=-1.0), "temperature"),
    ],
)
def test_what_is_refused(make: Callable[[], object], param: str):
    with pytest.raises(InvalidRequest) as caught:
        make()
    assert caught.value.param == param
