"""ModelStreamInfer, with Triton's own client: requests side by side on one stream."""

from __future__ import annotations

import asyncio
import itertools
import queue
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

import grpc
import pytest
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
from tritonclient.grpc import service_pb2

from aotllm import TokenOutput
from aotllm.errors import Internal
from aotllm.serving.context import ServingContext
from aotllm.serving.kserve.grpc_codec import StepEncoder, in_stream, response_of
from aotllm.serving.kserve.infer_request import InferRequest
from aotllm.serving.kserve.inference import Inference
from aotllm.serving.kserve.shared_memory import SystemSharedMemory
from aotllm.serving.kserve.stream_infer import stream_infer
from aotllm.serving.repository import LocalRepository
from aotllm.serving.shared_table import LocalTable
from aotllm.triton_tensors.answers import Step
from aotllm.triton_tensors.tensors import BYTES, INT32, Tensor
from tests.aotllm.byte_tokenizer import EOS
from tests.aotllm.fake_manager import FakeManager, echoes, says
from tests.aotllm.serving.kserve_server import KserveServer, Serve
from tests.aotllm.serving.kserve_tensors import prompt, tensors


def endless(request: object) -> Iterator[int]:
    return itertools.cycle(b"x")


class Responses:
    """What comes back on one stream."""

    def __init__(self, server: KserveServer, **options: Any) -> None:
        self.client = triton.InferenceServerClient(server.grpc)
        self.queue: queue.Queue[tuple[Any, Any]] = queue.Queue()
        self.client.start_stream(lambda result, error: self.queue.put((result, error)), **options)

    def ask(self, model: str, inputs: list[Any], **options: Any) -> None:
        self.client.async_stream_infer(model, inputs, **options)

    def all(self) -> list[tuple[Any, Any]]:
        """Ends the stream, when everything is answered."""
        self.client.stop_stream()
        return list(self.queue.queue)


def texts(answers: Sequence[tuple[Any, Any]]) -> list[str]:
    assert [error for _, error in answers if error is not None] == []
    return [result.as_numpy("text_output")[0].decode() for result, _ in answers if result.get_response().outputs]


def finals(answers: Sequence[tuple[Any, Any]]) -> list[bool]:
    return [result.get_response().parameters["triton_final_response"].bool_param for result, _ in answers]


def test_text_comes_in_pieces_without_the_prompt(kserve: Serve):
    stream = Responses(kserve(FakeManager(says("Grüße, 🌊!"))))
    stream.ask("ensemble", prompt(triton, stream=True), request_id="q1")
    answers = stream.all()
    pieces = texts(answers)
    assert "".join(pieces) == "Grüße, 🌊!"
    assert len(pieces) > 5
    assert not any("\ufffd" in piece for piece in pieces)
    assert {result.get_response().id for result, _ in answers} == {"q1"}
    assert {result.get_response().model_name for result, _ in answers} == {"ensemble"}
    assert finals(answers) == [False] * (len(answers) - 1) + [True]


def test_the_end_can_be_a_response_of_its_own(kserve: Serve):
    stream = Responses(kserve(FakeManager(says("sea"))))
    stream.ask("m", prompt(triton, stream=True), request_id="q", enable_empty_final_response=True)
    answers = stream.all()
    assert "".join(texts(answers)) == "sea"
    assert finals(answers) == [False] * (len(answers) - 1) + [True]
    last = answers[-1][0].get_response()
    assert (last.id, list(last.outputs)) == ("q", [])


def test_a_request_that_does_not_stream_has_one_response(kserve: Serve):
    stream = Responses(kserve(FakeManager(says("sea"))))
    stream.ask("m", prompt(triton), enable_empty_final_response=True)
    answers = stream.all()
    assert (texts(answers), finals(answers)) == (["hisea"], [True])


def test_tokens_come_in_pieces(kserve: Serve):
    stream = Responses(kserve(FakeManager(echoes)))
    inputs = tensors(triton, input_ids=[[1, 2, 3]], input_lengths=3, request_output_len=9, streaming=True)
    stream.ask("tensorrt_llm", inputs + tensors(triton, return_log_probs=True))
    answers = stream.all()
    assert [r.as_numpy("output_ids").tolist() for r, _ in answers] == [[[[t]]] for t in [1, 2, 3, EOS]]
    assert [r.as_numpy("sequence_length").tolist() for r, _ in answers] == [[[1]]] * 4
    assert [r.as_numpy("cum_log_probs").tolist() for r, _ in answers] == [[[-0.5 * i]] for i in (1, 2, 3, 4)]
    assert [r.as_numpy("output_log_probs").tolist() for r, _ in answers] == [[[[-0.5]]]] * 4


