"""`ExecutorConfig`: ranges, and what contradicts itself."""

from __future__ import annotations

import pytest

from aotllm import ExecutorConfig
from aotllm.errors import InvalidRequest


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"num_threads": -1}, "num_threads"),
        ({"devices": "0;1"}, "devices"),
        ({"devices": "0,"}, "devices"),
        ({"num_kv_blocks": -1}, "num_kv_blocks"),
        ({"max_queue_size": -1}, "max_queue_size"),
        ({"max_batch_size": 1.5}, "max_batch_size"),
        ({"max_queued_tokens": -1}, "max_queued_tokens"),
        ({"max_wait_steps": 0}, "max_wait_steps"),
        ({"kv_cache_memory": "much"}, "kv_cache_memory"),
        ({"kv_cache_memory": "1GiB", "num_kv_blocks": 3}, "num_kv_blocks"),
        ({"kv_host_memory": "0.5"}, "kv_host_memory"),
        ({"kv_host_memory": "100tokens"}, "kv_host_memory"),
        ({"capacity_policy": "hope"}, "capacity_policy"),
        ({"queue_policy": ""}, "queue_policy"),
        ({"prefix_caching": 1}, "prefix_caching"),
        ({"speculative": ""}, "speculative"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens"),
        ({"ngram_max": 2, "ngram_min": 3}, "ngram_min"),
        ({"timeout": -1.0}, "timeout"),
        ({"stuck_step_seconds": float("nan")}, "stuck_step_seconds"),
    ],
)
def test_what_cannot_be_is_refused_by_name(options: dict[str, object], param: str):
    with pytest.raises(InvalidRequest) as caught:
        ExecutorConfig(**options)
    assert caught.value.param == param
    assert param in caught.value.message


def test_a_choice_is_refused_with_what_there_is():
    with pytest.raises(InvalidRequest, match="one of priority, fcfs, longest_prefix, got 'random'"):
        ExecutorConfig(queue_policy="random")


@pytest.mark.parametrize(
    ("speculative", "speculation", "engine"),
    [("none", "none", None), ("ngram", "ngram", None), ("small.engine", "draft", "small.engine")],
)
def test_speculation_is_a_word_or_a_folder(speculative: str, speculation: str, engine: str | None):
    config = ExecutorConfig(speculative=speculative)
    assert (config.speculation, config.draft_engine) == (speculation, engine)


@pytest.mark.parametrize(("devices", "numbers"), [(None, ()), ("0", (0,)), ("2,0,1", (2, 0, 1))])
def test_devices_of_ranks(devices: str | None, numbers: tuple[int, ...]):
    assert ExecutorConfig(devices=devices).device_numbers == numbers
