"""A real model behind Triton's client: what it says is what the executor says, over every way."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import tritonclient.grpc as triton

from aotllm import Executor, Request, SamplingParams
from aotllm.engines import Engine
from tests.aotllm.serving.kserve_server import KserveServer
from tests.aotllm.serving.kserve_tensors import prompt, tensors

PROMPT = "The capital of France is"
TOKENS = 16


@pytest.fixture(scope="module")
def served(smollm2: Engine) -> Iterator[tuple[Executor, KserveServer]]:
    with Executor(smollm2) as executor:
        server = KserveServer({"smol": executor}, exclude_input_in_output=True)
        yield executor, server
        server.stop()


@pytest.fixture(scope="module")
def expected(served: tuple[Executor, KserveServer]) -> Any:
    sampling = SamplingParams(max_tokens=TOKENS, temperature=0.0, logprobs=0)
    return served[0].generate([Request(prompt=PROMPT, sampling=sampling)])[0]


def test_whole(served: tuple[Executor, KserveServer], expected: Any):
    client = triton.InferenceServerClient(served[1].grpc)
    result = client.infer("ensemble", prompt(triton, PROMPT, TOKENS, temperature=0.0, return_log_probs=True))
    assert result.as_numpy("text_output")[0].decode() == expected.text
    logprobs = [entry.logprob for entry in expected.logprobs]
    assert result.as_numpy("output_log_probs").ravel().tolist() == pytest.approx(logprobs, abs=1e-6)


def test_streamed(served: tuple[Executor, KserveServer], expected: Any):
    client = triton.InferenceServerClient(served[1].grpc)
    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
    client.start_stream(lambda result, error: answers.put((result, error)))
    client.async_stream_infer("ensemble", prompt(triton, PROMPT, TOKENS, temperature=0.0, stream=True))
    client.stop_stream()
    pieces = [result.as_numpy("text_output")[0].decode() for result, _ in answers.queue]
    assert "".join(pieces) == expected.text
    assert len(pieces) > TOKENS // 2


def test_token_ids(served: tuple[Executor, KserveServer], expected: Any):
    client = triton.InferenceServerClient(served[1].grpc)
    ids = list(expected.prompt_token_ids)
    inputs = tensors(triton, input_ids=[ids], input_lengths=len(ids), request_output_len=TOKENS, temperature=0.0)
    result = client.infer("tensorrt_llm", inputs)
    assert result.as_numpy("output_ids").ravel().tolist() == list(expected.token_ids)


def test_generate(served: tuple[Executor, KserveServer], expected: Any):
    url = f"http://{served[1].http}/v2/models/smol/generate"
    body = {"text_input": PROMPT, "parameters": {"max_tokens": TOKENS, "temperature": 0}}
    assert httpx.post(url, json=body, timeout=60).json()["text_output"] == expected.text


def test_guided(served: tuple[Executor, KserveServer]):
    client = triton.InferenceServerClient(served[1].grpc)
    guide = {"guided_decoding_guide_type": "regex", "guided_decoding_guide": "(red|green|blue)"}
    result = client.infer("smol", prompt(triton, "My favourite colour:", TOKENS, **guide))
    assert result.as_numpy("text_output")[0].decode() in ("red", "green", "blue")
