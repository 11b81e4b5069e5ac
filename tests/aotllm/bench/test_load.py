"""Load shapes and conversations on a virtual clock: who was asked what, and when."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from itertools import islice, pairwise

import pytest

from aotllm.bench.arrivals import Arrivals, RampUp
from aotllm.bench.conversation import Conversation, Turn, plain_text
from aotllm.bench.load import LoadRun, LoadRunner, LoadShape
from aotllm.bench.measures import Measures
from aotllm.bench.record import RequestFailed, RequestRecord
from tests.aotllm.bench.scripted_backend import SETTINGS, Script, ScriptedBackend
from tests.aotllm.bench.virtual_time import clock, run_virtual


class Talks:
    """Conversation `i` has the turns `i.0`, `i.1`, …"""

    def __init__(self, turns: int = 1, system: str = "") -> None:
        self._turns, self._system = turns, system

    def __getitem__(self, index: int) -> Conversation:
        turns = tuple(Turn(f"{index}.{turn}", 4, 7) for turn in range(self._turns))
        return Conversation(turns, self._system, 3 if self._system else 0)


def run(
    script: Callable[[int], Script],
    load: LoadShape,
    talks: Talks | None = None,
    on_end: Callable[[RequestRecord], None] = lambda record: None,
    stop_after: float | None = None,
) -> tuple[LoadRun, ScriptedBackend]:
    backend = ScriptedBackend(script)

    async def work() -> LoadRun:
        runner = LoadRunner(backend, SETTINGS, talks or Talks(), load, on_end=on_end, clock=clock)
        if stop_after is not None:
            asyncio.get_running_loop().call_later(stop_after, runner.stop)
        return await runner.run()

    return run_virtual(work()), backend


def seconds(value: float) -> Callable[[int], Script]:
    """Every answer is one token after so many seconds."""
    return lambda _: Script([value])


def asked_at(backend: ScriptedBackend) -> list[float]:
    return [pytest.approx(at) for at, _, _ in backend.asked]


def test_all_at_once():
    result, backend = run(seconds(2.0), LoadShape(num_prompts=3))
    assert asked_at(backend) == [0.0, 0.0, 0.0]
    assert result.duration == pytest.approx(2.0)
    assert len(result.records) == result.conversations == 3


def test_a_fixed_rate_does_not_wait_for_answers():
    result, backend = run(seconds(10.0), LoadShape(num_prompts=4, arrivals=Arrivals(2.0, math.inf)))
    assert asked_at(backend) == [0.0, 0.5, 1.0, 1.5]
    assert result.duration == pytest.approx(11.5)


def test_so_many_at_a_time():
    durations = [3.0, 1.0, 1.0, 1.0]
    result, backend = run(lambda number: Script([durations[number]]), LoadShape(num_prompts=4, concurrency=2))
    assert asked_at(backend) == [0.0, 0.0, 1.0, 2.0]
    assert backend.most_under_way == 2
    assert Measures.of(result.records, result.started, result.duration).max_concurrent_requests == 2


def test_to_wait_for_a_slot_is_neither_latency_nor_lag():
    result, _ = run(seconds(1.0), LoadShape(num_prompts=3, concurrency=1))
    measures = Measures.of(result.records, result.started, result.duration)
    assert measures.latencies["e2el"].mean == pytest.approx(1.0)
    assert measures.client_lag.mean == pytest.approx(0.0)


def test_a_rate_with_a_limit():
    _, backend = run(seconds(1.0), LoadShape(num_prompts=4, arrivals=Arrivals(4.0, math.inf), concurrency=2))
    assert asked_at(backend) == [0.0, 0.25, 1.0, 1.25]


def test_a_duration_ends_the_sending_and_not_the_answers():
    result, backend = run(seconds(1.5), LoadShape(duration=3.0, concurrency=1))
    assert asked_at(backend) == [0.0, 1.5]
    assert result.duration == pytest.approx(3.0)
    result, backend = run(seconds(5.0), LoadShape(duration=3.0, arrivals=Arrivals(1.0, math.inf)))
    assert asked_at(backend) == [0.0, 1.0, 2.0]
    assert (result.duration, len(result.records)) == (pytest.approx(7.0), 3)


def test_the_first_of_number_and_duration_ends_it():
    assert len(run(seconds(1.0), LoadShape(num_prompts=2, duration=60.0, concurrency=1))[0].records) == 2
    assert len(run(seconds(1.0), LoadShape(num_prompts=60, duration=2.0, concurrency=1))[0].records) == 2


def test_a_ramp_by_number_of_requests():
    # Four gaps at the rates of a quarter, a half, … of the way from 1 to 5.
    _, backend = run(seconds(0.1), LoadShape(num_prompts=5, arrivals=Arrivals(math.inf, math.inf, RampUp(1.0, 5.0))))
    assert asked_at(backend) == [0.0, 1 / 2, 1 / 2 + 1 / 3, 1 / 2 + 1 / 3 + 1 / 4, 1 / 2 + 1 / 3 + 1 / 4 + 1 / 5]


def test_a_ramp_by_time():
    load = LoadShape(duration=4.0, arrivals=Arrivals(math.inf, math.inf, RampUp(1.0, 4.0, exponential=True)))
    _, backend = run(seconds(0.1), load)
    # Rates 1, 4 ** (1 / 4), … at times 0, 1, …
    times = [0.0, 1.0]
    while (next_ := times[-1] + 1 / 4 ** (times[-1] / 4)) < 4.0:
        times.append(next_)
    assert asked_at(backend) == times


def gaps(arrivals: Arrivals, count: int, seed: int = 0) -> list[float]:
    times = list(islice(arrivals.due_times(seed), count + 1))
    return [later - earlier for earlier, later in pairwise(times)]


@pytest.mark.parametrize(("burstiness", "variation"), [(1.0, 1.0), (0.25, 2.0), (4.0, 0.5)])
def test_gaps_have_the_mean_of_the_rate_and_the_variation_of_the_burstiness(burstiness: float, variation: float):
    values = gaps(Arrivals(5.0, burstiness), 40_000)
    mean = sum(values) / len(values)
    deviation = (sum((value - mean) ** 2 for value in values) / len(values)) ** 0.5
    # Of a gamma distribution: the coefficient of variation is 1 / sqrt(shape).
    assert mean == pytest.approx(1 / 5.0, rel=0.05)
    assert deviation / mean == pytest.approx(variation, rel=0.05)


def test_arrivals_are_those_of_the_seed():
    poisson = Arrivals(1.0)
    assert gaps(poisson, 10) == gaps(poisson, 10)
    assert gaps(poisson, 10, seed=1) != gaps(poisson, 10)


def test_a_conversation_grows_by_its_answers():
    def script(number: int) -> Script:
        return Script([1.0, 2.0], text=f"<{number}>")

    result, backend = run(script, LoadShape(num_prompts=3, think_time=10.0), Talks(turns=3, system="be"))
    assert asked_at(backend) == [0.0, 12.0, 24.0]
    assert [tuple(m) for m in backend.asked[2][1]] == [
        ("system", "be"),
        ("user", "0.0"),
        ("assistant", "<0><0>"),
        ("user", "0.1"),
        ("assistant", "<1><1>"),
        ("user", "0.2"),
    ]
    # 3 of the system prompt, 4 of each turn, 2 measured of each answer.
    assert [record.wanted_input for record in result.records] == [7, 13, 19]
    assert result.records[0].wanted_output == 7


def test_a_plain_prompt_starts_with_the_one_before_and_its_answer():
    _, backend = run(lambda number: Script([1.0], text=" yes"), LoadShape(num_prompts=2), Talks(turns=2, system="be"))
    first, second = (plain_text(messages) for _, messages, _ in backend.asked)
    assert second.startswith(first + " yes")


def test_turns_count_as_requests():
    result, backend = run(seconds(1.0), LoadShape(num_prompts=5, concurrency=1), Talks(turns=3))
    assert [messages[-1].text for _, messages, _ in backend.asked] == ["0.0", "0.1", "0.2", "1.0", "1.1"]
    assert (result.conversations, len(result.records)) == (2, 5)


def test_another_point_of_a_sweep_has_other_conversations():
    _, backend = run(seconds(1.0), LoadShape(num_prompts=2, first_conversation=7))
    assert [messages[-1].text for _, messages, _ in backend.asked] == ["7.0", "8.0"]


def test_a_failure_ends_its_conversation_and_nothing_else():
    def script(number: int) -> Script:
        return Script([0.5], failure=RequestFailed("http_503", "full") if number == 0 else None)

    result, _ = run(script, LoadShape(num_prompts=6, concurrency=1), Talks(turns=3))
    assert [record.ok for record in result.records] == [False, True, True, True]
    assert result.skipped == 2
    assert result.records[0].e2el == pytest.approx(0.5)


def test_a_time_out_is_a_failure_of_that_length():
    result, backend = run(seconds(100.0), LoadShape(num_prompts=1, timeout=5.0))
    (record,) = result.records
    assert record.error is not None
    assert (record.error.error_kind, record.e2el) == ("timeout", pytest.approx(5.0))
    assert backend.under_way == 0


def test_stop_keeps_what_has_ended():
    result, backend = run(seconds(1.0), LoadShape(num_prompts=100, concurrency=2), stop_after=2.5)
    assert result.interrupted
    assert (len(result.records), result.cancelled) == (4, 2)
    assert all(record.ok for record in result.records)
    assert result.duration == pytest.approx(2.5)
    assert backend.under_way == 0


def test_a_fault_of_ours_is_not_counted_as_the_servers():
    def script(number: int) -> Script:
        raise ZeroDivisionError("oh")

    with pytest.raises(ZeroDivisionError):
        run(script, LoadShape(num_prompts=100, concurrency=2))


def test_each_end_is_told():
    ended: list[float] = []
    run(seconds(1.0), LoadShape(num_prompts=2, concurrency=1), on_end=lambda record: ended.append(record.ended or 0))
    assert ended == [pytest.approx(1.0), pytest.approx(2.0)]
