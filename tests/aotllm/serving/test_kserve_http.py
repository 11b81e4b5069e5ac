"""KServe over HTTP: Triton's own client against a server on a socket, and the JSON routes by hand."""

from __future__ import annotations

import asyncio
import gzip
import itertools
import json
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.http as triton
import tritonclient.http.aio as triton_aio
from tritonclient.utils import InferenceServerException

from aotllm import Executor
from aotllm.errors import Internal
from tests.aotllm.byte_tokenizer import EOS
from tests.aotllm.fake_manager import FakeManager, echoes, says
from tests.aotllm.serving.http_client import Ask, Client
from tests.aotllm.serving.kserve_server import KserveServer, Serve
from tests.aotllm.serving.kserve_tensors import prompt

INPUTS = [
    {"name": "text_input", "datatype": "BYTES", "shape": [1, 1], "data": ["hi "]},
    {"name": "max_tokens", "datatype": "INT32", "shape": [1, 1], "data": [[9]]},
]


def endless(request: object) -> Iterator[int]:
    return itertools.cycle(b"x")


def connect(server: KserveServer) -> triton.InferenceServerClient:
    return triton.InferenceServerClient(server.http)


def text(result: Any) -> list[str]:
    return [one.decode() if isinstance(one, bytes) else one for one in result.as_numpy("text_output")]


# ---- Triton's client ------------------------------------------------------------------------------------------------


def test_the_client_infers(kserve: Serve):
    client = connect(kserve(FakeManager(says("Grüße, 🌊!"))))
    result = client.infer("ensemble", prompt(triton, "hi "), request_id="q7", model_version="1")
    assert text(result) == ["hi Grüße, 🌊!"]
    response = result.get_response()
    assert (response["model_name"], response["model_version"], response["id"]) == ("ensemble", "1", "q7")


@pytest.mark.parametrize("binary_in", [True, False])
@pytest.mark.parametrize("binary_out", [True, False, None])
@pytest.mark.parametrize("compression", [None, "gzip", "deflate"])
def test_data_as_json_and_as_bytes(kserve: Serve, binary_in: bool, binary_out: bool | None, compression: str | None):
    client = connect(kserve(FakeManager(echoes)))
    arrays = {"input_ids": [[1, 2, 3]], "input_lengths": [[3]], "request_output_len": [[9]]}
    inputs = []
    for name, values in arrays.items():
        tensor = triton.InferInput(name, list(np.shape(values)), "INT32")
        tensor.set_data_from_numpy(np.array(values, np.int32), binary_data=binary_in)
        inputs.append(tensor)
    names = ("output_ids", "sequence_length", "cum_log_probs")
    outputs = None if binary_out is None else [triton.InferRequestedOutput(n, binary_data=binary_out) for n in names]
    result = client.infer("tensorrt_llm", inputs, outputs=outputs, request_compression_algorithm=compression)
    assert result.as_numpy("output_ids").tolist() == [[[1, 2, 3, 1, 2, 3, EOS]]]
    assert result.as_numpy("sequence_length").tolist() == [[7]]
    if outputs:
        assert result.as_numpy("cum_log_probs").tolist() == [[-2.0]]


def test_several_prompts(kserve: Serve):
    client = connect(kserve(FakeManager(echoes)))
    result = client.infer("m", prompt(triton, [["a"], ["bc"]], 9, exclude_input_in_output=True))
    assert text(result) == ["a", "bc"]


def test_asynchronous_calls(kserve: Serve):
    server = kserve(FakeManager(says("sea")))
    calls = [connect(server).async_infer("m", prompt(triton, str(i))) for i in range(3)]
    assert [text(call.get_result()) for call in calls] == [["0sea"], ["1sea"], ["2sea"]]

    async def call() -> Any:
        async with triton_aio.InferenceServerClient(server.http) as client:
            return await client.infer("m", prompt(triton))

    assert text(asyncio.run(call())) == ["hisea"]


