"""An exported repository inside the real Triton: SmolLM2 on the CPU, asked by NVIDIA's own client."""

from __future__ import annotations

import json
import queue
import re
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from aotllm import Executor, Request, SamplingParams
from aotllm.engines import Engine
from aotllm.export_triton.repository_writer import ExportOptions, export_repository

grpcclient = pytest.importorskip("tritonclient.grpc")

from tests.integration import real_triton  # noqa: E402

PROMPT = "The capital of France is"
NUM_TOKENS = 12
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS)
TYPES = {"BYTES": np.object_, "INT32": np.int32, "FP32": np.float32, "BOOL": np.bool_, "UINT64": np.uint64}


@dataclass
class Outcome:
    responses: list[Any]
    error: Any = None

    def texts(self) -> list[str]:
        return [r.as_numpy("text_output")[0].decode() for r in self.responses]

    def column(self, name: str) -> list[Any]:
        return [r.as_numpy(name) for r in self.responses]


def tensor(name: str, kind: str, rows: list[list[Any]]) -> Any:
    array = np.array(rows, dtype=TYPES[kind])
    given = grpcclient.InferInput(name, list(array.shape), kind)
    given.set_data_from_numpy(array)
    return given


def text_inputs(*prompts: str, max_tokens: int = NUM_TOKENS, stream: bool = False) -> list[Any]:
    return [
        tensor("text_input", "BYTES", [[prompt.encode()] for prompt in prompts]),
        tensor("max_tokens", "INT32", [[max_tokens]] * len(prompts)),
        tensor("stream", "BOOL", [[stream]] * len(prompts)),
    ]


class Stream:
    """One bidirectional call, on which any number of requests are sent."""

    def __init__(self, server: real_triton.Triton) -> None:
        self._results: queue.Queue[tuple[Any, Any]] = queue.Queue()
        self._client = grpcclient.InferenceServerClient(f"127.0.0.1:{server.grpc_port}")
        self._client.start_stream(callback=lambda result, error: self._results.put((result, error)))

    def send(self, model: str, inputs: list[Any], **options: Any) -> None:
        self._client.async_stream_infer(model, inputs, enable_empty_final_response=True, **options)

    def take(self) -> tuple[Any, Any]:
        return self._results.get(timeout=60)

    def outcomes(self, count: int) -> dict[str, Outcome]:
        """All responses until `count` requests have ended, by request id."""
        outcomes: dict[str, Outcome] = {}
        while count:
            result, error = self.take()
            if error is not None:
                outcomes.setdefault("", Outcome([])).error = error
                count -= 1
                continue
            response = result.get_response()
            outcome = outcomes.setdefault(response.id, Outcome([]))
            if response.outputs:
                outcome.responses.append(result)
            count -= response.parameters["triton_final_response"].bool_param
        return outcomes

    def close(self, cancel: bool = False) -> None:
        self._client.stop_stream(cancel_requests=cancel)
        self._client.close()


def ask(server: real_triton.Triton, model: str, inputs: list[Any], **options: Any) -> Outcome:
    stream = Stream(server)
    stream.send(model, inputs, **options)
    (outcome,) = stream.outcomes(1).values()
    stream.close()
    return outcome


