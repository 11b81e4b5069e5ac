"""The clients that people have, unmodified, against `aotllm serve` on SmolLM2 with two front ends."""

from __future__ import annotations

import asyncio
import json
import queue
import subprocess
from collections.abc import Iterator
from typing import Any

import numpy as np
import openai
import pydantic
import pytest
import tritonclient.grpc
import tritonclient.grpc.aio
import tritonclient.http

from aotllm import Executor, Request, SamplingParams
from aotllm.engines import Engine
from tests.integration.running_server import RunningServer, running_server

PROMPT = "The capital of France is"
HI = [{"role": "user", "content": "Name a sea."}]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12}


class Person(pydantic.BaseModel):
    name: str
    age: int


@pytest.fixture(scope="module")
def server(smollm2: Engine) -> Iterator[RunningServer]:
    with running_server(smollm2.path, frontends=2, served_model_name="smollm2", api_key="key") as server:
        yield server


@pytest.fixture(scope="module")
def expected(smollm2: Engine) -> dict[str, str]:
    """What the engine itself says, greedily: to PROMPT and to HI."""
    sampling = SamplingParams(**GREEDY)
    with Executor(smollm2) as executor:
        requests = [Request(prompt=PROMPT, sampling=sampling), Request(messages=HI, sampling=sampling)]
        return dict(zip(("prompt", "chat"), (result.text for result in executor.generate(requests)), strict=True))


@pytest.fixture
def client(server: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="key", max_retries=0, timeout=60)


# --- openai -----------------------------------------------------------------------------------------------------------


def test_openai(client: openai.OpenAI, expected: dict[str, str]):
    assert [model.id for model in client.models.list()] == ["smollm2"]
    assert client.completions.create(model="smollm2", prompt=PROMPT, **GREEDY).choices[0].text == expected["prompt"]
    chat = client.chat.completions.create(model="smollm2", messages=HI, **GREEDY)
    assert chat.choices[0].message.content == expected["chat"]
    chunks = client.chat.completions.create(model="smollm2", messages=HI, stream=True, **GREEDY)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected["chat"]
    with client.chat.completions.stream(model="smollm2", messages=HI, temperature=0) as stream:
        assert (stream.get_final_completion().choices[0].message.content or "").startswith(expected["chat"])


def test_openai_async(server: RunningServer, expected: dict[str, str]):
    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="key", timeout=60) as client:

            async def one() -> str:
                stream = await client.chat.completions.create(model="smollm2", messages=HI, stream=True, **GREEDY)
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            return await asyncio.gather(*(one() for _ in range(8)))

    assert asyncio.run(ask()) == [expected["chat"]] * 8


def test_openai_parse(client: openai.OpenAI):
    answer = client.chat.completions.parse(
        model="smollm2", messages=[{"role": "user", "content": "Invent a person."}], response_format=Person, seed=1
    )
    assert isinstance(answer.choices[0].message.parsed, Person)


def test_openai_tools(client: openai.OpenAI):
    tool = openai.pydantic_function_tool(Person, name="remember")
    answer = client.chat.completions.parse(
        model="smollm2", messages=HI, tools=[tool], tool_choice="required", temperature=0, max_tokens=200
    )
    (call,) = (answer.choices[0].message.tool_calls or [])[:1]
    assert call.function.name == "remember"
    assert isinstance(call.function.parsed_arguments, Person)


def test_openai_responses_and_embeddings(client: openai.OpenAI, expected: dict[str, str]):
    answer = client.responses.create(model="smollm2", input="Name a sea.", temperature=0, max_output_tokens=12)
    assert answer.output_text == expected["chat"]
    vectors = client.embeddings.create(model="smollm2", input=["sea", "ocean", "tax return"]).data
    sea, ocean, tax = (np.array(item.embedding) for item in vectors)
    assert sea @ ocean > sea @ tax
    assert np.linalg.norm(sea) == pytest.approx(1, abs=1e-5)


# --- langchain, litellm, curl -----------------------------------------------------------------------------------------


def test_langchain(server: RunningServer, expected: dict[str, str]):
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(
        model="smollm2", base_url=f"{server.url}/v1", api_key="key", temperature=0, max_tokens=12, max_retries=0
    )
    assert model.invoke("Name a sea.").content == expected["chat"]
    assert "".join(str(chunk.content) for chunk in model.stream("Name a sea.")) == expected["chat"]
    longer = model.model_copy(update={"max_tokens": 200})
    assert isinstance(longer.with_structured_output(Person).invoke("Invent a person."), Person)
    bound = longer.bind_tools([Person], tool_choice="required")
    assert bound.invoke("Invent a person.").tool_calls[0]["name"] == "Person"


def test_litellm(server: RunningServer, expected: dict[str, str]):
    import litellm

    options: dict[str, Any] = {"model": "openai/smollm2", "api_base": f"{server.url}/v1", "api_key": "key"}
    answer = litellm.completion(**options, messages=HI, **GREEDY)
    assert answer.choices[0].message.content == expected["chat"]
    chunks = litellm.completion(**options, messages=HI, stream=True, **GREEDY)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected["chat"]
    with pytest.raises(litellm.BadRequestError):
        litellm.completion(**options, messages=HI, temperature=-1)


