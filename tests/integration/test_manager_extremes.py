"""The edges of the manager on tiny random models: of blocks, of memory, of what can be asked for."""

from __future__ import annotations

import gc
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aotllm import Executor
from aotllm.cli import main
from aotllm.errors import InvalidRequest
from aotllm.structured_outputs import StructuredOutputs
from tests.integration.stress import FORMS, TEXT, Models, ask

# The cache ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_kv_blocks": 17, "kv_host_memory": "4MiB"},
        {"num_kv_blocks": 17, "max_num_tokens": 9},
        {"speculative": "ngram", "max_chunk_tokens": 7},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["llama", "llama, int8 cache", "gemma3, windows"])
def test_five_times_the_same_about_the_edges_of_blocks(models: Models, name: str, options: dict[str, Any]) -> None:
    with models.start(name, prefix_caching=False) as bare, models.start(name, **options) as executor:
        for length in (1, 15, 16, 17, 32, 33, 64, 129, 200):
            prompt = [int(token) for token in np.random.default_rng(length).integers(33, 127, length)]
            request = ask(prompt, max_tokens=20, return_logits=True)
            expected = [row.tobytes() for row in bare.submit(request).result().logits]
            for time in range(5):
                result = executor.submit(request).result()
                assert [row.tobytes() for row in result.logits] == expected
                if time in (1, 2):
                    assert result.num_cached_tokens == length - 1
                if time == 2:  # one that has half of it in common, and may take its blocks
                    executor.submit(ask([*prompt[: length // 2], 50, *prompt[length // 2 :]])).result()


@pytest.mark.parametrize(
    "options", [{}, {"num_kv_blocks": 24}, {"num_kv_blocks": 24, "kv_host_memory": "300KB"}], ids=str
)
@pytest.mark.parametrize("name", ["llama", "gemma3, windows"])
def test_events_tell_what_is_in_the_cache(models: Models, name: str, options: dict[str, Any]) -> None:
    draw = random.Random(1)
    tiers: dict[tuple[int, int], str] = {}  # (group, key) -> where the block is
    last_id = num_stored = 0
    with models.start(name, max_kv_events=10**6, **options) as executor:
        for round_ in range(8):
            starts = [draw.choice([0, 0, 16, 40]) for _ in range(10)]
            prompts = [TEXT[start : start + draw.randrange(1, 150)] for start in starts]
            executor.generate(
                [ask(p, max_tokens=draw.randrange(1, 60), retention_priority=draw.randrange(100)) for p in prompts]
            )
            if round_ % 5 == 4:
                executor._manager._manager.clear_prefix_cache()  # type: ignore[attr-defined]
            executor.submit(ask(TEXT[:1], max_tokens=1)).result()  # a step in which the last ones are published
            for event in executor.kv_events():
                assert event.id == last_id + 1
                last_id, where = event.id, (event.group, event.key)
                assert (where in tiers) == (event.kind != "stored")
                if event.kind == "removed":
                    del tiers[where]
                else:
                    tiers[where] = event.tier
                num_stored += event.kind == "stored"
            counters = executor.stats().counters
            assert num_stored == counters["cache"].stored_blocks
            first_group = [tier for (group, _), tier in tiers.items() if group == 0]
            assert first_group.count("device") <= counters["blocks_cached"]
            assert first_group.count("host") <= counters["host_blocks_used"]


def test_nobody_has_to_read_events_or_steps_and_nothing_grows(models: Models) -> None:
    def resident() -> int:
        gc.collect()
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    draw = random.Random(0)
    with models.start(
        "llama", max_kv_events=100, kv_host_memory="1MiB", speculative="ngram", num_kv_blocks=200
    ) as executor:
        sizes = []
        for _ in range(3):
            for _ in range(10):
                prompts = [draw.choices(range(33, 127), k=draw.randrange(1, 40)) for _ in range(100)]
                requests = [ask(p, max_tokens=3, n=1 + i % 2, cache_salt=str(i)) for i, p in enumerate(prompts)]
                handles = [executor.submit(request) for request in requests]
                for handle in handles[::2]:
                    handle.cancel()
                for handle in handles:
                    handle.result()
            sizes.append(resident())
        assert len(executor.kv_events()) == 100
        assert sizes[2] - sizes[0] < 16 * 2**20


# Bad values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("num_kv_blocks", 2**31 - 1),
        ("kv_cache_memory", "1"),
        ("kv_cache_memory", "100TB"),
        ("kv_cache_memory", str(2**63 - 1)),
        ("kv_cache_memory", f"{2**62}tokens"),
        ("kv_cache_memory", "0.000000001"),
        ("kv_host_memory", "100TB"),
        ("kv_host_memory", str(2**63 - 1)),
        ("max_batch_size", 33),
        ("max_num_tokens", 129),
        ("max_wait_steps", 0),
        ("speculative", "/nowhere"),
        ("queue_policy", "chance"),
        ("ngram_min", 5),
        ("stuck_step_seconds", "nan"),
    ],
)
def test_a_bad_flag_is_wrong_usage_and_named(
    models: Models, capsys: pytest.CaptureFixture[str], option: str, value: object
) -> None:
    arguments = [
        "run",
        str(models.engine("llama").path),
        "-p",
        "a",
        "--raw",
        f"--{option.replace('_', '-')}",
        str(value),
    ]
    code = main(arguments)
    error = capsys.readouterr().err
    assert code == (3 if option == "speculative" else 2)  # what is no engine is a bad one
    assert option in error or str(value) in error
    assert "Traceback" not in error
    assert "a fault of aotllm" not in error


@pytest.mark.parametrize("form", [None, StructuredOutputs(regex="[a-z]{2,5}")], ids=["free", "grammar"])
@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 100.0},
        {"temperature": 1e-300},
        {"logit_bias": dict.fromkeys(range(131), -100.0)},
        {"logit_bias": {97: 100.0, 98: -100.0}},
        {"repetition_penalty": 1e300},
        {"repetition_penalty": 1e-300},
        {"frequency_penalty": 2.0, "presence_penalty": -2.0},
        {"no_repeat_ngram_size": 1},
        {"min_tokens": 8},
        {"top_p": 5e-324, "temperature": 1.0},
        {"min_p": 1.0, "temperature": 1.0},
        {"n": 128, "max_tokens": 2, "temperature": 1.0},
        {"n": 1, "best_of": 128, "max_tokens": 2, "temperature": 1.0},
    ],
    ids=lambda value: str(value)[:40],
)
def test_extreme_sampling_gives_answers(
    models: Models, sampling: dict[str, Any], form: StructuredOutputs | None
) -> None:
    with models.start("llama") as executor:
        for output in executor.submit(ask(TEXT[:20], seed=1, structured_outputs=form, **sampling)).result(60).outputs:
            assert output.finish_reason in ("length", "stop")
            assert 1 <= len(output.token_ids) <= 8


def test_what_leaves_no_token_fails_alone(models: Models) -> None:
    with Executor(models.engine("llama"), num_threads=2) as executor:
        expected = executor.submit(ask(TEXT[:20])).result().token_ids
        beside = executor.submit(ask(TEXT[:20], n=2))
        nothing = executor.submit(ask(TEXT[:20], allowed_token_ids=[5], structured_outputs=FORMS[0]))
        with pytest.raises(InvalidRequest, match="no token is allowed"):
            nothing.result()
        assert [output.token_ids for output in beside.result().outputs] == [expected] * 2
        assert executor.stats().blocks_used == 0
