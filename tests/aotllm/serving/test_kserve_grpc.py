"""Triton's own gRPC client against a server on a socket: everything but streams."""

from __future__ import annotations

import asyncio
import base64
import itertools
import queue
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException

from aotllm import Executor
from tests.aotllm.byte_tokenizer import BOS, EOS
from tests.aotllm.fake_manager import FakeEngine, FakeManager, FakeResponse, echoes, says
from tests.aotllm.serving.kserve_server import KserveServer, Serve
from tests.aotllm.serving.kserve_tensors import prompt, tensors


def endless(request: object) -> Iterator[int]:
    return itertools.cycle(b"x")


def connect(server: KserveServer) -> triton.InferenceServerClient:
    return triton.InferenceServerClient(server.grpc)


def text(result: Any) -> list[str]:
    return [one.decode() for one in result.as_numpy("text_output")]


def refused(status: str, message: str = "") -> Any:
    return pytest.raises(InferenceServerException, match=rf"StatusCode.{status}.*{message}")


@pytest.mark.parametrize("name", ["m", "ensemble", "tensorrt_llm_bls", "m/ensemble"])
def test_text_comes_back_with_its_prompt_and_id(kserve: Serve, name: str):
    client = connect(kserve(FakeManager(says("Grüße, 🌊!"))))
    result = client.infer(name, prompt(triton, "hi "), request_id="q7", model_version="1")
    assert text(result) == ["hi Grüße, 🌊!"]
    response = result.get_response()
    assert (response.model_name, response.model_version, response.id) == (name, "1", "q7")
    assert [(o.name, o.datatype, list(o.shape)) for o in response.outputs] == [("text_output", "BYTES", [1])]


@pytest.mark.parametrize("shape", [[1], [1, 1]])
def test_a_batch_dimension_may_be_left_out(kserve: Serve, shape: list[int]):
    client = connect(kserve(FakeManager(says("sea"))))
    values = {"text_input": np.array(["a"], object).reshape(shape).tolist(), "max_tokens": np.full(shape, 9).tolist()}
    assert text(client.infer("m", tensors(triton, **values))) == ["asea"]


def test_the_prompt_can_be_left_out(kserve: Serve):
    client = connect(kserve(FakeManager(says("sea"))))
    assert text(client.infer("m", prompt(triton, exclude_input_in_output=True))) == ["sea"]
    client = connect(kserve(FakeManager(says("sea")), exclude_input_in_output=True))
    assert text(client.infer("m", prompt(triton))) == ["sea"]
    assert text(client.infer("m", prompt(triton, exclude_input_in_output=False))) == ["hisea"]


def test_several_prompts_and_answers_come_in_one_response(kserve: Serve):
    manager = FakeManager(nth_answer=lambda request, index: [*request.prompt_token_ids[1:], ord("0") + index])
    client = connect(kserve(manager))
    inputs = prompt(triton, [["a"], ["bc"]], [[9], [8]], num_return_sequences=2, exclude_input_in_output=True)
    outputs = [triton.InferRequestedOutput(n) for n in ("sequence_index", "text_output", "batch_index")]
    result = client.infer("m", inputs, outputs=outputs)
    assert text(result) == ["a0", "a1", "bc0", "bc1"]
    assert result.as_numpy("batch_index").tolist() == [[0], [1]]
    assert result.as_numpy("sequence_index").tolist() == [[0, 1], [0, 1]]
    assert sorted(request.sampling.max_tokens for request in manager.submitted) == [8, 9]


