"""What the exported models do inside Triton, with Triton and the runtime faked; `test_real_triton.py` has both."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from aotllm.errors import Internal
from tests.aotllm import fake_triton
from tests.aotllm.byte_tokenizer import BOS, EOS
from tests.aotllm.cli.command_line import CommandLine
from tests.aotllm.fake_manager import FakeManager, echoes, says
from tests.aotllm.fake_triton import InferenceRequest, Loaded, ResponseSender, Server, Tensor

TEXT = ["text_output", "batch_index", "sequence_index"]
MODULES = ("job", "model_metrics", "inputs", "engine_model", "forwarding_model")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", fake_triton)
    server = Server()
    yield server
    server.close()
    for module in MODULES:
        sys.modules.pop(f"aotllm.export_triton.{module}", None)


Load = Callable[..., Loaded]


@pytest.fixture
def load(server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Load:
    """Loads the engine's model on a fake manager, and `ensemble` and `tensorrt_llm`, which forward to it."""

    def load(manager: FakeManager, decoupled: bool = True, **parameters: str) -> Loaded:
        engine_model = importlib.import_module("aotllm.export_triton.engine_model")
        forwarding_model = importlib.import_module("aotllm.export_triton.forwarding_model")
        CommandLine(monkeypatch, capsys).use(manager)
        fast = {"cancellation_check_period_ms": "1"}
        engine = server.load(engine_model.EngineModel(), "engine", decoupled, **fast, **parameters)
        for alias in ("ensemble", "tensorrt_llm"):
            server.load(forwarding_model.ForwardingModel(), alias, decoupled, target_model="engine", **fast)
        return engine

    return load


def request(prompt: str | list[str] = "hi", wanted: list[str] = TEXT, request_id: str = "", **inputs: Any):
    prompts = [prompt] if isinstance(prompt, str) else prompt
    tensors = {
        "text_input": [[text.encode()] for text in prompts],
        "max_tokens": [[8]] * len(prompts),
        "exclude_input_in_output": [[True]] * len(prompts),
        **inputs,
    }
    kinds = {"text_input": np.object_, "stop_words": np.object_, "embedding_bias_words": np.object_}
    floats = ("temperature", "top_p", "embedding_bias_weights", "len_penalty")
    return InferenceRequest(
        "engine",
        wanted,
        [
            Tensor(name, np.array(rows, kinds.get(name, np.float32 if name in floats else None)))
            for name, rows in tensors.items()
            if rows is not None
        ],
        request_id=request_id,
    )


def ended(sender: ResponseSender) -> list[Any]:
    with sender.changed:
        assert sender.changed.wait_for(lambda: sender.final, 60)
    return sender.responses


def outputs(response: Any) -> dict[str, Any]:
    assert response.error() is None
    return {tensor.name(): tensor.as_numpy().tolist() for tensor in response.output_tensors()}


def texts(responses: list[Any]) -> list[str]:
    return [outputs(response)["text_output"][0].decode() for response in responses]


@pytest.mark.parametrize("model", ["engine", "ensemble"])
def test_a_whole_answer_is_one_response(server: Server, load: Load, model: str):
    load(FakeManager(says("hello")))
    (response,) = ended(server.models[model].send(request()))
    assert outputs(response) == {"text_output": [b"hello"], "batch_index": [[0]], "sequence_index": [[0]]}


@pytest.mark.parametrize("model", ["engine", "ensemble"])
def test_a_stream_has_a_response_for_each_step(server: Server, load: Load, model: str):
    load(FakeManager(says("hello")))
    responses = ended(server.models[model].send(request(stream=[[True]])))
    assert texts(responses) == ["h", "e", "l", "l", "o", ""]


def test_outputs_that_nobody_wants_are_not_made(load: Load):
    (response,) = ended(load(FakeManager(says("hello"))).send(request(wanted=["output_ids"])))
    assert outputs(response) == {"output_ids": [[[*b"hello", EOS]]]}