def test_the_client_asks_about_server_and_models(kserve: Serve):
    server = kserve(FakeManager())
    client = connect(server)
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("m")
    assert client.is_model_ready("m", "1")
    assert not client.is_model_ready("other")
    assert client.get_server_metadata()["name"] == "aotllm"
    assert client.get_model_metadata("m", "1")["inputs"][0] == {
        "name": "text_input",
        "datatype": "BYTES",
        "shape": [-1, 1],
    }
    config = client.get_model_config("tensorrt_llm")
    assert config["input"][0] == {"name": "input_ids", "data_type": "TYPE_INT32", "dims": [-1], "optional": False}
    server.context.draining = True
    assert client.is_server_live()
    assert not client.is_server_ready()


def test_the_repository(kserve: Serve, start: Callable[..., Executor]):
    client = connect(kserve(FakeManager(says("old")), make=lambda name: start(FakeManager(says("new")))))
    names = ["m", "ensemble", "tensorrt_llm_bls", "tensorrt_llm"]
    assert [(m["name"], m["state"]) for m in client.get_model_repository_index()] == [(n, "READY") for n in names]
    client.unload_model("m")
    assert {m["state"] for m in client.get_model_repository_index()} == {"UNAVAILABLE"}
    with pytest.raises(InferenceServerException, match="load it first") as unavailable:
        client.infer("m", prompt(triton))
    assert unavailable.value.status() == "503"
    client.load_model("m")
    assert text(client.infer("m", prompt(triton))) == ["hinew"]
    with pytest.raises(InferenceServerException, match="Known: m"):
        client.load_model("other")
    with pytest.raises(InferenceServerException, match="loading takes no config"):
        client.load_model("m", config="{}")


@pytest.mark.parametrize("parameters", [1, True, "config", ["config"], 1.5])
def test_parameters_of_a_load_are_an_object(ask: Ask, parameters: Any):
    response = ask(FakeManager()).post("/v2/repository/models/m/load", {"parameters": parameters})
    assert response.status_code == 400
    assert "parameters must be an object" in response.json()["error"]


@pytest.mark.parametrize(
    ("values", "status", "message"),
    [
        ({"temperature": -1.0}, "400", "temperature must be"),
        ({"lora_task_id": 1}, "400", "lora_task_id is not supported"),
        ({"nothing": 1}, "400", "no input 'nothing'"),
        ({"stream": True}, "501", "use generate_stream"),
    ],
)
def test_the_client_raises_its_own_errors(kserve: Serve, values: dict[str, Any], status: str, message: str):
    with pytest.raises(InferenceServerException, match=message) as error:
        connect(kserve(FakeManager())).infer("m", prompt(triton, **values))
    assert error.value.status() == status


def test_what_is_not_implemented_says_so(kserve: Serve):
    client = connect(kserve(FakeManager()))
    assert client.get_cuda_shared_memory_status() == []
    client.unregister_cuda_shared_memory()
    for call in (client.get_trace_settings, client.get_log_settings):
        with pytest.raises(InferenceServerException, match="set when the server is started") as error:
            call()
        assert error.value.status() == "501"


def test_a_client_that_leaves_frees_its_requests(kserve: Serve):
    manager = FakeManager(endless, stepping="by hand")
    url = f"http://{kserve(manager).http}/v2/models/m"

    async def leave() -> None:
        async with httpx.AsyncClient(timeout=60) as client:
            whole = asyncio.create_task(client.post(f"{url}/infer", json={"inputs": INPUTS}))
            async with client.stream("POST", f"{url}/generate_stream", json={"text_input": "a", "max_tokens": 9}):
                await asyncio.to_thread(manager.wait_until, lambda m: len(m.running) == 2)
            whole.cancel()

    asyncio.run(leave())
    manager.wait_until(lambda m: not m.running)
    assert set(manager.cancelled) == {1, 2}


# ---- Bodies by hand -------------------------------------------------------------------------------------------------


def test_plain_json(ask: Ask):
    response = ask(FakeManager(says("sea"))).post("/v2/models/m/infer", {"id": "7", "inputs": INPUTS})
    assert response.json() == {
        "id": "7",
        "model_name": "m",
        "model_version": "1",
        "outputs": [{"name": "text_output", "datatype": "BYTES", "shape": [1], "data": ["hi sea"]}],
    }