def test_token_ids_in_and_out(kserve: Serve):
    client = connect(kserve(FakeManager(echoes)))
    inputs = tensors(
        triton,
        input_ids=[[1, 2, 3], [4, 0, 0]],
        input_lengths=[[3], [1]],
        request_output_len=9,
        pad_id=7,
        exclude_input_in_output=True,
    )
    result = client.infer("tensorrt_llm", inputs)
    assert result.as_numpy("output_ids").tolist() == [[[1, 2, 3, EOS]], [[4, EOS, 7, 7]]]
    assert result.as_numpy("sequence_length").tolist() == [[4], [2]]
    inputs = tensors(triton, input_ids=[1, 2], input_lengths=2, request_output_len=2)
    for name in ("tensorrt_llm", "m/tensorrt_llm"):
        assert client.infer(name, inputs).as_numpy("output_ids").tolist() == [[[1, 2, 1, 2]]]


def test_what_is_asked_for_besides_the_text(kserve: Serve):
    manager = FakeManager(says("abc"), num_cached_tokens=1)
    client = connect(kserve(manager))
    result = client.infer(
        "m",
        prompt(triton, return_log_probs=True, return_perf_metrics=True, return_num_input_tokens=True)
        + tensors(triton, return_num_output_tokens=True),
    )
    assert result.as_numpy("output_log_probs").tolist() == [[[-0.5] * 4]]
    assert result.as_numpy("cum_log_probs").tolist() == [[-2.0]]
    assert result.as_numpy("num_input_tokens").tolist() == [[len([BOS, *b"hi"])]]
    assert result.as_numpy("num_output_tokens").tolist() == [[4]]
    assert result.as_numpy("acceptance_rate").tolist() == [[0.75]]
    assert result.as_numpy("total_draft_tokens").tolist() == [[4]]
    assert result.as_numpy("kv_cache_alloc_total_blocks").tolist() == [[1]]  # 7 tokens in blocks of 16
    times = [f"{event}_time_ns" for event in ("arrival", "first_scheduled", "first_token", "last_token")]
    values = [result.as_numpy(name).item() for name in times]
    assert values == sorted(values)
    assert values[0] > 0
    # Listing an output asks for it, too.
    listed = client.infer("m", prompt(triton), outputs=[triton.InferRequestedOutput("cum_log_probs")])
    assert [o.name for o in listed.get_response().outputs] == ["cum_log_probs"]
    assert listed.as_numpy("cum_log_probs").tolist() == [[-2.0]]


def test_logits(kserve: Serve):
    manager = FakeManager(endless, stepping="by hand")
    client = connect(kserve(manager))
    done: queue.Queue[Any] = queue.Queue()
    client.async_infer("m", prompt(triton, return_generation_logits=True), lambda result, error: done.put(result))
    manager.wait_until(lambda m: m.running == [1])
    assert manager.submitted[0].return_logits
    rows = np.arange(6, dtype=np.float32).reshape(2, 3)
    manager.push(FakeResponse(1, token_ids=[97, EOS], logits=list(rows), finish_reason="stop", stop_token_id=EOS))
    assert done.get(timeout=60).as_numpy("generation_logits").tolist() == [[rows.tolist()]]


def test_beams(kserve: Serve):
    def top(prefix: Any) -> list[tuple[int, float]]:
        return [(EOS, -0.1), (ord("y"), -3.0)] if len(prefix) > 3 else [(ord("a"), -0.5), (ord("b"), -1.0)]

    client = connect(kserve(FakeManager(top=top)))
    result = client.infer("m", prompt(triton, "hi", 3, beam_width=2, exclude_input_in_output=True))
    assert text(result) == ["a", "b"]
    with pytest.raises(InferenceServerException, match="beam_width must be"):
        client.infer("m", prompt(triton, beam_width=0))


def test_parameters_of_the_request_set_sampling_too(kserve: Serve):
    manager = FakeManager(says("sea"))
    client = connect(kserve(manager))
    client.infer("m", prompt(triton), priority=5, timeout=2_500_000, parameters={"ignore_eos": False, "top_k": 3})
    (request,) = manager.submitted
    assert (request.sampling.ignore_eos, request.sampling.top_k) == (False, 3)
    assert (request.priority, request.timeout) == (5, 2.5)


