"""`Executor.embed`: prompts as vectors."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from aotllm import Executor, Request, SamplingParams
from aotllm.embedding import normalized
from aotllm.errors import Cancelled, ContextTooLong, InvalidRequest, TimedOut
from aotllm.structured_outputs import StructuredOutputs
from tests.aotllm.byte_tokenizer import BOS
from tests.aotllm.fake_manager import FakeManager

Start = Callable[..., Executor]


@pytest.mark.parametrize(
    ("pooling", "expected"),
    # The hidden state of a token is [token, its square, adapter, 1].
    [("last", [4, 16, 0, 1]), ("mean", [3, 10, 0, 1])],
)
def test_what_the_model_gives(start: Start, pooling: Any, expected: list[float]):
    manager = FakeManager(num_cached_tokens=1)
    [output] = start(manager).embed([[2, 4]], pooling, normalize=False)
    assert output.embedding.dtype == np.float32
    assert output.embedding.tolist() == expected
    assert (output.num_prompt_tokens, output.num_cached_tokens) == (2, 1)
    assert manager.submitted[0].pooling == pooling


def test_mean_of_length_one_unless_told_otherwise(start: Start):
    [output] = start(FakeManager()).embed([[2, 4]])
    assert output.embedding.tolist() == pytest.approx(np.array([3, 10, 0, 1]) / math.sqrt(110))


@pytest.mark.parametrize("prompts", ["ab", Request(prompt="ab"), ["ab"], [Request(prompt="ab")]])
def test_kinds_of_prompt(start: Start, prompts: Any):
    manager = FakeManager()
    assert len(start(manager).embed(prompts)) == 1
    assert manager.submitted[0].prompt_token_ids == (BOS, 97, 98)


def test_a_batch_larger_than_the_queue_comes_in_order(start: Start):
    outputs = start(FakeManager(max_queue_size=3)).embed([[i] for i in range(20)], "last", normalize=False)
    assert [output.embedding[0] for output in outputs] == list(range(20))


def test_asyncio(start: Start):
    executor = start(FakeManager())

    async def both() -> list[Any]:
        return list(await asyncio.gather(executor.embed_async("ab", "last"), executor.embed_async("cd", "last")))

    got = asyncio.run(both())
    for output, [expected] in zip(got, [executor.embed("ab", "last"), executor.embed("cd", "last")], strict=True):
        assert output.embedding.tolist() == expected.embedding.tolist()


def test_the_requests_own_pooling_counts(start: Start):
    manager = FakeManager()
    start(manager).embed(Request(prompt="ab", pooling="last"), "mean")
    assert manager.submitted[0].pooling == "last"


def test_a_request_with_pooling_ends_with_its_embedding(start: Start):
    handle = start(FakeManager()).submit(Request(prompt_token_ids=[2, 4], pooling="last"))
    assert [(output.text, output.token_ids, output.finish_reason) for output in handle] == [("", (), "stop")]
    result = handle.result()
    assert result.embedding.tolist() == [4, 16, 0, 1]
    assert (result.num_generated_tokens, result.timings.first_token_seconds) == (0, None)


def test_a_prompt_may_fill_the_context(start: Start):
    executor = start(FakeManager(max_seq_len=8))
    assert len(executor.embed([[5] * 8])) == 1
    with pytest.raises(ContextTooLong, match="maximum context length is 8 tokens. However, the prompt has 9") as caught:
        executor.embed([[5] * 9])
    assert caught.value.param == "prompt_token_ids"


@pytest.mark.parametrize(("how", "error"), [("cancel", Cancelled), ("time_out", TimedOut)])
def test_there_is_none_without_an_end(start: Start, how: str, error: type[Exception]):
    manager = FakeManager(stepping="by hand")
    executor = start(manager)

    async def embed() -> None:
        task = asyncio.create_task(executor.embed_async("ab"))
        await asyncio.to_thread(manager.wait_until, lambda m: m.running)
        getattr(manager, how)(1)
        await task

    with pytest.raises(error):
        asyncio.run(embed())


def test_cancelling_the_task_cancels_the_request(start: Start):
    manager = FakeManager(stepping="by hand")
    executor = start(manager)

    async def leave() -> None:
        task = asyncio.create_task(executor.embed_async("ab"))
        await asyncio.to_thread(manager.wait_until, lambda m: m.running)
        task.cancel()
        await task

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(leave())
    manager.wait_until(lambda m: not m.running)
    assert manager.cancelled == [1]


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"pooling": "max"}, "pooling"),
        ({"pooling": "mean", "sampling": SamplingParams()}, "sampling"),
        ({"pooling": "mean", "return_logits": True}, "return_logits"),
        ({"pooling": "mean", "structured_outputs": StructuredOutputs(regex="a")}, "structured_outputs"),
    ],
)
def test_what_a_request_with_pooling_may_not_have(options: dict[str, Any], param: str):
    with pytest.raises(InvalidRequest) as caught:
        Request(prompt="a", **options)
    assert caught.value.param == param


def test_zeros_stay_zeros():
    assert normalized(np.zeros(3, np.float32)).tolist() == [0, 0, 0]
