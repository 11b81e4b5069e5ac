"""`Executor` and handles in threads: streaming, errors, cancellation, shutdown. For asyncio: test_executor_async."""

from __future__ import annotations

import gc
import itertools
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable

import pytest

from aotllm import Executor, Request, SamplingParams
from aotllm.errors import (
    Cancelled,
    ContextTooLong,
    EngineError,
    Internal,
    InvalidRequest,
    Overloaded,
)
from aotllm.manager import ManagerRequest
from tests.aotllm.byte_tokenizer import BOS, END, EOS, START
from tests.aotllm.fake_manager import FakeEngine, FakeManager, FakeResponse, ManagerMaker, echoes, says

Start = Callable[..., Executor]


def endless(request: ManagerRequest) -> itertools.repeat[int]:
    return itertools.repeat(ord("x"))


# Answers --------------------------------------------------------------------------------------------------------------


def test_outputs_stream_in_order_and_the_last_one_has_the_reason(start: Start):
    handle = start(FakeManager(says("né"))).submit("?")
    outputs = list(handle)
    assert [(o.text, o.token_ids, o.finish_reason) for o in outputs] == [
        ("n", (ord("n"),), None),
        ("", (0xC3,), None),
        ("é", (0xA9,), None),
        ("", (EOS,), "stop"),
    ]
    assert list(handle) == []


@pytest.mark.parametrize(
    ("shown", "text"),
    [((), "a b"), (("<|im_start|>",), "a<|im_start|> b"), (("no token", "<|im_end|>"), "a b<|im_end|>")],
)
def test_special_tokens_that_are_looked_for_are_shown(start: Start, shown: tuple[str, ...], text: str):
    manager = FakeManager(lambda _: [ord("a"), START, *b" b", END])
    result = start(manager).submit(Request(prompt="?", shown_special_tokens=shown)).result()
    assert result.text == text


def test_the_result_does_not_need_reading_and_can_be_had_again(start: Start):
    manager = FakeManager(says("sea"), num_cached_tokens=1)
    handle = start(manager).submit(Request(prompt="a"))
    result = handle.result()
    assert handle.result() is result
    assert (result.text, result.token_ids, result.finish_reason) == ("sea", (*b"sea", EOS), "stop")
    assert (result.prompt_token_ids, result.num_prompt_tokens, result.num_cached_tokens) == ((BOS, ord("a")), 2, 1)
    assert handle.done
    assert "".join(output.text for output in handle) == "sea"


def test_timings(start: Start):
    timings = start(FakeManager(says("sea"))).submit("?").result().timings
    assert timings.first_token_seconds is not None
    assert 0 < timings.first_token_seconds <= timings.total_seconds


@pytest.mark.parametrize(
    ("request_", "tokens"),
    [
        (Request(prompt="ab"), (BOS, *b"ab")),
        (Request(prompt="ab", add_special_tokens=False), tuple(b"ab")),
        (Request(prompt_token_ids=[1, 2]), (1, 2)),
        (Request(messages=[{"role": "user", "content": "hi"}]), (258, *b"user\nhi", 259, 10, 258, *b"assistant\n")),
    ],
)
def test_three_kinds_of_prompt(start: Start, request_: Request, tokens: tuple[int, ...]):
    manager = FakeManager(says("ok"))
    start(manager).submit(request_).result()
    assert manager.submitted[0].prompt_token_ids == tokens


def test_engine_defaults_hold_unless_the_request_says_otherwise(start: Start):
    manager = FakeManager(says("ok"), max_seq_len=10)
    executor = start(manager, FakeEngine({"temperature": 0.5, "top_k": 7}))
    executor.generate(["ab", Request(prompt="ab", sampling=SamplingParams(temperature=0, max_tokens=3))])
    assert manager.submitted[0].sampling == SamplingParams(temperature=0.5, top_k=7, max_tokens=7)
    assert manager.submitted[1].sampling == SamplingParams(temperature=0, max_tokens=3)


