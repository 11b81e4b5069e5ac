"""The whole product on a real model: Executor, command line, and server with the real OpenAI client."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import openai
import pytest

from aotllm import Executor, Request, SamplingParams
from aotllm.engines import Engine
from aotllm.errors import ContextTooLong, InvalidRequest, Overloaded

GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n    ",
    "Water boils at",
    "A list of colours: red,",
]


@pytest.fixture(scope="module")
def executor(smollm2: Engine) -> Iterator[Executor]:
    with Executor(smollm2, num_threads=2) as executor:
        yield executor


@pytest.fixture(scope="module")
def alone(executor: Executor) -> dict[str, str]:
    """The greedy answer to each prompt when nothing else runs."""
    return {prompt: executor.generate(prompt, GREEDY)[0].text for prompt in PROMPTS}


def test_the_model_knows_a_capital(alone: dict[str, str]) -> None:
    assert alone[PROMPTS[0]].startswith(" Paris")


def test_a_batch_says_what_each_prompt_says_alone(executor: Executor, alone: dict[str, str]) -> None:
    outputs = executor.generate(PROMPTS * 4, GREEDY)
    assert [o.text for o in outputs] == [alone[p] for p in PROMPTS * 4]


def test_streaming_adds_up(executor: Executor, alone: dict[str, str]) -> None:
    handle = executor.submit(Request(prompt=PROMPTS[1], sampling=GREEDY))
    outputs = list(handle)
    assert "".join(o.text for o in outputs) == alone[PROMPTS[1]] == handle.result().text
    assert [o.finish_reason for o in outputs[:-1]] == [None] * (len(outputs) - 1)
    assert outputs[-1].finish_reason == "length"


def test_asyncio(executor: Executor, alone: dict[str, str]) -> None:
    async def main() -> list[str]:
        outputs = await asyncio.gather(*(executor.generate_async(prompt, GREEDY) for prompt in PROMPTS))
        return [batch[0].text for batch in outputs]

    assert asyncio.run(main()) == [alone[p] for p in PROMPTS]


def test_seeds_repeat_in_any_company(executor: Executor) -> None:
    sampling = SamplingParams(temperature=1.0, top_p=0.95, seed=7, max_tokens=24)
    first = executor.generate(PROMPTS[0], sampling)[0].text
    again = executor.generate([*PROMPTS[1:], PROMPTS[0]], sampling)[-1].text
    other = executor.generate(PROMPTS[0], sampling.replace(seed=8))[0].text
    assert first == again != other


def test_stop_strings_and_tokens(executor: Executor, alone: dict[str, str]) -> None:
    text = alone[PROMPTS[1]]
    stop = text[10:14]
    output = executor.generate(PROMPTS[1], GREEDY.replace(stop=(stop,)))[0]
    assert output.text == text[: text.index(stop)]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)

    token = executor.generate(PROMPTS[1], GREEDY)[0].token_ids[5]
    output = executor.generate(PROMPTS[1], GREEDY.replace(stop_token_ids=(token,)))[0]
    assert (output.finish_reason, output.stop_reason, output.token_ids[-1]) == ("stop", token, token)


def test_chat_ends_by_itself(executor: Executor) -> None:
    messages = [{"role": "user", "content": "Say hello."}]
    output = executor.submit(Request(messages=messages, sampling=GREEDY.replace(max_tokens=200))).result()
    assert output.finish_reason == "stop"
    assert "<|im_end|>" not in output.text


def test_cancelled_requests_leave_the_others_alone(executor: Executor, alone: dict[str, str]) -> None:
    doomed = [executor.submit(Request(prompt=p, sampling=GREEDY.replace(max_tokens=1500))) for p in PROMPTS]
    kept = executor.submit(Request(prompt=PROMPTS[2], sampling=GREEDY))
    for handle in doomed:
        handle.cancel()
    assert [handle.result().finish_reason for handle in doomed] == ["cancelled"] * len(doomed)
    assert kept.result().text == alone[PROMPTS[2]]


def test_limits_are_refused_at_once(executor: Executor) -> None:
    with pytest.raises(ContextTooLong, match="maximum context length is 2048 tokens"):
        executor.submit(Request(prompt_token_ids=[5] * 3000, sampling=GREEDY))
    with pytest.raises(InvalidRequest, match="from 0 to 49151"):
        executor.submit(Request(prompt_token_ids=[10**6], sampling=GREEDY))


def test_shutdown_with_requests_in_flight(smollm2: Engine) -> None:
    with Executor(smollm2, max_queue_size=2, max_batch_size=2) as executor:
        long = GREEDY.replace(max_tokens=1500, ignore_eos=True)
        handles = [executor.submit(Request(prompt=p, sampling=long)) for p in PROMPTS[:4]]
        with pytest.raises(Overloaded):
            executor.submit(Request(prompt=PROMPTS[4], sampling=long))
    assert [handle.result().finish_reason for handle in handles] == ["cancelled"] * 4


def cli(*arguments: str | Path, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "aotllm", *map(str, arguments)]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=120, check=True)


def test_run_streams_and_reports(smollm2: Engine, alone: dict[str, str]) -> None:
    flags = ("--raw", "--max-tokens", "24", "--temperature", "0")
    done = cli("run", smollm2.path, "-p", PROMPTS[0], *flags)
    assert done.stdout.strip() == alone[PROMPTS[0]].strip()
    assert "tokens/s" in done.stderr
    record = json.loads(cli("run", smollm2.path, "-p", PROMPTS[0], *flags, "--json").stdout)
    assert record["text"] == alone[PROMPTS[0]]
    assert record["finish_reason"] == "length"


def test_interactive_chat(smollm2: Engine) -> None:
    done = cli("run", smollm2.path, "--temperature", "0", "--max-tokens", "20", stdin="My name is Ada.\n/exit\n")
    assert done.stdout.strip()


def test_inspect(smollm2: Engine) -> None:
    record = json.loads(cli("inspect", smollm2.path, "--json").stdout)
    assert record["manifest"]["model"]["architecture"] == "llama"
    table = cli("inspect", smollm2.path).stdout
    for word in ("norm_qkv_rope", "paged_attention", "linear_residual", "norm_swiglu", "q4_1"):
        assert word in table


@dataclass(frozen=True)
class Server:
    process: subprocess.Popen[str]
    url: str
    model: str

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60)


@pytest.fixture(scope="module")
def server(smollm2: Engine) -> Iterator[Server]:
    command = [sys.executable, "-m", "aotllm", "serve", str(smollm2.path), "--http-port", "0", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        ready = json.loads(process.stdout.readline())
        yield Server(process, ready["url"], ready["models"][0])
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()


def test_openai_client_completions(server: Server, alone: dict[str, str]) -> None:
    client = server.client()
    assert [m.id for m in client.models.list()] == [server.model]

    def complete(prompt: str) -> str:
        answer = client.completions.create(model=server.model, prompt=prompt, max_tokens=24, temperature=0)
        return answer.choices[0].text

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(complete, PROMPTS * 3)) == [alone[p] for p in PROMPTS * 3]


def test_openai_client_chat_stream(server: Server) -> None:
    client = server.client()
    question = {
        "model": server.model,
        "messages": [{"role": "user", "content": "What is the capital of France, and what is it famous for?"}],
        "temperature": 0,
        "max_tokens": 40,
    }
    whole = client.chat.completions.create(**question)
    chunks = list(client.chat.completions.create(**question, stream=True, stream_options={"include_usage": True}))
    assert "Paris" in whole.choices[0].message.content
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    usage = chunks[-1].usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (whole.usage.prompt_tokens, whole.usage.completion_tokens)
    assert usage.prompt_tokens_details.cached_tokens == usage.prompt_tokens - 1  # the second time all but the last
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(**{**question, "model": "gpt-17"})
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        client.chat.completions.create(**{**question, "max_tokens": 10**6})
