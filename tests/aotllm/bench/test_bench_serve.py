"""`aotllm bench serve` as a shell calls it, against real servers on loopback."""

from __future__ import annotations

import asyncio
import itertools
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from aotllm.errors import InvalidRequest
from aotllm.manager import ManagerRequest
from tests.aotllm.bench.conftest import Serve
from tests.aotllm.bench.socket_server import Request, SocketServer, event_stream, http
from tests.aotllm.cli.command_line import CommandLine
from tests.aotllm.fake_manager import FakeManager, says


def text_of(request: ManagerRequest) -> bytes:
    """The prompt, of which each token but the first is a byte."""
    return bytes(token for token in request.prompt_token_ids if token < 256)


def endless(request: object) -> Iterator[int]:
    return itertools.cycle(b"x")


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_a_benchmark_of_a_server(aotllm: CommandLine, serve: Serve, backend: str):
    manager = FakeManager(endless, num_cached_tokens=3)
    url = serve(manager, api_key=["key"])
    outcome = aotllm(
        *("bench", "serve", "--url", f"{url}/v1", "--backend", backend, "--api-key", "key", "--json", "-"),
        *("--profile", "random", "--input-len", "40", "--output-len", "12", "--num-prompts", "6", "--concurrency", "2"),
        *("--warmups", "1", "--continuous-usage", "--goodput", "ttft:60000", "e2el:60000"),
    )
    assert (outcome.code, outcome.json["failed"]) == (0, 0), outcome.err
    result = outcome.json
    measured = manager.submitted[-6:]
    assert (result["model_id"], result["backend"], result["completed"]) == ("m", backend, 6)
    assert result["output_lens"] == [12] * 6  # ignore_eos, and one token of each step is counted
    assert sorted(result["input_lens"]) == sorted(len(request.prompt_token_ids) for request in measured)
    assert result["total_cached_tokens"] == 18
    assert result["prefix_hit_rate"] == pytest.approx(18 / result["total_input_tokens"])
    assert all(len(gaps) <= 11 for gaps in result["itls"])  # tokens that wait share an event
    assert result["generated_texts"] == ["x" * 12] * 6
    assert result["max_concurrent_requests"] == 2
    assert result["request_goodput"] == pytest.approx(result["request_throughput"])
    for request in measured:
        assert request.sampling.temperature == 0.0
    # A byte is a token of this model, which the server's /tokenize has told.
    assert all(abs(length - 40) <= 40 for length in result["input_lens"])


@contextmanager
def stepping(manager: FakeManager, url: str) -> Iterator[None]:
    """Lets the server send what a step made before the next step, so that each is an event of its own."""
    over = threading.Event()

    def step() -> None:
        while not over.is_set():
            manager.step_and_wait()
            httpx.get(f"{url}/health")  # which its loop answers after the tokens that it got before

    thread = threading.Thread(target=step)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_speculating_servers_are_counted_by_token(aotllm: CommandLine, serve: Serve):
    manager = FakeManager(endless, tokens_per_step=4, stepping="by hand")
    url = serve(manager)
    arguments = ("bench", "serve", "--url", url, "--output-len", "13", "--range-ratio", "0", "--num-prompts", "2")
    with stepping(manager, url):
        result = aotllm(*arguments, "--continuous-usage", "--json", "-").json
    assert result["output_lens"] == [13, 13]
    # Chunks of 4, 4, 4 and 1 tokens: all but the first chunk's are gaps.
    assert [len(gaps) for gaps in result["itls"]] == [9, 9]


def test_a_conversation_goes_on_with_the_servers_answers(aotllm: CommandLine, serve: Serve):
    manager = FakeManager(says("yes!"))
    url = serve(manager)
    outcome = aotllm(
        *("bench", "serve", "--url", url, "--backend", "openai", "--profile", "multi-turn", "--turns", "3"),
        *("--input-len", "20", "--num-prompts", "3", "--no-ignore-eos", "--json", "-"),
    )
    assert outcome.json["completed"] == 3
    prompts = [text_of(request) for request in manager.submitted[-3:]]
    assert prompts[1].startswith(prompts[0] + b"yes!\n\n")
    assert prompts[2].startswith(prompts[1] + b"yes!\n\n")