def test_a_stop_string_ends_the_request_in_the_runtime_too(start: Start):
    manager = FakeManager(lambda _: itertools.cycle(b"one two three. "))
    handle = start(manager).submit(Request(prompt="?", sampling=SamplingParams(stop="three")))
    result = handle.result()
    assert (result.text, result.finish_reason, result.stop_reason) == ("one two ", "stop", "three")
    manager.wait_until(lambda m: not m.running)
    assert manager.cancelled == [handle.request_id]


def test_sizes_reach_the_manager():
    maker = ManagerMaker(FakeManager(says("ok")))
    with Executor(FakeEngine(), num_threads=3, num_kv_blocks=9, max_queue_size=5, manager_factory=maker):
        pass
    assert (maker.config.num_threads, maker.config.num_kv_blocks, maker.config.max_queue_size) == (3, 9, 5)
    assert (maker.rank_file.name, maker.eos_token_ids) == ("rank0.engine", (EOS,))


def test_logprobs_and_logits_come_with_their_tokens(start: Start):
    manager = FakeManager(says("ab"), tokens_per_step=2)
    sampling = SamplingParams(logprobs=1, max_tokens=2)
    result = start(manager).submit(Request(prompt="?", sampling=sampling)).result()
    assert [(p.token_id, p.logprob, p.top) for p in result.logprobs] == [
        (97, -0.5, ((97, -0.5),)),
        (98, -0.5, ((98, -0.5),)),
    ]


# Batches --------------------------------------------------------------------------------------------------------------


def test_generate_keeps_the_order_of_the_prompts(start: Start):
    manager = FakeManager(echoes)
    prompts = ["long prompt", [ord("x")], Request(prompt="b", add_special_tokens=False)]
    assert [result.text for result in start(manager).generate(prompts)] == ["long prompt", "x", "b"]


def test_a_batch_may_be_larger_than_the_queue(start: Start):
    executor = start(FakeManager(echoes, max_queue_size=2))
    assert [r.text for r in executor.generate([f"{i}" for i in range(50)])] == [f"{i}" for i in range(50)]


def test_one_bad_prompt_cancels_the_batch(start: Start):
    manager = FakeManager(endless)
    with pytest.raises(InvalidRequest):
        start(manager).generate(["good", [999]])
    manager.wait_until(lambda m: not m.running)


def test_one_prompt_needs_no_list(start: Start):
    assert start(FakeManager(says("ok"))).generate("?")[0].text == "ok"


# Errors ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "error", "param"),
    [
        (lambda: Request(), InvalidRequest, None),
        (lambda: Request(prompt="a", prompt_token_ids=[1]), InvalidRequest, None),
        (lambda: Request(prompt_token_ids=[]), InvalidRequest, "prompt_token_ids"),
        (lambda: Request(messages=[]), InvalidRequest, "messages"),
        (lambda: Request(messages="hi"), InvalidRequest, "messages"),
        (lambda: Request(messages=1.5), InvalidRequest, "messages"),
        (lambda: Request(prompt=b"a"), InvalidRequest, "prompt"),
        (lambda: Request(prompt_token_ids="12"), InvalidRequest, "prompt_token_ids"),
        (lambda: Request(prompt_token_ids=7), InvalidRequest, "prompt_token_ids"),
        (lambda: Request(prompt_token_ids=iter([1])), InvalidRequest, "prompt_token_ids"),
        (lambda: Request(prompt="a", cache_salt="\ud800"), InvalidRequest, "cache_salt"),
        (lambda: Request(prompt="a", priority=2**31), InvalidRequest, "priority"),
        (lambda: Request(prompt="", add_special_tokens=False), InvalidRequest, "prompt"),
        (lambda: Request(prompt="\ud800"), InvalidRequest, "prompt"),
        (lambda: Request(prompt_token_ids=[260]), InvalidRequest, "prompt_token_ids"),
        (lambda: Request(prompt_token_ids=[-1]), InvalidRequest, "prompt_token_ids"),
        (lambda: Request(prompt_token_ids=["a"]), InvalidRequest, "prompt_token_ids"),
        (lambda: Request(prompt_token_ids=[1] * 20), ContextTooLong, "prompt_token_ids"),
        (lambda: Request(prompt="a" * 20), ContextTooLong, "prompt"),
        (lambda: Request(prompt="a", sampling=SamplingParams(max_tokens=19)), ContextTooLong, "max_tokens"),
        (lambda: Request(prompt="a", sampling=SamplingParams(min_tokens=19)), ContextTooLong, "min_tokens"),
        (lambda: Request(prompt="a", sampling=SamplingParams(bad_words=["\ud800"])), InvalidRequest, "bad_words"),
        (
            lambda: Request(messages=[{"role": "user", "content": "hi"}], chat_template_kwargs={"messages": []}),
            InvalidRequest,
            "chat_template_kwargs",
        ),
    ],
)
def test_bad_requests_are_refused_by_name_and_leave_the_executor_well(
    start: Start, make: Callable[[], Request], error: type[InvalidRequest], param: str | None
):
    executor = start(FakeManager(says("ok"), max_seq_len=20))
    with pytest.raises(error) as caught:
        executor.submit(make())
    assert caught.value.param == param
    assert executor.submit(Request(prompt="a", sampling=SamplingParams(max_tokens=18))).result().text == "ok"