@pytest.fixture(scope="module")
def triton(smollm2: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[real_triton.Triton]:
    scratch = tmp_path_factory.mktemp("triton")
    env = str(real_triton.environment())
    small = {"num_threads": "1", "exclude_input_in_output": "true"}
    streaming = ExportOptions(name="smollm2", execution_env=env, engine_files="path", parameters=small)
    plain = ExportOptions(
        name="plain", execution_env=env, engine_files="copy", decoupled=False, aliases=(), parameters=small
    )
    export_repository(smollm2.path, scratch / "repository", streaming)
    export_repository(smollm2.path, scratch / "repository", plain)
    with real_triton.running(scratch / "repository", scratch) as server:
        yield server


@pytest.fixture(scope="module")
def executor(smollm2: Engine) -> Iterator[Executor]:
    with Executor(smollm2, num_threads=1) as executor:
        yield executor


@pytest.fixture(scope="module")
def expected(executor: Executor) -> Any:
    """What our own executor says to the prompt."""
    return executor.generate(Request(prompt=PROMPT, sampling=GREEDY))[0]


@pytest.mark.parametrize("model", ["smollm2", "ensemble", "tensorrt_llm_bls"])
@pytest.mark.parametrize("stream", [False, True])
def test_text_models_give_the_executors_greedy_answer(
    triton: real_triton.Triton, expected: Any, model: str, stream: bool
):
    outcome = ask(triton, model, text_inputs(PROMPT, stream=stream))
    assert outcome.error is None
    assert "".join(outcome.texts()) == expected.text
    assert len(outcome.responses) == (NUM_TOKENS if stream else 1)


@pytest.mark.parametrize("stream", [False, True])
def test_token_ids_in_and_out(triton: real_triton.Triton, expected: Any, stream: bool):
    ids = list(expected.prompt_token_ids)
    inputs = [
        tensor("input_ids", "INT32", [ids]),
        tensor("input_lengths", "INT32", [[len(ids)]]),
        tensor("request_output_len", "INT32", [[NUM_TOKENS]]),
        tensor("streaming", "BOOL", [[stream]]),
        tensor("return_log_probs", "BOOL", [[True]]),
    ]
    outcome = ask(triton, "tensorrt_llm", inputs)
    pieces = outcome.column("output_ids")
    assert np.concatenate(pieces, axis=2).reshape(-1).tolist() == list(expected.token_ids)
    assert all(piece.shape[:2] == (1, 1) for piece in pieces)
    lengths = np.concatenate(outcome.column("sequence_length")).reshape(-1).tolist()
    assert lengths == ([1] * NUM_TOKENS if stream else [NUM_TOKENS])
    logprobs = np.concatenate(outcome.column("output_log_probs"), axis=2).reshape(-1)
    assert np.sum(logprobs) == pytest.approx(outcome.column("cum_log_probs")[-1].item(), rel=1e-4)


def test_many_requests_are_in_flight_on_one_stream(triton: real_triton.Triton, executor: Executor):
    prompts = {str(i): f"{i}, {i + 1}, {i + 2}," for i in range(8)}
    stream = Stream(triton)
    for request_id, prompt in prompts.items():
        stream.send("ensemble", text_inputs(prompt, stream=True), request_id=request_id)
    outcomes = stream.outcomes(len(prompts))
    stream.close()
    whole = executor.generate([Request(prompt=prompt, sampling=GREEDY) for prompt in prompts.values()])
    assert {i: "".join(o.texts()) for i, o in outcomes.items()} == {
        i: result.text for i, result in zip(prompts, whole, strict=True)
    }


def test_a_batch_has_a_response_for_each_row(triton: real_triton.Triton, executor: Executor):
    prompts = [PROMPT, "One, two, three,"]
    outcome = ask(triton, "ensemble", text_inputs(*prompts))
    whole = executor.generate(prompts, GREEDY)
    rows = {int(index.item()): text for index, text in zip(outcome.column("batch_index"), outcome.texts(), strict=True)}
    assert rows == {i: result.text for i, result in enumerate(whole)}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("model", ["smollm2", "ensemble"])
@pytest.mark.parametrize("streamed", [True, False])
def test_cancelling_ends_the_generation(triton: real_triton.Triton, model: str, streamed: bool):
    most = 1500
    before = metrics(triton)
    stream = Stream(triton)
    inputs = [*text_inputs(PROMPT, max_tokens=most, stream=streamed), tensor("end_id", "INT32", [[-1]])]
    stream.send(model, inputs)
    while metrics(triton)["num_requests_in_flight"] == 0:
        time.sleep(0.05)
    stream.close(cancel=True)
    while metrics(triton)["num_requests_in_flight"] > 0:
        time.sleep(0.05)
    after = metrics(triton)
    assert after["cancelled"] - before["cancelled"] == 1
    assert after["generation_tokens_total"] - before["generation_tokens_total"] < most


def metrics(triton: real_triton.Triton) -> dict[str, float]:
    """Those of the engine, by name or outcome."""
    with urllib.request.urlopen(f"http://127.0.0.1:{triton.metrics_port}/metrics", timeout=60) as response:
        text = response.read().decode()
    found = re.findall(r'^aotllm:(\w+)\{(?=.*model="smollm2")(?:.*outcome="(\w+)")?.*\} (\S+)$', text, re.MULTILINE)
    return {outcome or name: float(value) for name, outcome, value in found}


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ([tensor("temperature", "FP32", [[-1.0]])], "temperature must be a number ≥ 0"),
        ([tensor("return_context_logits", "BOOL", [[True]])], "return_context_logits is not supported here"),
    ],
)
@pytest.mark.parametrize("model", ["smollm2", "ensemble"])
def test_bad_inputs_are_refused_by_name(triton: real_triton.Triton, model: str, inputs: list[Any], message: str):
    outcome = ask(triton, model, [*text_inputs(PROMPT), *inputs])
    assert message in outcome.error.message()
    assert ask(triton, model, text_inputs(PROMPT)).error is None  # nobody else is touched


def test_plain_calls_answer_in_one_response(triton: real_triton.Triton, executor: Executor):
    client = grpcclient.InferenceServerClient(f"127.0.0.1:{triton.grpc_port}")
    prompts = [PROMPT, "One, two, three,"]
    result = client.infer("plain", text_inputs(*prompts))
    whole = executor.generate(prompts, GREEDY)
    assert [text.decode() for text in result.as_numpy("text_output")] == [r.text for r in whole]
    with pytest.raises(Exception, match="answers in one piece") as refused:
        client.infer("plain", text_inputs(PROMPT, stream=True))
    assert refused.value.status() == "StatusCode.INVALID_ARGUMENT"


def test_generate_endpoint(triton: real_triton.Triton, expected: Any):
    body = json.dumps({"text_input": PROMPT, "max_tokens": NUM_TOKENS}).encode()
    url = f"http://127.0.0.1:{triton.http_port}/v2/models/ensemble/generate"
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        assert json.load(response)["text_output"] == expected.text