def test_asynchronous_calls(kserve: Serve):
    client = connect(kserve(FakeManager(says("sea"))))
    done: queue.Queue[tuple[Any, Any]] = queue.Queue()
    for index in range(5):
        client.async_infer("m", prompt(triton, str(index)), lambda result, error: done.put((result, error)))
    answers = [done.get(timeout=60) for _ in range(5)]
    assert sorted(text(result)[0] for result, error in answers if error is None) == [f"{i}sea" for i in range(5)]


def test_the_client_for_asyncio(kserve: Serve):
    server = kserve(FakeManager(says("sea")))

    async def calls() -> None:
        async with triton_aio.InferenceServerClient(server.grpc) as client:
            results = await asyncio.gather(*(client.infer("m", prompt(triton, str(i))) for i in range(3)))
            assert [text(result) for result in results] == [["0sea"], ["1sea"], ["2sea"]]

    asyncio.run(calls())


def test_health(kserve: Serve):
    server = kserve(FakeManager())
    client = connect(server)
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("m")
    assert client.is_model_ready("ensemble", "1")
    assert not client.is_model_ready("m", "2")
    assert not client.is_model_ready("other")
    server.context.draining = True
    assert client.is_server_live()
    assert not client.is_server_ready()
    assert not client.is_model_ready("m")


def test_a_server_without_its_models_lives(kserve: Serve):
    client = connect(kserve(FakeManager()))
    client.unload_model("m")
    assert (client.is_server_live(), client.is_server_ready(), client.is_model_ready("m")) == (True, False, False)


def test_a_server_whose_engine_failed_does_not_live(kserve: Serve):
    manager = FakeManager(endless, stepping="by hand")
    client = connect(kserve(manager))
    done: queue.Queue[Any] = queue.Queue()
    client.async_infer("m", prompt(triton), lambda result, error: done.put(error))
    manager.wait_until(lambda m: m.running == [1])
    manager.fail(RuntimeError("a bug"))
    assert done.get(timeout=60).status() == "StatusCode.INTERNAL"
    assert (client.is_server_live(), client.is_model_ready("m")) == (False, False)


SERVING, NOT_SERVING = 1, 2  # of grpc.health.v1.HealthCheckResponse


def test_the_health_service_of_grpc(kserve: Serve):
    server = kserve(FakeManager(), api_key=["secret"])
    with grpc.insecure_channel(server.grpc) as channel:
        call = channel.unary_unary("/grpc.health.v1.Health/Check")

        def check(service: str) -> int:
            # Its messages have one field, number 1: the service, and the status.
            request = service_pb2.ModelReadyRequest(name=service).SerializeToString()
            tag, status = call(request, timeout=60)
            assert tag == 1 << 3
            return status

        names = ["", "inference.GRPCInferenceService", "m", "ensemble"]
        assert [check(name) for name in names] == [SERVING] * 4
        with pytest.raises(grpc.RpcError, match="does not exist") as unknown:
            check("other")
        assert unknown.value.code() is grpc.StatusCode.NOT_FOUND
        server.context.draining = True
        assert [check(name) for name in names] == [NOT_SERVING] * 4


def test_metadata_and_configuration_agree(kserve: Serve):
    client = connect(kserve(FakeManager()))
    server = client.get_server_metadata()
    assert (server.name, "model_repository" in server.extensions) == ("aotllm", True)
    for name, first in {"m": "text_input", "tensorrt_llm": "input_ids"}.items():
        metadata, config = client.get_model_metadata(name), client.get_model_config(name).config
        assert (metadata.name, metadata.versions, config.name) == (name, ["1"], name)
        assert metadata.inputs[0].name == first
        assert [i.name for i in metadata.inputs] == [i.name for i in config.input]
        assert [list(i.shape) for i in metadata.inputs] == [[-1, *i.dims] for i in config.input]
        assert [o.name for o in metadata.outputs] == [o.name for o in config.output]
        assert [list(o.shape) for o in metadata.outputs] == [[-1, *o.dims] for o in config.output]
        assert config.max_batch_size == 1024
        assert config.model_transaction_policy.decoupled
        assert config.parameters["max_seq_len"].string_value == "4096"
        required = [i.name for i in config.input if not i.optional]
        assert required == (
            ["text_input", "max_tokens"] if name == "m" else ["input_ids", "input_lengths", "request_output_len"]
        )


