"""`aotllm bench throughput` and `aotllm bench latency` as a shell calls them, on a manager without kernels."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from aotllm.errors import AotllmError
from aotllm.manager import ManagerRequest
from tests.aotllm.cli.command_line import CommandLine
from tests.aotllm.fake_manager import FakeManager


def endless(request: object) -> Iterator[int]:
    return itertools.cycle(b"x")


def test_throughput(aotllm: CommandLine):
    manager = aotllm.use(FakeManager(endless))
    outcome = aotllm(
        *("bench", "throughput", "e", "--input-len", "10", "--output-len", "4", "--num-prompts", "6"),
        *("--prefix-len", "3", "--warmups", "1", "--repeats", "2", "--concurrency", "2", "--json", "-"),
    )
    assert outcome.code == 0, outcome.err
    result = outcome.json
    assert (result["backend"], result["model_id"], result["url"]) == ("offline", "Fake-1M", "e")
    assert (result["completed"], result["failed"], result["max_concurrency"]) == (6, 0, 2)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (6 * 13, 6 * 4)
    assert len(result["repeats"]["output_throughput"]["samples"]) == 2
    assert "itls" not in result
    requests = manager.submitted
    assert len(requests) == 1 + 2 * 6
    assert len({tuple(request.prompt_token_ids[:3]) for request in requests}) == 1
    # The same prompts in each run, and none that finds another run's in the prefix cache.
    first, second = requests[1:7], requests[7:]
    assert [r.prompt_token_ids for r in first] == [r.prompt_token_ids for r in second]
    assert len({requests[0].cache_salt, first[0].cache_salt, second[0].cache_salt}) == 3
    assert {request.sampling.ignore_eos for request in requests} == {True}


def test_a_sweep_with_a_curve_goes_over_the_points_in_turns(aotllm: CommandLine, tmp_path: Path):
    manager = aotllm.use(FakeManager(endless))
    outcome = aotllm(
        *("bench", "throughput", "e", "--num-prompts", "4", "--output-len", "3", "--batch-sizes", "1,4"),
        *("--warmups", "0", "--repeats", "2", "--detailed", "--metric-percentiles", "75"),
        *("--json", tmp_path / "result.json", "--plot", tmp_path / "curve.svg"),
    )
    assert outcome.code == 0, outcome.err
    points = json.loads((tmp_path / "result.json").read_text())
    assert [point["max_concurrency"] for point in points] == [1, 4]
    assert [point["max_concurrent_requests"] for point in points] == [1, 4]
    assert all(point["output_lens"] == [3] * 4 and "p75_ttft_ms" in point for point in points)
    assert "concurrency 4" in (tmp_path / "curve.svg").read_text()
    assert "concurrency 4" in outcome.out
    salts = [request.cache_salt for request in manager.submitted]
    assert salts == [salt for salt, _ in itertools.groupby(salts) for _ in range(4)]  # four runs, one after the other


def test_a_dataset_sets_lengths_and_lets_answers_end(aotllm: CommandLine, tmp_path: Path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "hello", "output_len": 5}\n')
    manager = aotllm.use(FakeManager())  # says ok, and ends
    arguments = ("bench", "throughput", "e", "--dataset", file, "--num-prompts", "2", "--warmups", "0", "--json", "-")
    outcome = aotllm(*arguments, "--repeats", "1")
    assert outcome.code == 0, outcome.err
    assert (outcome.json["total_output_tokens"], outcome.json["workload"]) == (6, str(file))
    assert {(r.sampling.max_tokens, r.sampling.ignore_eos) for r in manager.submitted} == {(5, False)}
    outcome = aotllm(*arguments, "--input-len", "7")
    assert (outcome.code, "--input-len has no meaning with --dataset" in outcome.err) == (2, True)


def test_latency(aotllm: CommandLine):
    manager = aotllm.use(FakeManager(endless, num_cached_tokens=16))
    outcome = aotllm(
        *("bench", "latency", "e", "--batch-sizes", "1,3", "--depth", "16", "--input-len", "8", "--output-len", "6"),
        *("--warmups", "1", "--repeats", "2", "-t", "2", "--json", "-"),
    )
    assert outcome.code == 0, outcome.err
    points = outcome.json
    assert [(point["batch_size"], point["depth"], point["num_threads"]) for point in points] == [(1, 16, 2), (3, 16, 2)]
    for point in points:
        assert len(point["repeats"]["latency"]["samples"]) == len(point["decode_throughput"]["samples"]) == 2
        assert point["prefill_throughput"]["min"] > 0
        assert point["total_output_tokens"] == 6 * point["batch_size"]
    # A short run and two whole ones of each point; the tokens before come with one of an answer, under an equal salt.
    requests = [r for r in manager.submitted if len(r.prompt_token_ids) == 24]
    filled = [r for r in manager.submitted if len(r.prompt_token_ids) == 16]
    assert sorted(r.sampling.max_tokens or 0 for r in requests) == [4] * 4 + [6] * 8
    assert {r.sampling.max_tokens for r in filled} == {1}
    measured = {(r.prompt_token_ids[:16], r.cache_salt) for r in requests if r.sampling.max_tokens == 6}
    assert {(r.prompt_token_ids, r.cache_salt) for r in filled} == measured


def test_the_table_of_latencies(aotllm: CommandLine):
    aotllm.use(FakeManager(endless))
    outcome = aotllm("bench", "latency", "e", "--batch-sizes", "1,2", "--depth", "0,32", "--repeats", "1")
    assert outcome.code == 0, outcome.err
    rows = [line.split()[:2] for line in outcome.out.splitlines() if line.split()[:1] in (["1"], ["2"])]
    assert rows == [["1", "0"], ["2", "0"], ["1", "32"], ["2", "32"]]
    assert "only 0 of 32 tokens were found in the KV cache" in outcome.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("latency", "e", "--batch-sizes", "9"), "the engine runs at most 8 requests at a time, got 9"),
        (("latency", "e", "--batch-sizes", "3", "--max-batch-size", "2"), "at most 2 requests at a time"),
        (("latency", "e", "--depth", "4", "--no-prefix-caching"), "--depth needs the prefix cache"),
        (("latency", "e", "--depth", "4000"), "up to 4256 tokens together, and the engine takes 4096"),
        (("throughput", "e", "--input-len", "4096"), "up to 4224 tokens together, and the engine takes 4096"),
        (("throughput", "e", "--concurrency", "x"), "--concurrency takes whole numbers from 1 on"),
        (("throughput", "e", "--concurrency", "1", "--batch-sizes", "2"), "given twice"),
        (("throughput", "e", "--json", "/no/such/folder/x"), "there is no such folder"),
        (("throughput", "e", "--plot", "x.pdf"), "--plot takes a .html, .svg or .png file"),
        (("throughput", "e", "--percentile-metrics", "speed"), "--percentile-metrics takes some of"),
    ],
)
def test_wrong_usage(aotllm: CommandLine, arguments: tuple[str, ...], message: str):
    aotllm.use(FakeManager(endless))
    outcome = aotllm("bench", *arguments)
    assert outcome.code == 2, outcome.err
    assert message in outcome.err


def test_failures_are_told_and_end_in_an_error_where_nothing_succeeds(aotllm: CommandLine):
    def fails(request: ManagerRequest) -> Iterator[int | AotllmError]:
        yield AotllmError("the kernel is broken")

    for verb in ("throughput", "latency"):
        aotllm.use(FakeManager(fails))
        outcome = aotllm("bench", verb, "e", "--repeats", "1")
        assert (outcome.code, "no request has succeeded" in outcome.err) == (1, True)
        assert "the kernel is broken" in outcome.out