def infer(client: Client, body: Any, tail: bytes = b"", **headers: str) -> httpx.Response:
    head = body if isinstance(body, bytes) else json.dumps(body).encode()
    return client.request("POST", "/v2/models/m/infer", content=head + tail, headers=headers)


BINARY = {"name": "max_tokens", "datatype": "INT32", "shape": [1]}


@pytest.mark.parametrize(
    ("body", "tail", "headers", "message"),
    [
        (b"{", b"", {}, "not valid JSON"),
        (b"[]", b"", {}, "must be a JSON object"),
        (b"\xff", b"", {}, "not valid JSON"),
        (b"[" * 40_000, b"", {}, "not valid JSON"),
        ({"inputs": 1}, b"", {}, "inputs must be a list of objects"),
        ({"inputs": [1]}, b"", {}, "inputs must be a list of objects"),
        ({"inputs": [{"name": 1}]}, b"", {}, "name must be a string"),
        ({"inputs": [{"name": "x", "shape": "1"}]}, b"", {}, "the shape must be a list"),
        ({"inputs": [INPUTS[0], {**BINARY, "shape": ["1"], "data": [1]}]}, b"", {}, "no integers"),
        ({"inputs": [INPUTS[0], {**BINARY, "shape": [True], "data": [1]}]}, b"", {}, "no integers"),
        ({"inputs": [INPUTS[0], {**BINARY, "shape": [-1], "data": [1]}]}, b"", {}, "no integers"),
        ({"inputs": [INPUTS[0], {**BINARY, "data": [1.5]}]}, b"", {}, "elements of type INT32, got 1.5"),
        ({"inputs": [INPUTS[0], {**BINARY, "data": [2**31]}]}, b"", {}, "out of the range"),
        ({"inputs": [INPUTS[0], {**BINARY, "data": [1, 2]}]}, b"", {}, "has 1 elements, got 2"),
        ({"inputs": [INPUTS[0], {**BINARY, "datatype": "INT64", "data": [1]}]}, b"", {}, "must be of type INT32"),
        ({"inputs": [INPUTS[0], {**BINARY, "parameters": 1}]}, b"", {}, "parameters must be an object"),
        ({"inputs": INPUTS, "id": 7}, b"", {}, "id must be a string"),
        ({"inputs": INPUTS, "parameters": [1]}, b"", {}, "parameters must be an object"),
        ({"inputs": INPUTS, "outputs": [{"name": "nothing"}]}, b"", {}, "no output 'nothing'"),
        (
            {"inputs": INPUTS, "outputs": [{"name": "text_output", "parameters": {"classification": 1}}]},
            b"",
            {},
            "classification",
        ),
        (
            {"inputs": INPUTS, "outputs": [{"name": "text_output", "parameters": {"binary_data": 1}}]},
            b"",
            {},
            "binary_data must be a boolean",
        ),
        ({"inputs": INPUTS}, b"", {"Inference-Header-Content-Length": "99999"}, "at most"),
        ({"inputs": INPUTS}, b"", {"Inference-Header-Content-Length": "-1"}, "must be an integer"),
        ({"inputs": INPUTS}, b"", {"Inference-Header-Content-Length": "x"}, "must be an integer"),
        ({"inputs": INPUTS}, b"", {"Inference-Header-Content-Length": "9" * 5000}, "must be an integer"),
        ({"inputs": INPUTS}, b"", {"Inference-Header-Content-Length": "0" * 5000}, "must be an integer"),
        ({"inputs": INPUTS}, b"", {"Inference-Header-Content-Length": "0" * 20 + "99999"}, "at most"),
        ({"inputs": INPUTS}, b"", {"Inference-Header-Content-Length": "3"}, "not valid JSON"),
        ({"inputs": INPUTS}, b"", {"Content-Encoding": "br"}, "must be gzip, deflate"),
        ({"inputs": INPUTS}, b"", {"Content-Encoding": "gzip"}, "no gzip data"),
        (gzip.compress(b"{}" * 100)[:-20], b"", {"Content-Encoding": "gzip"}, "no complete gzip data"),
        (zlib.compress(b" " * 100_000), b"", {"Content-Encoding": "deflate"}, "longer than 50000 bytes when unpacked"),
    ],
)
def test_a_wrong_body_is_refused(ask: Ask, body: Any, tail: bytes, headers: dict[str, str], message: str):
    response = infer(ask(FakeManager(), max_body_bytes=50_000), body, tail, **headers)
    assert (response.status_code, list(response.json())) == (400, ["error"])
    assert message in response.json()["error"]