def test_the_repository(kserve: Serve, start: Any):
    made: list[str] = []

    def make(name: str) -> Executor:
        made.append(name)
        return start(FakeManager(says(f"new {name}")))

    client = connect(kserve({"a": FakeManager(says("old a")), "b": FakeManager(says("old b"))}, make=make))

    def states(ready: bool = False) -> dict[str, str]:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(client._channel)
        return {m.name: m.state for m in stub.RepositoryIndex(service_pb2.RepositoryIndexRequest(ready=ready)).models}

    names = ["a", "b", "ensemble", "tensorrt_llm_bls", "tensorrt_llm", "a/tensorrt_llm", "b/tensorrt_llm"]
    assert states() == dict.fromkeys(names, "READY")
    client.unload_model("a")
    assert states() == {name: "READY" if name.startswith("b") else "UNAVAILABLE" for name in names}
    assert list(states(ready=True)) == ["b", "b/tensorrt_llm"]
    assert not client.is_model_ready("ensemble")  # which is the first engine, and never silently another one
    with refused("UNAVAILABLE", "UNAVAILABLE.*load it first"):
        client.infer("ensemble", prompt(triton))
    assert text(client.infer("b", prompt(triton, "x"))) == ["xold b"]
    client.load_model("ensemble")
    assert made == ["a"]
    assert text(client.infer("a", prompt(triton, "x"))) == ["xnew a"]
    with refused("NOT_FOUND", "Known: a, b"):
        client.load_model("c")
    with refused("NOT_FOUND"):
        client.unload_model("c")
    with refused("INVALID_ARGUMENT", "config"):
        client.load_model("a", config="{}")