def test_a_sweep_with_a_curve(aotllm: CommandLine, serve: Serve, tmp_path: Path):
    url = serve(FakeManager(endless))
    outcome = aotllm(
        *("bench", "serve", "--url", url, "--output-len", "4", "--num-prompts", "4", "--concurrency", "1,2,4"),
        *("--json", tmp_path / "result.json", "--plot", tmp_path / "curve.html", "--metric-percentiles", "99.9"),
    )
    assert outcome.code == 0, outcome.err
    points = json.loads((tmp_path / "result.json").read_text())
    assert [point["max_concurrency"] for point in points] == [1, 2, 4]
    assert all("p99.9_ttft_ms" in point and "p99_ttft_ms" not in point for point in points)
    assert "c=1" in (tmp_path / "curve.html").read_text()  # labels that would cover others are left out
    assert outcome.out.count("requests/s") >= 4  # a table per point and one over all


def test_a_dataset(aotllm: CommandLine, serve: Serve, tmp_path: Path):
    manager = FakeManager(says("ok"))
    (tmp_path / "data.jsonl").write_text('{"prompt": "one"}\n{"prompt": "two", "output_len": 5}\n')
    arguments = ("--dataset", tmp_path / "data.jsonl", "--backend", "openai", "--num-prompts", "4")
    outcome = aotllm("bench", "serve", "--url", serve(manager), *arguments, "--json", "-")
    assert outcome.json["completed"] == 4
    asked = [(text_of(r), r.sampling.max_tokens) for r in manager.submitted[-4:]]
    assert sorted(asked) == [(b"one", 128), (b"one", 128), (b"two", 5), (b"two", 5)]


def test_an_overloaded_server_is_counted_and_does_not_end_the_run(aotllm: CommandLine, serve: Serve):
    manager = FakeManager(endless)
    url, submit = serve(manager), manager.submit

    def two_are_taken(request: ManagerRequest) -> int:
        if len(manager.submitted) == 3:  # the probe and two
            manager.max_queue_size = 0
        return submit(request)

    manager.submit = two_are_taken  # type: ignore[method-assign]
    outcome = aotllm("bench", "serve", "--url", url, "--output-len", "3", "--num-prompts", "6", "--json", "-")
    assert outcome.code == 0
    result = outcome.json
    assert (result["completed"], result["failed"], result["error_counts"]) == (2, 4, {"http_503": 4})
    assert sum("queue is full" in error for error in result["errors"]) == 4


def test_no_success_at_all_is_a_failure(aotllm: CommandLine, serve: Serve):
    url = serve(FakeManager(endless, max_seq_len=64))
    outcome = aotllm(
        *("bench", "serve", "--url", url, "--profile", "random", "--input-len", "90", "--output-len", "5"),
        *("--num-prompts", "2", "--backend", "openai"),
    )
    assert outcome.code == 1
    assert "exceed the model's context of 64" in outcome.err
    assert "failed, http_400: 2, such as: HTTP 400: " in outcome.out
    assert outcome.err.endswith("error: no request has succeeded\n")


def run_against(aotllm: CommandLine, answer: Callable[[Request], bytes], *arguments: str) -> tuple[Any, SocketServer]:
    """The outcome of a call against a server of the test's own; `main` has an event loop in another thread."""
    server = SocketServer(answer)

    async def call(port: int) -> Any:
        url = f"http://127.0.0.1:{port}"
        return await asyncio.get_running_loop().run_in_executor(
            None, lambda: aotllm("bench", "serve", "--url", url, *arguments)
        )

    return server.run(call), server


def test_options_that_a_server_refuses_are_left_out(aotllm: CommandLine):
    def answer(request: Request) -> bytes:
        if request.line.startswith("GET"):
            return http(b'{"data":[{"id":"strict"}]}')
        body = json.loads(request.body) if request.body else {}
        for name in ("ignore_eos",):
            if name in body:
                return http(b'{"error":{"message":"Unrecognized request argument: %s"}}' % name.encode(), "400 Bad")
        if "/tokenize" in request.line:
            return http(b"{}", "404 Not Found")
        return event_stream('{"choices":[{"delta":{"content":"a"},"finish_reason":"stop"}]}', "[DONE]")

    outcome, _ = run_against(aotllm, answer, "--num-prompts", "2", "--json", "-")
    assert outcome.code == 0, outcome.err
    assert "the server refuses ignore_eos" in outcome.err
    assert (outcome.json["model_id"], outcome.json["completed"]) == ("strict", 2)
    assert outcome.json["output_tokens_measured"] is False