@pytest.mark.parametrize(
    ("size", "tail", "message"),
    [
        (4, b"\1\0\0", "at most 3"),
        (-1, b"\1\0\0\0", "at most 4"),
        (2**63, b"\1\0\0\0", "at most 4"),
        (True, b"\1\0\0\0", "at most 4"),
        (3, b"\1\0\0", "has 4 bytes, got 3"),
        (4, b"\1\0\0\0\0", "1 bytes are left behind"),
        (None, b"\1\0\0\0", "elements of type INT32, got None"),
    ],
)
def test_wrong_sizes_of_binary_data_are_refused(ask: Ask, size: Any, tail: bytes, message: str):
    body = json.dumps({"inputs": [INPUTS[0], {**BINARY, "parameters": {"binary_data_size": size}}]}).encode()
    response = infer(ask(FakeManager()), body, tail, **{"Inference-Header-Content-Length": str(len(body))})
    assert response.status_code == 400
    assert message in response.json()["error"] or "are left behind" in response.json()["error"]


def test_errors_have_the_form_of_triton(ask: Ask):
    client = ask(FakeManager(endless, stepping="by hand", max_queue_size=0), max_body_bytes=300)
    overloaded = client.post("/v2/models/m/generate", {"text_input": "a", "max_tokens": 9})
    assert (overloaded.status_code, overloaded.headers["retry-after"]) == (503, "3")
    long = client.post("/v2/models/m/generate", {"text_input": "a" * 300})
    unknown = client.post("/v2/models/other/generate", {"text_input": "a", "max_tokens": 9})
    version = client.get("/v2/models/m/versions/2")
    nowhere = client.get("/v2/nowhere")
    assert [r.status_code for r in (long, unknown, version, nowhere)] == [413, 404, 404, 404]
    assert all(isinstance(r.json()["error"], str) for r in (overloaded, long, unknown, version, nowhere))


def test_a_key(ask: Ask):
    client = ask(FakeManager(), api_key=["secret"])
    assert [client.get(f"/v2/health/{which}").status_code for which in ("live", "ready")] == [200, 200]
    assert client.get("/v2/models/m/ready").status_code == 200
    refused = client.get("/v2")
    assert (refused.status_code, refused.json()) == (401, {"error": "Unauthorized"})
    assert client.get("/v2", headers={"Authorization": "Bearer secret"}).status_code == 200


# ---- generate -------------------------------------------------------------------------------------------------------


def events(text: str) -> list[dict[str, Any]]:
    *parts, rest = text.split("\n\n")
    assert rest == ""
    assert all(part.startswith("data: ") for part in parts)
    return [json.loads(part.removeprefix("data: ")) for part in parts]


@pytest.mark.parametrize("path", ["models/m/generate", "models/m/versions/1/generate"])
@pytest.mark.parametrize(
    "body",
    [
        {"text_input": "hi ", "max_tokens": 9, "top_k": 3, "bad_words": "", "stop_words": ""},
        {"text_input": "hi ", "parameters": {"max_tokens": 9, "top_k": 3, "stop_words": [""], "stream": False}},
        {"text_input": ["hi "], "parameters": {"max_tokens": [9], "top_k": 3, "temperature": None, "session": 7}},
    ],
)
def test_generate(ask: Ask, path: str, body: dict[str, Any]):
    manager = FakeManager(says("sea"))
    response = ask(manager).post(f"/v2/{path}", body)
    assert response.json() == {"model_name": "m", "model_version": "1", "text_output": "hi sea"}
    assert manager.submitted[0].sampling.top_k == 3


