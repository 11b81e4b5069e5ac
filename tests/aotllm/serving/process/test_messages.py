"""Messages survive the way, whatever the pieces they arrive in."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aotllm.errors import ERROR_KINDS, InvalidRequest, Overloaded
from aotllm.manager import ManagerRequest
from aotllm.sampling_params import SamplingParams
from aotllm.serving.process import messages as wire
from aotllm.serving.process.failures import error_of, failure_of
from aotllm.serving.process.framing import FrameReader
from tests.aotllm.fake_manager import FakeLogprob, FakeResponse

REQUESTS = [
    ManagerRequest((1, 2, 3), SamplingParams(max_tokens=4)),
    ManagerRequest(
        (5,),
        SamplingParams(
            max_tokens=4,
            seed=-1,
            logit_bias={3: 1.5},
            stop=("a", "b"),
            allowed_token_ids=(1, 2),
            temperature=0.5,
            stop_token_ids=(7,),
        ),
        n=3,
        logprobs=2,
        cache_salt="tenant",
        adapter=2,
        bad_words_token_ids=((1, 2), (3,)),
        timeout=2.5,
    ),
]


@pytest.mark.parametrize("request_", REQUESTS)
def test_requests_come_through(request_: ManagerRequest):
    data = wire.frame(wire.Submit(7, "m", wire.wire_request(request_), None))
    (frame,) = FrameReader().feed(data)
    message = wire.to_engine.decode(frame)
    assert isinstance(message, wire.Submit)
    got = wire.manager_request(message.request, None)
    seed = request_.sampling.seed
    assert got.sampling == request_.sampling.replace(seed=None if seed is None else seed % 2**64)
    assert list(got.prompt_token_ids) == list(request_.prompt_token_ids)
    assert [list(word) for word in got.bad_words_token_ids] == [list(word) for word in request_.bad_words_token_ids]
    for name in ("n", "logprobs", "cache_salt", "adapter", "timeout"):
        assert getattr(got, name) == getattr(request_, name)


def test_a_request_that_breaks_the_schema_is_refused_by_the_engine_process_too():
    request = wire.wire_request(REQUESTS[0])
    request["sampling"]["temperature"] = -1
    with pytest.raises(InvalidRequest, match="temperature"):
        wire.manager_request(request, None)


ATTRIBUTES = [f.name for f in dataclasses.fields(FakeResponse) if f.name not in ("request_id", "logits", "embedding")]


@pytest.mark.parametrize(
    "response",
    [
        FakeResponse(1, [4, 5], num_cached_tokens=3),
        FakeResponse(1, [4], finish_reason="stop", stop_token_id=4, num_preemptions=2),
        FakeResponse(1, error_kind="internal", error_message="oh"),
        FakeResponse(1, [4], logprobs=[FakeLogprob(4, -0.5, [(4, -0.5), (0, float("-inf"))])]),
        FakeResponse(1, [4], prompt_logprobs=[FakeLogprob(2, -1.0, [])], sequence_index=2),
    ],
)
def test_responses_come_through(response: FakeResponse):
    data = wire.frame(wire.Responses([wire.wire_response(9, response)]))
    (frame,) = FrameReader().feed(data)
    message = wire.to_front_end.decode(frame)
    assert isinstance(message, wire.Responses)
    (got,) = message.responses
    assert got.request_id == 9
    for name in ATTRIBUTES:
        sent, here = getattr(response, name), getattr(got, name)
        if name in ("logprobs", "prompt_logprobs"):
            sent = [(s.token_id, s.logprob, s.top) for s in sent]
            here = [(s.token_id, s.logprob, list(s.top)) for s in here]
        if name == "num_prompt_tokens":
            continue  # the front end knows
        assert here == sent, name


def test_arrays_come_through():
    rows = [np.array([1.5, -2.0], np.float32), np.array([0.1, 0.2], np.float32)]
    response = FakeResponse(1, [4, 5], logits=list(rows), embedding=rows[0], finish_reason="stop")
    (frame,) = FrameReader().feed(wire.frame(wire.Responses([wire.wire_response(9, response)])))
    message = wire.to_front_end.decode(frame)
    assert isinstance(message, wire.Responses)
    (got,) = message.responses
    assert all((here == sent).all() for here, sent in zip(got.logits, rows, strict=True))
    assert (got.embedding == rows[0]).all()


@given(st.lists(st.integers(0, 300), max_size=8), st.data())
def test_frames_may_be_cut_anywhere(sizes: list[int], data: st.DataObject):
    frames = [wire.frame(wire.Cancel(i, -1)) + b"" for i, _ in enumerate(sizes)]
    stream = b"".join(frames)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=6)))
    reader, got = FrameReader(), []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        got += [wire.to_engine.decode(frame) for frame in reader.feed(stream[start:end])]
    assert [message.id for message in got] == list(range(len(sizes)))  # type: ignore[union-attr]


def test_a_frame_that_claims_to_be_huge_is_not_waited_for():
    with pytest.raises(ValueError, match="allowed"):
        list(FrameReader().feed(b"\xff\xff\xff\xff"))


@pytest.mark.parametrize("kind", ERROR_KINDS)
def test_errors_come_through(kind: str):
    error = ERROR_KINDS[kind]("what was wrong")
    got = error_of(failure_of(error))
    assert (type(got), got.message) == (type(error), "what was wrong")


def test_errors_keep_their_details():
    overloaded = error_of(failure_of(Overloaded("full", retry_after=2.5)))
    assert isinstance(overloaded, Overloaded)
    assert overloaded.retry_after == 2.5
    assert error_of(failure_of(InvalidRequest("bad", "top_p"))).param == "top_p"  # type: ignore[attr-defined]
    assert "ZeroDivisionError" in error_of(failure_of(ZeroDivisionError("x"))).message
