"""`OracleManager`: the real runtime, known answers and no kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from aotllm import Executor, Request, SamplingParams
from aotllm.errors import InvalidRequest
from aotllm.oracle_manager import OracleModel
from tests.aotllm.byte_tokenizer import EOS, VOCAB_SIZE
from tests.aotllm.fake_manager import FakeEngine

pytest.importorskip("aotllm._runtime")

MODEL = OracleModel(vocab_size=VOCAB_SIZE, max_seq_len=96, max_batch_size=16, max_num_tokens=64, tokens_per_block=4)
EOS_IDS = (EOS,)

Start = Callable[..., Executor]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts an executor on an oracle; ends all at the end of the test."""
    executors: list[Executor] = []

    def start(model: OracleModel = MODEL, **options: Any) -> Executor:
        executors.append(Executor(FakeEngine(), manager_factory=model, **options))  # type: ignore[arg-type]
        return executors[-1]

    yield start
    for executor in executors:
        executor.shutdown()


def prompt(index: int) -> list[int]:
    """Of varied lengths; some begin alike."""
    return [7 + index % 5] * (1 + index % 23) + [index % 200]


@pytest.mark.parametrize("temperature", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("windows", [(0,), (0, 16, 8)])
def test_answers_are_known_whatever_runs_beside_them(start: Start, temperature: float, windows: tuple[int, ...]):
    model = OracleModel(**{**vars(MODEL), "kv_windows": windows})
    executor = start(
        model, num_kv_blocks=60, max_chunk_tokens=8
    )  # few blocks: prefixes are evicted, some are preempted
    sampling = [SamplingParams(max_tokens=1 + i % 50, temperature=temperature) for i in range(64)]
    requests = [Request(prompt_token_ids=prompt(i), sampling=sampling[i]) for i in range(64)]
    for i, output in enumerate(executor.generate(requests)):
        assert list(output.token_ids) == model.answer(prompt(i), 1 + i % 50, EOS_IDS)
        assert output.finish_reason == "length"
    stats = executor.stats()
    assert (stats.running, stats.queued, stats.blocks_used, stats.finished) == (0, 0, 0, 64)
    assert stats.generated_tokens == sum(1 + i % 50 for i in range(64))


def test_cancelling_frees_the_blocks(start: Start):
    executor = start(OracleModel(**{**vars(MODEL), "max_seq_len": 4096, "step_seconds": 0.001}))
    handles = [executor.submit(Request(prompt_token_ids=prompt(i), sampling=SamplingParams())) for i in range(8)]
    for handle in handles:
        next(handle)
    assert executor.stats().blocks_used > 0
    for handle in handles:
        handle.cancel()
    for i, handle in enumerate(handles):
        output = handle.result()
        assert output.finish_reason == "cancelled"
        assert list(output.token_ids) == MODEL.answer(prompt(i), len(output.token_ids), EOS_IDS)
    stats = executor.stats()
    assert (stats.running, stats.queued, stats.blocks_used) == (0, 0, 0)


def test_a_text_of_tokens_beyond_the_vocabulary(start: Start):
    model = OracleModel(vocab_size=50)
    output = start(model).generate("zoo", SamplingParams(max_tokens=5))[0]
    assert max(output.prompt_token_ids) >= 50
    assert list(output.token_ids) == model.answer(output.prompt_token_ids, 5, EOS_IDS)


def test_end_tokens_where_they_are_asked_for(start: Start):
    executor = start(OracleModel(**{**vars(MODEL), "spoken_tokens": (EOS,)}))
    output = executor.generate([[5, 6]], SamplingParams(max_tokens=9))[0]
    assert (output.token_ids, output.finish_reason) == ((EOS,), "stop")


def test_adapters_answer_differently():
    one, two = (MODEL.answer([1], 20, EOS_IDS, adapter=adapter) for adapter in (0, 1))
    assert one != two


def test_common_prefixes_are_shared(start: Start):
    executor = start()
    text = list(range(1, 41))
    first, again = (executor.generate([text], SamplingParams(max_tokens=4))[0] for _ in range(2))
    assert first.token_ids == again.token_ids
    assert (first.num_cached_tokens, again.num_cached_tokens) == (0, 39)


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_embeddings_are_known_too(start: Start, pooling: Any):
    def hidden(token: int, position: int) -> np.ndarray:
        at = [((token + i << 32) + position) * 0x9E3779B97F4A7C15 % 2**64 >> 40 for i in range(MODEL.hidden_size)]
        return np.array(at, np.float32) / np.float32(2**23) - np.float32(1)

    executor = start(max_chunk_tokens=7)
    outputs = executor.embed([prompt(i) for i in range(40)], pooling, normalize=False)
    for i, output in enumerate(outputs):
        states = np.array([hidden(token, position) for position, token in enumerate(prompt(i))])
        expected = states[-1] if pooling == "last" else states.mean(0, dtype=np.float64)
        assert output.embedding.tolist() == pytest.approx(expected.tolist(), abs=1e-6)
    assert executor.stats().blocks_used == 0


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"vocab_size": 0}, "vocab_size"),
        ({"max_num_tokens": 1}, "max_num_tokens"),
        ({"kv_windows": (8, 0)}, "kv_windows"),
        ({"spoken_tokens": (VOCAB_SIZE,)}, "spoken_tokens"),
        ({"step_seconds": -1.0}, "step_seconds"),
    ],
)
def test_sizes_are_checked(start: Start, change: dict[str, Any], param: str):
    with pytest.raises(InvalidRequest) as caught:
        start(OracleModel(**{**vars(MODEL), **change}))
    assert caught.value.param == param