def test_generate_takes_json_values_of_sampling_fields(ask: Ask):
    manager = FakeManager(says("sea"))
    body = {"text_input": "a", "max_tokens": 9, "logit_bias": {"5": 1}, "stop": ["x", "y"], "priority": 3}
    assert ask(manager).post("/v2/models/m/generate", {**body, "timeout": 1_500_000, "id": "7"}).json()["id"] == "7"
    (request,) = manager.submitted
    assert (request.sampling.logit_bias, request.sampling.stop) == (((5, 1.0),), ("x", "y"))
    assert (request.priority, request.timeout) == (3, 1.5)


def test_generate_gives_all_outputs_that_are_asked_for(ask: Ask):
    body = {"text_input": "a", "max_tokens": 9, "return_log_probs": True, "num_return_sequences": 2}
    answer = ask(FakeManager(says("b"))).post("/v2/models/m/generate", body).json()
    assert answer["text_output"] == ["ab", "ab"]
    assert answer["output_log_probs"] == [-0.5] * 4


def test_generate_with_token_ids(ask: Ask):
    body = {"input_ids": [1, 2], "input_lengths": 2, "request_output_len": 9, "exclude_input_in_output": True}
    answer = ask(FakeManager(echoes)).post("/v2/models/tensorrt_llm/generate", body).json()
    assert (answer["output_ids"], answer["sequence_length"]) == ([1, 2, EOS], 3)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "text_input is missing"),
        ({"text_input": "a", "max_tokens": 9, "stream": True}, "use generate_stream"),
        ({"text_input": "a", "max_tokens": 9, "parameters": {"max_tokens": 9}}, "max_tokens: given twice"),
        ({"text_input": "a", "max_tokens": 9, "parameters": 1}, "parameters must be an object"),
        ({"text_input": "a", "max_tokens": "9"}, "elements of type INT32"),
        ({"text_input": ["a", "b"], "max_tokens": 9}, "text_input takes one value, got 2"),
        ({"text_input": "a", "max_tokens": 9, "lora_task_id": 1}, "lora_task_id is not supported"),
        ({"text_input": {}, "max_tokens": 9}, "text_input"),
    ],
)
@pytest.mark.parametrize("route", ["generate", "generate_stream"])
def test_generate_refuses(ask: Ask, body: dict[str, Any], message: str, route: str):
    if route == "generate_stream" and "stream" in body:
        return
    response = ask(FakeManager()).post(f"/v2/models/m/{route}", body)
    assert (response.status_code, message in response.json()["error"]) == (400, True)


def test_generate_stream(ask: Ask):
    client = ask(FakeManager(says("Grüße, 🌊!")))
    response = client.post("/v2/models/m/generate_stream", {"text_input": "hi", "max_tokens": 100, "id": "7"})
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    parts = events(response.text)
    assert "".join(part["text_output"] for part in parts) == "Grüße, 🌊!"
    assert len(parts) > 5
    assert {(part["id"], part["model_name"], part["model_version"]) for part in parts} == {("7", "m", "1")}


def test_generate_stream_without_a_stream_is_one_event(ask: Ask):
    body = {"text_input": "hi ", "max_tokens": 9, "stream": False}
    (event,) = events(ask(FakeManager(says("sea"))).post("/v2/models/m/generate_stream", body).text)
    assert event["text_output"] == "hi sea"


def test_an_error_in_a_stream_is_an_event(ask: Ask):
    client = ask(FakeManager(lambda _: [*b"a", Internal("broken")]))
    first, last = events(client.post("/v2/models/m/generate_stream", {"text_input": "a", "max_tokens": 9}).text)
    assert (first["text_output"], last) == ("a", {"error": "broken"})


def test_a_name_may_hold_slashes(start: Callable[..., Executor]):
    client = Client({"org/model": start(FakeManager(says("sea")))})
    body = {"text_input": "a", "max_tokens": 9}
    assert client.post("/v2/models/org/model/generate", body).json()["model_name"] == "org/model"
    assert client.get("/v2/models/org/model/versions/1").json()["name"] == "org/model"
    assert client.get("/v2/models/org/model/ready").status_code == 200