def test_messages_need_a_chat_template(start: Start):
    executor = start(FakeManager(says("ok")), FakeEngine(chat=False))
    with pytest.raises(InvalidRequest, match="no chat template"):
        executor.submit(Request(messages=[{"role": "user", "content": "hi"}]))


def test_a_request_that_fails_keeps_what_it_had_and_reaches_no_other(start: Start):
    manager = FakeManager(lambda r: [ord("a"), Internal("KV pool lost")] if r.priority else b"fine")
    executor = start(manager)
    bad, good = executor.submit(Request(prompt="?", priority=1)), executor.submit(Request(prompt="?"))
    assert next(bad).text == "a"
    with pytest.raises(Internal, match="KV pool lost"):
        next(bad)
    with pytest.raises(Internal, match="KV pool lost"):
        bad.result()
    assert good.result().text == "fine"


def test_a_response_that_cannot_be_understood_fails_its_request_only(start: Start):
    manager = FakeManager(says("ok"), stepping="by hand")
    executor = start(manager)
    bad, good = executor.submit("?"), executor.submit("?")
    manager.push(FakeResponse(bad.request_id, finish_reason="tired"))
    with pytest.raises(Internal, match="tired"):
        bad.result()
    manager.step(3)
    assert good.result().text == "ok"
    assert bad.request_id in manager.cancelled


def test_a_fault_of_the_runtime_fails_all_requests_and_those_to_come(start: Start):
    manager = FakeManager(endless, stepping="by hand")
    executor = start(manager)
    handles = [executor.submit("?") for _ in range(3)]
    manager.fail(RuntimeError("loop died"))
    for handle in handles:
        with pytest.raises(Internal, match="loop died"):
            handle.result()
    with pytest.raises(Internal, match="loop died"):
        executor.submit("?")
    assert not executor.alive


def test_a_full_queue_is_refused_at_once(start: Start):
    manager = FakeManager(endless, stepping="by hand", max_queue_size=1)
    executor = start(manager)
    handle = executor.submit("?")
    with pytest.raises(Overloaded) as caught:
        executor.submit("?")
    assert caught.value.retry_after == 2.5
    assert not handle.done


def test_a_bad_generation_config_is_a_bad_engine():
    with pytest.raises(EngineError, match="generation_config.json: temperature"):
        Executor(FakeEngine({"temperature": -1}), manager_factory=lambda *_: FakeManager(says("")))


# Cancellation ---------------------------------------------------------------------------------------------------------


def test_cancel_is_a_normal_end_with_what_was_there(start: Start):
    manager = FakeManager(endless, stepping="by hand")
    handle = start(manager).submit("?")
    manager.step(2)
    assert [next(handle).text, next(handle).text] == ["x", "x"]
    handle.cancel()
    assert [(o.text, o.token_ids, o.finish_reason) for o in handle] == [("", (), "cancelled")]
    result = handle.result()
    assert (result.text, result.finish_reason) == ("xx", "cancelled")