def test_curl(server: RunningServer, expected: dict[str, str]):
    body = json.dumps({"prompt": PROMPT, "stream": True, **GREEDY})
    command = ["curl", "-sN", f"{server.url}/v1/completions", "-H", "Authorization: Bearer key"]
    ran = subprocess.run(
        [*command, "-H", "Content-Type: application/json", "-d", body], capture_output=True, text=True, check=True
    )
    *events, done = [line.removeprefix("data: ") for line in ran.stdout.splitlines() if line]
    assert done == "[DONE]"
    assert "".join(json.loads(event)["choices"][0]["text"] for event in events) == expected["prompt"]


# --- tritonclient -----------------------------------------------------------------------------------------------------

KEY = {"authorization": "Bearer key"}  # copied for each call: the HTTP client adds headers of its own


def inputs_of(module: Any, stream: bool = False) -> list[Any]:
    values = {
        "text_input": (np.array([[PROMPT.encode()]], object), "BYTES"),
        "max_tokens": (np.array([[12]], np.int32), "INT32"),
        "temperature": (np.array([[0]], np.float32), "FP32"),
        "exclude_input_in_output": (np.array([[True]]), "BOOL"),
        "stream": (np.array([[stream]]), "BOOL"),
    }
    inputs = []
    for name, (value, dtype) in values.items():
        inputs.append(module.InferInput(name, value.shape, dtype))
        inputs[-1].set_data_from_numpy(value)
    return inputs


def text_of(result: Any) -> str:
    return str(result.as_numpy("text_output").flatten()[0].decode())


@pytest.mark.parametrize("model", ["ensemble", "smollm2"])
def test_tritonclient(server: RunningServer, expected: dict[str, str], model: str):
    grpc = tritonclient.grpc.InferenceServerClient(server.grpc)
    http = tritonclient.http.InferenceServerClient(server.url.removeprefix("http://"))
    for client, module in ((grpc, tritonclient.grpc), (http, tritonclient.http)):
        assert client.is_server_live()
        assert client.is_model_ready(model, headers=dict(KEY))
        assert text_of(client.infer(model, inputs_of(module), headers=dict(KEY))) == expected["prompt"]


def test_tritonclient_streams(server: RunningServer, expected: dict[str, str]):
    results: queue.Queue[tuple[Any, Any]] = queue.Queue()
    with tritonclient.grpc.InferenceServerClient(server.grpc) as client:
        client.start_stream(lambda result, error: results.put((result, error)), headers=dict(KEY))
        client.async_stream_infer(
            "ensemble", inputs_of(tritonclient.grpc, stream=True), enable_empty_final_response=True, request_id="7"
        )
        texts: list[str] = []
        while True:
            result, error = results.get(timeout=60)
            assert error is None
            response = result.get_response()
            assert response.id == "7"
            if response.outputs:
                texts.append(text_of(result))
            if response.parameters["triton_final_response"].bool_param:
                break
    assert len(texts) > 1
    assert "".join(texts) == expected["prompt"]


def test_tritonclient_tensors_of_ids(server: RunningServer, smollm2: Engine, expected: dict[str, str]):
    ids = np.array([smollm2.tokenizer().encode(PROMPT)], np.int32)
    values = {
        "input_ids": (ids, "INT32"),
        "input_lengths": (np.array([[ids.size]], np.int32), "INT32"),
        "request_output_len": (np.array([[12]], np.int32), "INT32"),
        "temperature": (np.array([[0]], np.float32), "FP32"),
        "exclude_input_in_output": (np.array([[True]]), "BOOL"),
    }
    inputs = []
    for name, (value, dtype) in values.items():
        inputs.append(tritonclient.grpc.InferInput(name, value.shape, dtype))
        inputs[-1].set_data_from_numpy(value)
    with tritonclient.grpc.InferenceServerClient(server.grpc) as client:
        result = client.infer("tensorrt_llm", inputs, headers=dict(KEY))
    length = int(result.as_numpy("sequence_length").flatten()[0])
    output = result.as_numpy("output_ids").flatten()[:length]
    assert smollm2.tokenizer().decode(output.tolist()) == expected["prompt"]


def test_a_key_is_asked_for_by_all_protocols(server: RunningServer):
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0).models.list()
    with pytest.raises(tritonclient.grpc.InferenceServerException, match="UNAUTHENTICATED"):
        tritonclient.grpc.InferenceServerClient(server.grpc).infer("ensemble", inputs_of(tritonclient.grpc))
    with pytest.raises(tritonclient.http.InferenceServerException):
        http = tritonclient.http.InferenceServerClient(server.url.removeprefix("http://"))
        http.infer("ensemble", inputs_of(tritonclient.http))