def test_a_batch_and_several_answers_are_told_apart_by_their_index(load: Load):
    manager = FakeManager(nth_answer=lambda request, index: (*request.prompt_token_ids[1:], ord("0") + index))
    sender = load(manager).send(request(["a", "b"], num_return_sequences=[[2], [2]]))
    got = {(o["batch_index"][0][0], o["sequence_index"][0][0]): o["text_output"] for o in map(outputs, ended(sender))}
    assert got == {(0, 0): [b"a0"], (0, 1): [b"a1"], (1, 0): [b"b0"], (1, 1): [b"b1"]}


def test_a_plain_model_answers_a_batch_in_one_response(server: Server, load: Load):
    load(FakeManager(echoes, tokens_per_step=3), decoupled=False)
    wanted = ["text_output", "output_ids", "sequence_length", "batch_index"]
    for model in ("engine", "ensemble"):
        (response,) = ended(server.models[model].send(request(["a", "bcd"], wanted, pad_id=[[7], [7]])))
        assert outputs(response) == {
            "text_output": [b"a", b"bcd"],
            "output_ids": [[[BOS, *b"a", EOS, 7, 7]], [[BOS, *b"bcd", EOS]]],
            "sequence_length": [[3], [5]],
            "batch_index": [[0], [1]],
        }


def test_a_plain_model_refuses_to_stream(load: Load):
    (response,) = ended(load(FakeManager(), decoupled=False).send(request(stream=[[True]])))
    assert "leave stream out" in response.error().message
    assert response.error().code == fake_triton.TritonError.INVALID_ARG


def test_the_prompt_comes_first_unless_it_is_left_out(load: Load):
    engine = load(FakeManager(says("lo")))
    wanted, unsaid = ["text_output", "output_ids"], {"exclude_input_in_output": None}
    (response,) = ended(engine.send(request("hel", wanted, **unsaid)))
    assert outputs(response) == {"text_output": [b"hello"], "output_ids": [[[BOS, *b"hel", *b"lo", EOS]]]}
    (response,) = ended(engine.send(request("hel", wanted)))
    assert outputs(response) == {"text_output": [b"lo"], "output_ids": [[[*b"lo", EOS]]]}
    assert texts(ended(engine.send(request("hel", stream=[[True]], **unsaid)))) == ["l", "o", ""]


def test_the_model_can_be_told_to_leave_the_prompt_out(load: Load):
    engine = load(FakeManager(says("lo")), exclude_input_in_output="true")
    assert texts(ended(engine.send(request("hel", exclude_input_in_output=None)))) == ["lo"]
    assert texts(ended(engine.send(request("hel", exclude_input_in_output=[[False]])))) == ["hello"]


def test_log_probs_and_performance(load: Load):
    wanted = ["cum_log_probs", "output_log_probs", "kv_cache_reused_blocks", "arrival_time_ns", "last_token_time_ns"]
    manager = FakeManager(says("ab"), num_cached_tokens=35)
    flags = {"return_log_probs": [[True]], "return_perf_metrics": [[True]]}
    (response,) = ended(load(manager).send(request(wanted=wanted, **flags)))
    got = outputs(response)
    assert got["output_log_probs"] == [[[-0.5, -0.5, -0.5]]]
    assert got["cum_log_probs"] == [[-1.5]]
    assert got["kv_cache_reused_blocks"] == [[2]]
    assert got["last_token_time_ns"] >= got["arrival_time_ns"]


def test_beams_come_together_best_first(load: Load):
    top = {0: [(ord("a"), -0.1), (ord("b"), -2.0), (EOS, -9.0)]}
    manager = FakeManager(top=lambda text: top[0])
    flags = {"beam_width": [[2]], "max_tokens": [[1]], "return_log_probs": [[True]]}
    (response,) = ended(load(manager).send(request(wanted=["text_output", "cum_log_probs"], **flags)))
    assert outputs(response)["text_output"] == [b"a", b"b"]
    assert outputs(response)["cum_log_probs"] == [[pytest.approx(-0.1), pytest.approx(-2.0)]]