def test_cancel_of_a_finished_request_is_nothing(start: Start):
    manager = FakeManager(says("ok"))
    handle = start(manager).submit("?")
    assert handle.result().finish_reason == "stop"
    handle.cancel()
    handle.cancel()
    assert manager.cancelled == []
    assert handle.result().finish_reason == "stop"


def test_a_request_whose_handle_is_dropped_is_cancelled(start: Start):
    manager = FakeManager(endless, stepping="by hand")
    executor = start(manager)
    handle = executor.submit("?")
    manager.step()
    for _ in handle:
        break
    assert manager.cancelled == []  # leaving the loop is no end: the handle is still there
    del handle
    gc.collect()
    assert manager.cancelled == [1]


def test_waiting_with_a_time_out_leaves_the_request_alone(start: Start):
    manager = FakeManager(says("ok"), stepping="by hand")
    handle = start(manager).submit("?")
    with pytest.raises(TimeoutError):
        handle.result(timeout=0)
    manager.step(3)
    assert handle.result().text == "ok"


# Shutdown -------------------------------------------------------------------------------------------------------------


def test_shutdown_cancels_what_is_in_flight_and_refuses_what_comes(start: Start):
    manager = FakeManager(endless, stepping="by hand")
    executor = start(manager)
    handles = [executor.submit("?") for _ in range(3)]
    executor.shutdown()
    executor.shutdown()
    assert [handle.result().finish_reason for handle in handles] == ["cancelled"] * 3
    with pytest.raises(Cancelled):
        executor.submit("?")
    assert not executor.alive


def test_a_draining_shutdown_lets_requests_finish(start: Start):
    manager = FakeManager(says("done"), stepping="by hand")
    executor = start(manager)
    handles = [executor.submit("?") for _ in range(3)]
    closer = threading.Thread(target=executor.shutdown, kwargs={"drain": True})
    closer.start()
    manager.wait_until(lambda m: m.shutdowns == [True])
    with pytest.raises(Cancelled):
        executor.submit("?")
    manager.step(5)
    closer.join()
    assert [handle.result().text for handle in handles] == ["done"] * 3


def test_the_context_manager_shuts_down():
    manager = FakeManager(endless, stepping="by hand")
    with Executor(FakeEngine(), manager_factory=lambda *_: manager) as executor:
        handle = executor.submit("?")
    assert manager.shutdowns == [False]
    assert handle.result().finish_reason == "cancelled"


def test_a_response_that_the_runtime_owes_does_not_hang_shutdown(start: Start):
    manager = FakeManager(endless, stepping="by hand")
    executor = start(manager)
    handle = executor.submit("?")
    manager.wait_until(lambda m: bool(m.running))
    manager._running.clear()  # the runtime has lost the request
    executor.shutdown()
    assert handle.result().finish_reason == "cancelled"


def test_a_waiting_consumer_wakes_at_shutdown(start: Start):
    executor = start(FakeManager(endless, stepping="by hand"))
    handle = executor.submit("?")
    reasons: list[str | None] = []
    reader = threading.Thread(target=lambda: reasons.extend(output.finish_reason for output in handle))
    reader.start()
    executor.shutdown()
    reader.join()
    assert reasons == ["cancelled"]


def test_an_executor_that_is_dropped_ends():
    manager = FakeManager(endless, stepping="by hand")
    executor = Executor(FakeEngine(), manager_factory=lambda *_: manager)
    handle = executor.submit("?")
    gone = weakref.ref(executor)
    del executor
    gc.collect()
    assert gone() is not None  # a handle in use keeps it
    del handle
    gc.collect()
    assert gone() is None
    assert (manager.cancelled, manager.shutdowns) == ([1], [False])


def test_the_interpreter_exits_with_requests_in_flight():
    program = """
import itertools
from aotllm import Executor
from tests.aotllm.fake_manager import FakeEngine, FakeManager
manager = FakeManager(lambda request: itertools.repeat(65))
executor = Executor(FakeEngine(), manager_factory=lambda *_: manager)
handle = executor.submit("?")
print(next(handle).text)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "A\n", "")