def test_several_prompts_and_answers_are_told_apart(kserve: Serve):
    manager = FakeManager(nth_answer=lambda request, index: [*request.prompt_token_ids[1:], ord("0") + index])
    stream = Responses(kserve(manager))
    stream.ask("m", prompt(triton, [["a"], ["bc"]], stream=True, num_return_sequences=2))
    whole: dict[tuple[int, int], str] = {}
    answers = stream.all()
    for result, _ in answers:
        key = result.as_numpy("batch_index").item(), result.as_numpy("sequence_index").item()
        whole[key] = whole.get(key, "") + result.as_numpy("text_output")[0].decode()
    assert whole == {(0, 0): "a0", (0, 1): "a1", (1, 0): "bc0", (1, 1): "bc1"}
    assert finals(answers) == [False] * (len(answers) - 1) + [True]


def test_metrics_come_with_the_last_step(kserve: Serve):
    stream = Responses(kserve(FakeManager(says("ab"))))
    stream.ask("m", prompt(triton, stream=True, return_perf_metrics=True, return_num_input_tokens=True))
    names = [{o.name for o in result.get_response().outputs} for result, _ in stream.all()]
    assert all({"text_output", "num_input_tokens"} <= some for some in names)
    assert ["acceptance_rate" in some for some in names] == [False] * (len(names) - 1) + [True]


def test_one_request_fails_and_the_others_go_on(kserve: Serve):
    manager = FakeManager(lambda request: [*b"a", Internal("broken")] if 33 in request.prompt_token_ids else b"sea")
    stream = Responses(kserve(manager))
    stream.ask("m", prompt(triton, "!", stream=True), request_id="broken")
    stream.ask("m", prompt(triton, temperature=-1.0), request_id="wrong")
    stream.ask("other", prompt(triton), request_id="unknown")
    stream.ask("m", prompt(triton, beam_width=2, stream=True), request_id="beams")
    stream.ask("m", prompt(triton, stream=True), request_id="good")
    answers = stream.all()
    good = [(r, e) for r, e in answers if r is not None and r.get_response().id == "good"]
    assert "".join(texts(good)) == "sea"
    errors = sorted(str(error) for _, error in answers if error is not None)
    expected = ["The model `other` does not exist", "beam search cannot stream", "broken", "temperature must be"]
    assert [part in error for part, error in zip(expected, errors, strict=True)] == [True] * 4


def test_an_error_names_its_request(kserve: Serve):
    request = service_pb2.ModelInferRequest(model_name="other", id="q9")
    with grpc.insecure_channel(kserve(FakeManager()).grpc) as channel:
        call = channel.stream_stream(
            "/inference.GRPCInferenceService/ModelStreamInfer",
            response_deserializer=service_pb2.ModelStreamInferResponse.FromString,
        )
        known, unreadable = list(call(iter([request.SerializeToString(), b"\xff\xff"]), timeout=60))
    assert (known.infer_response.id, "does not exist" in known.error_message) == ("q9", True)
    assert "no ModelInferRequest" in unreadable.error_message


def test_requests_run_side_by_side(kserve: Serve):
    manager = FakeManager(says("ab"), stepping="by hand")
    stream = Responses(kserve(manager))
    for request_id in ("1", "2"):
        stream.ask("m", prompt(triton, stream=True), request_id=request_id)
    manager.wait_until(lambda m: len(m.running) == 2)
    manager.step()
    assert {stream.queue.get(timeout=60)[0].get_response().id for _ in range(2)} == {"1", "2"}
    manager.step(2)
    assert len(stream.all()) == 4


def test_a_request_that_times_out_says_so_after_what_it_has(kserve: Serve):
    manager = FakeManager(endless, stepping="by hand")
    stream = Responses(kserve(manager))
    stream.ask("m", prompt(triton, stream=True), timeout=60_000_000)
    manager.wait_until(lambda m: m.running == [1])
    assert manager.submitted[0].timeout == 60
    manager.step()
    assert texts([stream.queue.get(timeout=60)]) == ["x"]
    manager.time_out(1)
    answers = stream.all()
    assert finals(answers[:-1]) == [False]
    assert "timeout was over" in str(answers[-1][1])


def leaves_by_stop(stream: Responses) -> None:
    stream.client.stop_stream(cancel_requests=True)


def leaves_by_close(stream: Responses) -> None:
    stream.client._channel.close()