@pytest.mark.parametrize("model", ["engine", "ensemble"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_ends_the_request(server: Server, load: Load, model: str, stream: bool):
    manager = FakeManager(lambda _: iter(lambda: 65, None), stepping="by hand")
    load(manager)
    sender = server.models[model].send(request(stream=[[stream]], max_tokens=[[1000]]))
    manager.wait_until(lambda m: len(m.running) == 1)
    manager.step()
    sender.cancelled = True
    assert ended(sender)[-1].error().code == fake_triton.TritonError.CANCELLED
    assert manager.running == []


def test_stop_ends_the_requests_of_its_id_with_what_they_have(server: Server, load: Load):
    manager = FakeManager(lambda _: iter(lambda: 65, None), stepping="by hand")
    load(manager)
    for model, running in (("engine", "1"), ("ensemble", "2")):
        sender = server.models[model].send(request(request_id=running, max_tokens=[[1000]]))
        other = server.models[model].send(request(request_id="other", max_tokens=[[1000]]))
        manager.wait_until(lambda m: len(m.running) == 2)
        manager.step(3)
        stopped = server.models[model].send(request(request_id=running, stop=[[True]]))
        assert texts(ended(sender)) == ["AAA"]
        assert outputs(ended(stopped)[0]) == {}
        assert len(manager.running) == 1
        other.cancelled = True
        ended(other)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"temperature": [[-1.0]]}, "temperature must be a number"),
        ({"text_input": None}, "needs one of text_input and input_ids, got neither"),
        ({"input_ids": [[1]]}, "got both"),
        ({"return_context_logits": [[True]]}, "return_context_logits is not supported here"),
        ({"max_tokens": [[100_000]]}, "maximum context length"),
    ],
)
@pytest.mark.parametrize("model", ["engine", "ensemble"])
def test_bad_requests_are_told_so_and_nobody_else_notices(
    server: Server, load: Load, model: str, inputs: dict[str, Any], message: str
):
    load(FakeManager(says("ok")))
    (response,) = ended(server.models[model].send(request(**inputs)))
    assert message in response.error().message
    assert response.error().code == fake_triton.TritonError.INVALID_ARG
    assert texts(ended(server.models[model].send(request()))) == ["ok"]


def test_one_row_that_fails_ends_its_request(load: Load):
    manager = FakeManager(lambda r: [Internal("a kernel failed")] if b"bad"[0] in r.prompt_token_ids else b"ok")
    (*_, last) = ended(load(manager).send(request(["ok", "bad"])))
    assert (last.error().message, last.error().code) == ("a kernel failed", fake_triton.TritonError.INTERNAL)


def test_a_full_queue_is_unavailable(load: Load):
    engine = load(FakeManager(stepping="by hand", max_queue_size=0))
    (response,) = ended(engine.send(request()))
    assert response.error().code == fake_triton.TritonError.UNAVAILABLE


def test_a_model_that_is_not_there_is_unavailable(server: Server, load: Load):
    load(FakeManager())
    engine = server.models.pop("engine")
    (response,) = ended(server.models["ensemble"].send(request()))
    assert "not ready" in response.error().message
    server.models = {**server.models, "engine": engine}


def test_unloading_ends_what_is_in_flight(server: Server, load: Load):
    manager = FakeManager(stepping="by hand")
    sender = load(manager).send(request())
    manager.wait_until(lambda m: len(m.running) == 1)
    server.models["engine"].model.finalize()
    assert "being unloaded" in ended(sender)[0].error().message
    del server.models["engine"]


def test_many_requests_are_in_flight_at_once(server: Server, load: Load):
    manager = FakeManager(echoes, stepping="by hand")
    load(manager)
    senders = {str(i): server.models["ensemble"].send(request(str(i), stream=[[True]])) for i in range(50)}
    manager.wait_until(lambda m: len(m.running) == 50)
    threading.Thread(target=manager.step, args=(10,)).start()
    assert {text: "".join(texts(ended(sender))) for text, sender in senders.items()} == {t: t for t in senders}


def test_metrics_count_how_requests_end(load: Load):
    manager = FakeManager(says("four"))
    engine = load(manager)
    ended(engine.send(request()))
    ended(engine.send(request(max_tokens=[[100_000]])))
    engine.model.finalize()
    values = fake_triton.MetricFamily.values
    assert values["aotllm:generation_tokens_total", ""] == 5
    assert values["aotllm:num_requests_in_flight", ""] == 0
    assert [values["aotllm:requests_total", outcome] for outcome in ("success", "cancelled", "error")] == [1, 0, 1]
    engine.model.finalize = lambda: None
