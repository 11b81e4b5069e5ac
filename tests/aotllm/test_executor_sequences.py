"""Requests with several sequences: outputs by index, the best of them, ends one by one."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator, Sequence

import pytest

from aotllm import Executor, Request, SamplingParams
from aotllm.errors import Internal, InvalidRequest
from aotllm.manager import ManagerRequest
from aotllm.output_assembler import OutputAssembler
from aotllm.request_in_flight import RequestInFlight
from aotllm.tokenization import IncrementalDetokenizer
from tests.aotllm.byte_tokenizer import BOS, EOS
from tests.aotllm.fake_manager import FakeLogprob, FakeManager, FakeResponse, says

Start = Callable[..., Executor]


def counted(request: ManagerRequest, index: int) -> bytes:
    """0, 11, 222, …"""
    return b"%d" % index * (index + 1)


def endless(request: ManagerRequest) -> itertools.repeat[int]:
    return itertools.repeat(ord("x"))


def prompt(**sampling: object) -> Request:
    return Request(prompt="?", sampling=SamplingParams(**sampling))


# n --------------------------------------------------------------------------------------------------------------------


def test_outputs_carry_their_index_and_each_sequence_ends_once(start: Start):
    handle = start(FakeManager(nth_answer=counted)).submit(prompt(n=3))
    outputs = list(handle)
    texts = {i: "".join(o.text for o in outputs if o.index == i) for i in range(3)}
    assert texts == {0: "0", 1: "11", 2: "222"}
    assert [o.index for o in outputs if o.finish_reason] == [0, 1, 2]
    assert [o.index for o in outputs[:3]] == [0, 1, 2]  # side by side


def test_the_result_has_all_answers_and_speaks_for_the_first(start: Start):
    manager = FakeManager(nth_answer=counted, num_cached_tokens=1)
    result = start(manager).submit(prompt(n=3)).result()
    assert [(o.index, o.text, o.token_ids, o.finish_reason) for o in result.outputs] == [
        (0, "0", (*b"0", EOS), "stop"),
        (1, "11", (*b"11", EOS), "stop"),
        (2, "222", (*b"222", EOS), "stop"),
    ]
    assert (result.text, result.token_ids, result.finish_reason) == ("0", (*b"0", EOS), "stop")
    assert (result.num_generated_tokens, result.num_cached_tokens, result.prompt_token_ids) == (9, 1, (BOS, ord("?")))
    assert result.timings.total_seconds >= max(o.timings.total_seconds for o in result.outputs)


def test_figures_of_the_runtime_come_with_each_answer(start: Start):
    result = start(FakeManager(says("abc"))).submit(prompt(n=2)).result()
    assert [(o.num_preemptions, o.num_draft_tokens, o.num_accepted_tokens) for o in result.outputs] == [(1, 4, 3)] * 2
    assert (result.num_preemptions, result.draft_acceptance) == (2, 0.75)
    timings = result.timings
    assert timings.queue_seconds == 0.0
    assert timings.prefill_seconds == timings.first_token_seconds
    assert result.outputs[1].seconds_per_token is not None


def test_a_stop_string_ends_its_sequence_only(start: Start):
    manager = FakeManager(nth_answer=lambda request, index: itertools.cycle(b"no stop, " if index else b"one. "))
    handle = start(manager).submit(prompt(n=2, stop=".", max_tokens=20))
    result = handle.result()
    assert [(o.text, o.finish_reason, o.stop_reason) for o in result.outputs] == [
        ("one", "stop", "."),
        ("no stop, no stop, no", "length", None),
    ]
    assert manager.cancelled_sequences == [(handle.request_id, 0)]
    assert manager.cancelled == []


@pytest.mark.parametrize("stops", list(itertools.permutations(range(3))))
def test_stop_strings_may_end_all_sequences_in_any_order(start: Start, stops: Sequence[int]):
    manager = FakeManager(nth_answer=lambda request, index: b"x" * stops[index] + b"." + b"y" * 9)
    result = start(manager).submit(prompt(n=3, stop=".")).result()
    assert [o.text for o in result.outputs] == ["x" * count for count in stops]
    manager.wait_until(lambda m: not m.running)


def test_an_error_ends_all_sequences(start: Start):
    def answer(request: ManagerRequest, index: int) -> list[int | Internal]:
        return [ord("a"), Internal("lost")] if index else list(b"aaaa")

    manager = FakeManager(nth_answer=answer)
    handle = start(manager).submit(prompt(n=2))
    with pytest.raises(Internal, match="lost"):
        handle.result()
    with pytest.raises(Internal, match="lost"):
        list(handle)
    assert not manager.running


def test_a_sequence_that_there_is_not_fails_the_request_only(start: Start):
    manager = FakeManager(says("ok"), stepping="by hand")
    executor = start(manager)
    bad, good = executor.submit(prompt(n=2)), executor.submit("?")
    manager.push(FakeResponse(bad.request_id, [1], sequence_index=2))
    with pytest.raises(Internal):
        bad.result()
    manager.step(3)
    assert good.result().text == "ok"
    assert bad.request_id in manager.cancelled


# Ends -----------------------------------------------------------------------------------------------------------------


def test_one_sequence_can_be_cancelled(start: Start):
    manager = FakeManager(endless, stepping="by hand")
    handle = start(manager).submit(prompt(n=3, max_tokens=4))
    manager.step(2)
    handle.cancel(1)
    manager.step(2)
    result = handle.result()
    assert [(o.text, o.finish_reason) for o in result.outputs] == [
        ("xxxx", "length"),
        ("xx", "cancelled"),
        ("xxxx", "length"),
    ]


def test_cancelling_all_keeps_what_there_is_of_each(start: Start):
    manager = FakeManager(nth_answer=counted, stepping="by hand")
    handle = start(manager).submit(prompt(n=3))
    manager.step(2)
    handle.cancel()
    result = handle.result()
    assert [(o.text, o.finish_reason) for o in result.outputs] == [
        ("0", "stop"),
        ("11", "cancelled"),
        ("22", "cancelled"),
    ]


def test_shutdown_ends_what_the_runtime_owes(start: Start):
    manager = FakeManager(endless, stepping="by hand")
    executor = start(manager)
    handle = executor.submit(prompt(n=2))
    manager.step()
    next(handle)
    manager._running.clear()
    executor.shutdown()
    assert [o.finish_reason for o in handle.result().outputs] == ["cancelled"] * 2
    assert [o.finish_reason for o in handle][-2:] == ["cancelled"] * 2


def test_a_time_out_is_a_normal_end_with_what_was_there(start: Start):
    manager = FakeManager(endless, stepping="by hand")
    handle = start(manager).submit(Request(prompt="?", timeout=3, sampling=SamplingParams(n=2)))
    manager.step(2)
    manager.time_out(handle.request_id)
    assert [(o.text, o.finish_reason) for o in handle.result().outputs] == [("xx", "timeout")] * 2
    assert manager.submitted[0].timeout == 3.0


def test_the_executor_has_a_time_for_those_that_bring_none(start: Start):
    manager = FakeManager(says("ok"))
    executor = start(manager, timeout=60.0)
    executor.generate(["?", Request(prompt="?", timeout=1)])
    assert [request.timeout for request in manager.submitted] == [60.0, 1.0]


@pytest.mark.parametrize("end", ["finished", "cancelled", "timeout", "failed"])
def test_awaiting_a_request_that_has_ended_returns_at_once(start: Start, end: str):
    def answer(request: ManagerRequest) -> Iterator[int | Internal]:
        return iter([Internal("lost")]) if end == "failed" else itertools.repeat(ord("x"))

    async def main() -> None:
        manager = FakeManager(answer, stepping="by hand")
        executor = start(manager)
        handle = executor.submit(prompt(n=2, max_tokens=1 if end == "finished" else None))
        if end == "cancelled":
            handle.cancel()
        elif end == "timeout":
            manager.time_out(handle.request_id)
        else:
            manager.step()
        manager.wait_until(lambda m: not m.running and not m._ready)
        executor.shutdown()
        for _ in range(2):
            if end == "failed":
                with pytest.raises(Internal):
                    await handle
            else:
                reason = {"finished": "length"}.get(end, end)
                assert [o.finish_reason for o in (await handle).outputs] == [reason] * 2

    asyncio.run(asyncio.wait_for(main(), 60))


# best_of --------------------------------------------------------------------------------------------------------------


def likely(text: Sequence[int]) -> list[tuple[int, float]]:
    return [(ord("g"), -0.1), (ord("b"), -2.0), (EOS, -0.3)]


def graded(request: ManagerRequest, index: int) -> bytes:
    """Means: (-2.0 - 0.3) / 2, (-0.1 - 2.0 - 0.3) / 3, (-0.1 - 0.1 - 0.3) / 3, as the last one."""
    return [b"b", b"gb", b"gg", b"gg"][index]


def test_best_of_keeps_the_answers_with_the_likeliest_tokens(start: Start):
    manager = FakeManager(nth_answer=graded, top=likely)
    result = start(manager).submit(prompt(n=3, best_of=4)).result()
    assert [(o.index, o.text) for o in result.outputs] == [(0, "gg"), (1, "gg"), (2, "gb")]
    assert [o.mean_logprob for o in result.outputs] == pytest.approx([-0.5 / 3, -0.5 / 3, -0.8])
    assert result.num_generated_tokens == 2 + 3 + 3 + 3
    assert [o.logprobs for o in result.outputs] == [()] * 3  # nobody asked for them
    assert (manager.submitted[0].n, manager.submitted[0].logprobs) == (4, 0)


def test_best_of_says_nothing_before_it_knows_the_best(start: Start):
    handle = start(FakeManager(nth_answer=graded, top=likely)).submit(prompt(n=1, best_of=4, logprobs=1))
    (output,) = handle
    assert (output.index, output.text, output.token_ids, output.finish_reason) == (0, "gg", (*b"gg", EOS), "stop")
    assert [entry.top for entry in output.logprobs] == [((ord("g"), -0.1),)] * 3


def test_best_of_n_is_all_in_their_order(start: Start):
    manager = FakeManager(nth_answer=graded, top=likely)
    result = start(manager).submit(prompt(n=4, best_of=4)).result()
    assert [o.text for o in result.outputs] == ["b", "gb", "gg", "gg"]
    assert manager.submitted[0].logprobs is None


def test_a_cancelled_best_of_keeps_the_best_so_far(start: Start):
    manager = FakeManager(nth_answer=graded, top=likely, stepping="by hand")
    handle = start(manager).submit(prompt(n=1, best_of=2))
    manager.step()
    handle.cancel()
    assert (handle.result().text, handle.result().finish_reason) == ("g", "cancelled")


# The prompt -----------------------------------------------------------------------------------------------------------


def test_prompt_logprobs_come_with_the_first_output_of_each_sequence(start: Start):
    handle = start(FakeManager(says("x"))).submit(Request(prompt="ab", sampling=SamplingParams(n=2, prompt_logprobs=1)))
    outputs = list(handle)
    scored = [(p.token_id, p.logprob, p.top) for p in outputs[0].prompt_logprobs]
    assert scored == [(97, -0.5, ((97, -0.5),)), (98, -0.5, ((98, -0.5),))]
    assert [len(o.prompt_logprobs) for o in outputs] == [2, 2, 0, 0]
    assert handle.result().prompt_logprobs == outputs[0].prompt_logprobs


def scored(sequence_index: int, **news: object) -> FakeResponse:
    own = [FakeLogprob(1, -1.0, [])] if sequence_index == 0 else []
    return FakeResponse(1, [ord("x")], sequence_index=sequence_index, prompt_logprobs=own, **news)


@pytest.mark.parametrize("first_news", ["a token", "the end"])
def test_no_sequence_overtakes_the_one_that_brings_the_scores_of_the_prompt(start: Start, first_news: str):
    tokenizer = start(FakeManager()).tokenizer
    sampling = SamplingParams(n=2, prompt_logprobs=0)
    assemblers = [OutputAssembler(IncrementalDetokenizer(tokenizer, (1,)), sampling, index) for index in range(2)]
    request = RequestInFlight(1, (1, 1), assemblers, keep=2, start=0.0, scores_prompt=True)
    assert request.take(scored(1)).outputs == []
    assert request.take(scored(1, finish_reason="length")).outputs == []
    if first_news == "a token":
        outputs = request.take(scored(0)).outputs
        assert [(o.index, len(o.prompt_logprobs)) for o in outputs] == [(0, 1), (1, 1), (1, 0)]
        assert [(o.index, o.finish_reason) for o in request.take(scored(0, finish_reason="length")).outputs] == [
            (0, "length")
        ]
    else:
        news = request.take(FakeResponse(1, finish_reason="timeout"))
        assert [(o.index, o.finish_reason) for o in news.outputs] == [(0, "timeout"), (1, None), (1, "length")]
        assert news.result is not None


def test_what_was_held_back_comes_with_the_shutdown(start: Start):
    tokenizer = start(FakeManager()).tokenizer
    sampling = SamplingParams(n=2, prompt_logprobs=0)
    assemblers = [OutputAssembler(IncrementalDetokenizer(tokenizer, (1,)), sampling, index) for index in range(2)]
    request = RequestInFlight(1, (1, 1), assemblers, keep=2, start=0.0, scores_prompt=True)
    request.take(scored(1))
    news = request.cancel()
    assert [(o.index, o.finish_reason) for o in news.outputs] == [(1, None), (0, "cancelled"), (1, "cancelled")]


def test_options_reach_the_manager(start: Start):
    manager = FakeManager(says("ok"))
    start(manager).generate(Request(prompt="?", cache_salt="mine", retention_priority=90, priority=-1))
    request = manager.submitted[0]
    assert (request.cache_salt, request.retention_priority, request.priority, request.adapter) == ("mine", 90, -1, 0)


@pytest.mark.parametrize(
    ("make", "param"),
    [
        (lambda: SamplingParams(n=0), "n"),
        (lambda: SamplingParams(n=129), "n"),
        (lambda: SamplingParams(n=3, best_of=2), "best_of"),
        (lambda: SamplingParams(best_of=129), "best_of"),
        (lambda: SamplingParams(prompt_logprobs=21), "prompt_logprobs"),
        (lambda: Request(prompt="a", timeout=0), "timeout"),
        (lambda: Request(prompt="a", timeout=float("nan")), "timeout"),
        (lambda: Request(prompt="a", cache_salt=""), "cache_salt"),
        (lambda: Request(prompt="a", cache_salt=7), "cache_salt"),
        (lambda: Request(prompt="a", retention_priority=-1), "retention_priority"),
        (lambda: Request(prompt="a", adapter=3), "adapter"),
    ],
)
def test_what_is_out_of_range_is_refused_by_name(make: Callable[[], object], param: str):
    with pytest.raises(InvalidRequest) as caught:
        make()
    assert caught.value.param == param