@pytest.mark.parametrize("leave", [leaves_by_stop, leaves_by_close])
@pytest.mark.parametrize("first_token", [False, True])
def test_a_client_that_leaves_frees_its_requests(kserve: Serve, leave: Callable[[Responses], None], first_token: bool):
    manager = FakeManager(endless, stepping="by hand")
    stream = Responses(kserve(manager))
    for streams in (True, False, True):
        stream.ask("m", prompt(triton, stream=streams))
    manager.wait_until(lambda m: len(m.running) == 3)
    if first_token:
        manager.step()
        stream.queue.get(timeout=60)
    leave(stream)
    manager.wait_until(lambda m: not m.running)
    assert set(manager.cancelled) == {1, 2, 3}


def test_a_deadline_of_the_stream_frees_its_requests(kserve: Serve):
    manager = FakeManager(endless, stepping="by hand")
    stream = Responses(kserve(manager), stream_timeout=3)
    stream.ask("m", prompt(triton, stream=True))
    manager.wait_until(lambda m: set(m.cancelled) == {1})


def test_a_key(kserve: Serve):
    server = kserve(FakeManager(says("sea")), api_key=["secret"])
    ((_, error),) = Responses(server).all()
    assert error.status() == "StatusCode.UNAUTHENTICATED"
    stream = Responses(server, headers={"authorization": "Bearer secret"})
    stream.ask("m", prompt(triton))
    assert texts(stream.all()) == ["hisea"]


def test_the_client_for_asyncio(kserve: Serve):
    server = kserve(FakeManager(says("sea")))

    async def call() -> str:
        async def requests() -> Any:
            yield {"model_name": "m", "inputs": prompt(triton, stream=True)}

        async with triton_aio.InferenceServerClient(server.grpc) as client:
            pieces = [(result, error) async for result, error in client.stream_infer(requests())]
            return "".join(texts(pieces))

    assert asyncio.run(call()) == "sea"


@pytest.mark.parametrize("text", ["", "a", "Grüße 🌊", "x" * 127, "x" * 128, "x" * 20_000])
@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("final", [False, True])
def test_the_quick_way_writes_the_same_message(text: str, many: bool, final: bool):
    request = InferRequest("m", id="q" * 300)
    memory = SystemSharedMemory(LocalTable())

    def tensors_of(step: Step) -> list[Tensor]:
        indices = [("batch_index", step.prompt), ("sequence_index", step.output.index)]
        others = [Tensor(name, INT32, (1, 1), [value]) for name, value in indices] if many else []
        return [Tensor("text_output", BYTES, (1,), [step.output.text]), *others]

    quick = StepEncoder(request, tensors_of, plain=True, flags_last=True, shared_memory=memory)
    quick.encode(Step(3, TokenOutput("another text", (1,), index=5), 1, None, final))
    step = Step(3, TokenOutput(text, (1,), index=5), 1, None, final)
    expected = in_stream(response_of(request, tensors_of(step), memory, final).SerializeToString())
    parse = service_pb2.ModelStreamInferResponse.FromString
    assert parse(quick.encode(step)) == parse(expected)


class Rpc:
    """A client of `stream_infer` that sends without end.

    Args:
        write: what becomes of each response.
    """

    def __init__(self, write: Callable[[], Any], messages: int = 5000) -> None:
        self.read = 0
        self._write = write
        self._messages = messages

    def invocation_metadata(self) -> None:
        return None

    async def write(self, response: bytes) -> None:
        await self._write()

    async def messages(self) -> AsyncIterator[bytes]:
        for _ in range(self._messages):
            await asyncio.sleep(0)
            self.read += 1
            yield b"\xff"  # refused with a response


def inference() -> Inference:
    return Inference.of(ServingContext(LocalRepository({})))


def test_of_a_client_that_reads_nothing_no_more_is_read():
    async def run() -> int:
        rpc = Rpc(asyncio.Event().wait)
        task = asyncio.create_task(stream_infer(inference(), rpc.messages(), rpc))
        before = -1
        while rpc.read != before:
            before = rpc.read
            for _ in range(100):
                await asyncio.sleep(0)
        task.cancel()
        return rpc.read

    assert asyncio.run(run()) == 1024


def test_a_write_that_fails_is_a_client_that_has_left_and_no_fault(caplog: pytest.LogCaptureFixture):
    async def fail() -> None:
        raise grpc.aio.UsageError("the RPC has ended")

    async def run() -> int:
        rpc = Rpc(fail, messages=3)
        await stream_infer(inference(), rpc.messages(), rpc)
        return rpc.read

    assert asyncio.run(run()) == 3
    assert caplog.records == []