@pytest.mark.parametrize(
    ("name", "version", "inputs", "status", "message"),
    [
        ("other", "", {}, "NOT_FOUND", "does not exist"),
        ("m", "2", {}, "NOT_FOUND", "version 1 only"),
        ("m", "", {"text_input": None}, "INVALID_ARGUMENT", "text_input is missing"),
        ("m", "", {"max_tokens": None}, "INVALID_ARGUMENT", "max_tokens is missing"),
        ("m", "", {"max_tokens": 0}, "INVALID_ARGUMENT", "max_tokens must be an integer ≥ 1"),
        ("m", "", {"max_tokens": 5000}, "INVALID_ARGUMENT", "maximum context length"),
        ("m", "", {"temperature": -1.0}, "INVALID_ARGUMENT", "temperature must be"),
        ("m", "", {"no_such_input": 1}, "INVALID_ARGUMENT", "no input 'no_such_input'"),
        ("m", "", {"lora_task_id": 1}, "INVALID_ARGUMENT", "lora_task_id is not supported here; LoRA adapters"),
        ("m", "", {"draft_input_ids": [[1]]}, "INVALID_ARGUMENT", "no input .draft_input_ids."),
        ("m", "", {"max_tokens": [[1], [2]]}, "INVALID_ARGUMENT", "max_tokens has 2 values for 1 prompt"),
        ("m", "", {"max_tokens": [[1, 2]]}, "INVALID_ARGUMENT", "must be of shape"),
        ("m", "", {"stream": True}, "UNIMPLEMENTED", "call ModelStreamInfer"),
        ("m", "", {"text_input": [["a"]] * 1025}, "INVALID_ARGUMENT", "1 to 1024 prompts, got 1025"),
        ("m", "", {"num_return_sequences": 200}, "INVALID_ARGUMENT", "n must be"),
        ("m", "", {"text_input": [["a"], ["b"]], "stream": [[True], [False]]}, "INVALID_ARGUMENT", "same"),
        ("m", "", {"guided_decoding_guide_type": "xml"}, "INVALID_ARGUMENT", "guide_type must be one of"),
        ("m", "", {"guided_decoding_guide_type": "regex", "guided_decoding_guide": "("}, "INVALID_ARGUMENT", "guide"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said(
    kserve: Serve, name: str, version: str, inputs: dict[str, Any], status: str, message: str
):
    client = connect(kserve(FakeManager()))
    values = {"text_input": "hi", "max_tokens": 9, **inputs}
    values = {name: value for name, value in values.items() if value is not None}
    with refused(status, message):
        client.infer(name, tensors(triton, **values), model_version=version)


def test_a_full_queue_is_unavailable(kserve: Serve):
    manager = FakeManager(endless, stepping="by hand", max_queue_size=1)
    client = connect(kserve(manager))
    with refused("UNAVAILABLE", "the queue is full"):
        client.infer("m", prompt(triton, [["a"], ["b"]]))
    manager.wait_until(lambda m: not m.running)  # all or none


def test_a_request_that_times_out_is_an_error(kserve: Serve):
    manager = FakeManager(endless, stepping="by hand")
    client = connect(kserve(manager))
    done: queue.Queue[Any] = queue.Queue()
    client.async_infer("m", prompt(triton), lambda result, error: done.put(error), timeout=1)
    manager.wait_until(lambda m: m.running == [1])
    manager.time_out(1)
    assert done.get(timeout=60).status() == "StatusCode.DEADLINE_EXCEEDED"


@pytest.mark.parametrize("parameters", [{"timeout": -1}, {"timeout": "1"}, {"priority": 2**31}, {"priority": True}])
def test_service_parameters_are_checked(kserve: Serve, parameters: dict[str, Any]):
    server = kserve(FakeManager())
    (name, value), *_ = parameters.items()
    request = service_pb2.ModelInferRequest(model_name="m")
    field = {int: "int64_param", str: "string_param", bool: "bool_param"}[type(value)]
    setattr(request.parameters[name], field, value)
    for tensor in prompt(triton):
        request.inputs.append(tensor._get_tensor())
        request.raw_input_contents.append(tensor._get_content())
    with grpc.insecure_channel(server.grpc) as channel, pytest.raises(grpc.RpcError, match=f"{name} must be"):
        service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(request)


def test_cancelling_a_call_frees_its_requests_at_once(kserve: Serve):
    manager = FakeManager(endless, stepping="by hand")
    client = connect(kserve(manager))
    call = client.async_infer("m", prompt(triton, [["a"], ["b"]]), lambda result, error: None)
    manager.wait_until(lambda m: len(m.running) == 2)
    call.cancel()
    manager.wait_until(lambda m: not m.running)
    assert sorted(set(manager.cancelled)) == [1, 2]


def test_a_beam_search_is_cancelled(kserve: Serve):
    manager = FakeManager(stepping="by hand", top=lambda _: [(1, -1.0), (2, -2.0)])
    call = connect(kserve(manager)).async_infer("m", prompt(triton, beam_width=2), lambda result, error: None)
    manager.wait_until(lambda m: bool(m.running))
    call.cancel()
    manager.wait_until(lambda m: not m.running)
    assert manager.cancelled


def test_a_deadline_frees_its_requests(kserve: Serve):
    manager = FakeManager(endless, stepping="by hand")
    client = connect(kserve(manager))
    with refused("DEADLINE_EXCEEDED"):
        client.infer("m", prompt(triton), client_timeout=3)
    manager.wait_until(lambda m: set(m.cancelled) == {1})


def test_a_dropped_connection_frees_its_requests(kserve: Serve):
    manager = FakeManager(endless, stepping="by hand")
    client = connect(kserve(manager))
    client.async_infer("m", prompt(triton), lambda result, error: None)
    manager.wait_until(lambda m: m.running == [1])
    client.close()
    manager.wait_until(lambda m: set(m.cancelled) == {1})


def test_a_key(kserve: Serve):
    client = connect(kserve(FakeManager(says("sea")), api_key=["secret", "other"]))
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("m")
    for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "secret"}):
        with refused("UNAUTHENTICATED", "Bearer KEY"):
            client.infer("m", prompt(triton), headers=headers)
        with refused("UNAUTHENTICATED"):
            client.get_server_metadata(headers=headers)
    for key in ("secret", "other"):
        assert text(client.infer("m", prompt(triton), headers={"authorization": f"Bearer {key}"})) == ["hisea"]


def test_what_is_not_implemented_says_so(kserve: Serve):
    client = connect(kserve(FakeManager()))
    assert len(client.get_cuda_shared_memory_status().regions) == 0
    client.unregister_cuda_shared_memory()
    with refused("UNIMPLEMENTED", "use system shared memory"):
        client.register_cuda_shared_memory("r", base64.b64encode(b"handle"), 0, 8)
    with refused("UNIMPLEMENTED", "set when the server is started"):
        client.get_trace_settings()
    with refused("UNIMPLEMENTED", "set when the server is started"):
        client.get_log_settings()


def test_a_long_message_is_refused(kserve: Serve):
    client = connect(kserve(FakeManager(), max_body_bytes=1000))
    with refused("RESOURCE_EXHAUSTED"):
        client.infer("m", prompt(triton, "x" * 1000))


@pytest.mark.parametrize("data", [b"\xff\xff\xff", b"\x0a\x02\xff\xfe", b"\x2a\x7f"])
def test_bytes_that_are_no_message_are_refused(kserve: Serve, data: bytes):
    with grpc.insecure_channel(kserve(FakeManager()).grpc) as channel:
        call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        with pytest.raises(grpc.RpcError, match="no ModelInferRequest") as refusal:
            call(data, timeout=60)
    assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_an_engine_of_a_classic_name_comes_first(kserve: Serve):
    client = connect(kserve({"a": FakeManager(says("A")), "tensorrt_llm": FakeManager(says("B"))}))
    assert text(client.infer("tensorrt_llm", prompt(triton, "x"))) == ["xB"]
    assert text(client.infer("ensemble", prompt(triton, "x"))) == ["xA"]


def test_an_adapter_is_a_model_of_its_own(start: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("aotllm.adapters.read_adapter", lambda folder: f"weights of {folder}")
    manager = FakeManager(echoes)
    executor = start(manager)
    executor.load_lora("poet", "folder/poet")
    server = KserveServer({"m": executor})
    try:
        client = connect(server)
        assert [m.name for m in client.get_model_repository_index().models][-1] == "poet"
        client.infer("poet", prompt(triton))
        client.infer("poet/tensorrt_llm", tensors(triton, input_ids=[1], input_lengths=1, request_output_len=1))
        client.infer("ensemble", prompt(triton))
    finally:
        server.stop()
    assert [request.adapter for request in manager.submitted] == [1, 1, 0]


def test_defaults_are_those_of_tensorrt_llm_and_not_of_the_checkpoint(start: Any):
    manager = FakeManager(says("sea"))
    server = KserveServer({"m": start(manager, FakeEngine({"temperature": 0.25, "top_k": 7}))})
    try:
        connect(server).infer("m", prompt(triton))
        connect(server).infer("m", prompt(triton, top_p=0.5))
    finally:
        server.stop()
    drawn = [(r.sampling.temperature, r.sampling.top_k, r.sampling.top_p) for r in manager.submitted]
    assert drawn == [(0.0, 0, 1.0), (1.0, 0, 0.5)]