def test_prompts_have_the_lengths_that_the_server_counts(aotllm: CommandLine):
    def answer(request: Request) -> bytes:
        if request.line.startswith("GET"):
            return http(b'{"data":[{"id":"m","max_model_len":4096}]}')
        body = json.loads(request.body)
        if "/tokenize" in request.line:
            assert body["add_special_tokens"] is False
            return http(b'{"count":%d}' % len(body["prompt"].split()))
        usage = {"prompt_tokens": len(body["prompt"].split()), "completion_tokens": body["max_tokens"]}
        return event_stream(
            '{"choices":[{"text":"a","finish_reason":"length"}]}', json.dumps({"usage": usage}), "[DONE]"
        )

    arguments = ("--backend", "openai", "--profile", "random", "--input-len", "33", "--num-prompts", "3", "--json", "-")
    outcome, _ = run_against(aotllm, answer, *arguments)
    assert outcome.json["input_lens"] == outcome.json["wanted_input_lens"] == [33] * 3
    assert outcome.json["prompt_lengths"] == "counted by the server's /tokenize"


def test_generate_stream(aotllm: CommandLine):
    def answer(request: Request) -> bytes:
        assert request.line.startswith("POST /v2/models/ensemble/generate_stream") or "/tokenize" in request.line
        if "/tokenize" in request.line:
            return http(b"{}", "404 Not Found")
        return event_stream('{"text_output":"a","num_output_tokens":1,"num_input_tokens":4}', '{"text_output":"b"}')

    outcome, _ = run_against(aotllm, answer, "--backend", "kserve-http", "--num-prompts", "2", "--json", "-")
    assert (outcome.code, outcome.json["completed"], outcome.json["model_id"]) == (0, 2, "ensemble")


def test_a_server_without_models_must_be_told_one(aotllm: CommandLine):
    outcome, _ = run_against(aotllm, lambda request: http(b'{"detail":"Not Found"}', "404 Not Found"))
    assert outcome.code == 1
    assert "/v1/models answers 404: Not Found; name the model with --model" in outcome.err


def test_an_unreachable_server_is_one_sentence(aotllm: CommandLine):
    outcome = aotllm("bench", "serve", "--url", "http://127.0.0.1:1")
    assert (outcome.code, outcome.out) == (1, "")
    assert outcome.err == (
        "error: no benchmark of http://127.0.0.1:1: cannot connect to 127.0.0.1:1: Connection refused\n"
    )


def test_ctrl_c_prints_what_was_measured(serve: Serve, tmp_path: Path):
    manager = FakeManager(endless, stepping="by hand")
    url = serve(manager)
    command = [sys.executable, "-m", "aotllm", "bench", "serve", "--url", url, "--model", "m", "--num-prompts", "50"]
    command += ["--concurrency", "2", "--output-len", "3", "--range-ratio", "0", "--json", str(tmp_path / "r.json")]
    program = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        # The probe, two pairs that end, and one that does not.
        for ids in ([1], [2, 3], [4, 5]):
            manager.wait_until(lambda m, ids=ids: m.running == ids)
            manager.step(4)
        manager.wait_until(lambda m: m.running == [6, 7])
        program.send_signal(signal.SIGINT)
        output, errors = program.communicate(timeout=60)
    finally:
        program.kill()
    assert program.returncode == 130, errors
    assert "4 completed, 0 failed, 2 cut off" in output
    assert "interrupted: these are the requests that had ended" in output
    result = json.loads((tmp_path / "r.json").read_text())
    assert (result["completed"], result["cancelled"], result["interrupted"]) == (4, 2, True)
    manager.wait_until(lambda m: not m.running)  # and the server was told


@pytest.mark.parametrize(
    "arguments",
    [
        ["nope"],
        ["--nope"],
        ["ttft:5"],
        ["--goodput", "ttft:5", "nonsense"],
        ["--rate", "0"],
        ["--concurrency", "1,2", "--rate", "1,2"],
        ["--duration", "5s"],
        ["--soak", "5m"],
        ["--backend", "smtp"],
        ["--profile", "all"],
        ["--num-prompts", "-1"],
        ["--num-prompts", "many"],
        ["--url", "ftp://x"],
        ["--extra-body", "{"],
        ["--dataset", "x", "--profile", "api"],
        ["--plot", "x.pdf"],
        ["--plot", "/no/such/folder/x.svg"],
        ["--json", "/no/such/folder/x.json"],
        ["--metric-percentiles", "200"],
    ],
    ids=str,
)
def test_wrong_usage_is_2_and_one_line(aotllm: CommandLine, arguments: list[str]):
    outcome = aotllm("bench", "serve", *arguments)
    assert (outcome.code, outcome.out, outcome.err.count("\n")) == (InvalidRequest.exit_code, "", 1)
    assert outcome.err.startswith("error: ")


def test_help(aotllm: CommandLine):
    assert "serve" in aotllm("bench", "--help").out
    text = aotllm("bench", "serve", "--help").out
    for flag in ("--backend", "--rate", "--concurrency", "--soak", "--goodput", "--plot", "--json", "--ignore-eos"):
        assert flag in text
