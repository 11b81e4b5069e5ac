"""Beam search: against all answers that there are, and through an executor. (Against Hugging Face: integration.)"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aotllm import BeamSearchParams, Executor, Request, SamplingParams
from aotllm.beam_search import BeamSearch
from aotllm.errors import InvalidRequest
from aotllm.manager import ManagerRequest
from aotllm.request import TokenLogprob
from aotllm.structured_outputs import StructuredOutputs
from tests.aotllm.byte_tokenizer import EOS
from tests.aotllm.fake_manager import FakeEngine, FakeManager

Start = Callable[..., Executor]
Model = Callable[[Sequence[int]], "list[float]"]


def search(model: Model, params: BeamSearchParams, max_tokens: int, ends: Sequence[int] = (0,)) -> BeamSearch:
    """Runs a search on log-probabilities that a function of the answer so far gives."""
    state = BeamSearch(params, max_tokens, frozenset(ends))
    while not state.done:
        tops = []
        for beam in state.live:
            likely = sorted(enumerate(model(beam.token_ids)), key=lambda pair: (-pair[1], pair[0]))
            tops.append(TokenLogprob(likely[0][0], likely[0][1], tuple(likely[: state.num_top])))
        state.advance(tops)
    return state


@st.composite
def models(draw: st.DrawFn) -> Model:
    """A table of three tokens' weights by the last token and the position; token 0 is the end. Ties are common."""
    weights = draw(
        st.lists(st.lists(st.sampled_from([1, 2, 3, 5, 40]), min_size=3, max_size=3), min_size=12, max_size=12)
    )

    def model(answer: Sequence[int]) -> list[float]:
        row = weights[(len(answer) * 3 + (answer[-1] if answer else 0)) % len(weights)]
        return [math.log(weight / sum(row)) for weight in row]

    return model


def all_answers(model: Model, max_tokens: int) -> Iterator[tuple[tuple[int, ...], float]]:
    """Every answer that ends with token 0 or at the limit, with its log-probability."""
    for length in range(1, max_tokens + 1):
        for body in itertools.product((1, 2), repeat=length - 1):
            for last in (0, 1, 2) if length == max_tokens else (0,):
                answer = (*body, last)
                yield answer, sum(model(answer[:i])[token] for i, token in enumerate(answer))


@settings(deadline=None)
@given(models(), st.integers(1, 4), st.sampled_from([-1.0, 0.0, 0.7, 1.0, 2.0]), st.sampled_from(["false", "never"]))
def test_beams_for_all_find_the_best_of_all(model: Model, max_tokens: int, penalty: float, early_stopping: str):
    found = search(model, BeamSearchParams(64, penalty, early_stopping), max_tokens).finished
    oracle = {answer: total / len(answer) ** penalty for answer, total in all_answers(model, max_tokens)}
    assert {hypothesis.beam.token_ids for hypothesis in found} == oracle.keys()
    assert [hypothesis.score for hypothesis in found] == pytest.approx(sorted(oracle.values(), reverse=True))
    for hypothesis in found:
        assert hypothesis.score == pytest.approx(oracle[hypothesis.beam.token_ids])


@settings(deadline=None)
@given(models(), st.integers(1, 5))
def test_one_beam_is_greedy(model: Model, max_tokens: int):
    answer: tuple[int, ...] = ()
    while len(answer) < max_tokens and 0 not in answer:
        row = model(answer)
        answer += (row.index(max(row)),)
    (hypothesis,) = search(model, BeamSearchParams(1, early_stopping="true"), max_tokens).finished
    assert hypothesis.beam.token_ids == answer
    assert hypothesis.finish_reason == ("stop" if answer[-1] == 0 else "length")


@settings(deadline=None)
@given(models(), st.integers(1, 6), st.integers(1, 5), st.sampled_from(["true", "false", "never"]))
def test_answers_are_sound_sorted_and_no_two_alike(model: Model, width: int, max_tokens: int, early_stopping: str):
    found = search(model, BeamSearchParams(width, 1.0, early_stopping), max_tokens).finished
    answers = [hypothesis.beam.token_ids for hypothesis in found]
    assert 1 <= len(answers) <= width
    assert len(set(answers)) == len(answers)
    scores = [hypothesis.score for hypothesis in found]
    assert scores == sorted(scores, reverse=True)
    likelihood = dict(all_answers(model, max_tokens))
    for hypothesis in found:
        assert hypothesis.beam.cumulative_logprob == pytest.approx(likelihood[hypothesis.beam.token_ids])


def test_many_end_tokens_leave_enough_beams():
    # Tokens 0 to 3 end an answer and are likelier than the others; two beams must go on all the same.
    row = [math.log(p) for p in (0.2, 0.19, 0.18, 0.17, 0.14, 0.12)]
    state = BeamSearch(BeamSearchParams(2, early_stopping="never"), 3, frozenset(range(4)))
    state.advance([TokenLogprob(0, row[0], tuple(enumerate(row))[: state.num_top])])
    assert [beam.token_ids for beam in state.live] == [(4,), (5,)]
    assert [hypothesis.beam.token_ids for hypothesis in state.finished] == [(0,), (1,)]


@pytest.mark.parametrize(
    ("early_stopping", "steps"),
    # An answer may end at every step. Two have at the second one; the one in progress is better than the worse of them
    # then, and no longer is at the third; yet it might be again if all that follows were certain.
    [("true", 2), ("false", 3), ("never", 6)],
)
def test_when_a_search_ends(early_stopping: str, steps: int):
    def model(answer: Sequence[int]) -> list[float]:
        return [math.log(p) for p in ((0.5, 0.49, 0.01) if answer else (0.3, 0.69, 0.01))]

    count = 0

    def counted(answer: Sequence[int]) -> list[float]:
        nonlocal count
        count = max(count, len(answer) + 1)
        return model(answer)

    search(counted, BeamSearchParams(2, 1.0, early_stopping), 6)
    assert count == steps


# Through an executor --------------------------------------------------------------------------------------------------


def words(text: Sequence[int]) -> list[tuple[int, float]]:
    """Greedy says "b" and is stuck with a coin toss; "ac" is likelier as a whole, and then the text ends."""
    after = {"?": {"b": 0.6, "a": 0.4}, "a": {"c": 0.9, "d": 0.1}, "b": {"c": 0.5, "d": 0.5}}
    likely = after.get(chr(text[-1]) if text[-1] < 256 else "", {})
    pairs = [(ord(char), math.log(p)) for char, p in likely.items()]
    return pairs or [(EOS, math.log(0.99)), (ord("z"), math.log(0.01))]


def ask(width: int = 3, **sampling: object) -> tuple[Request, BeamSearchParams]:
    return Request(prompt="?", sampling=SamplingParams(**{"max_tokens": 8, **sampling})), BeamSearchParams(width)


def test_the_best_answers_come_first_with_their_scores(start: Start):
    manager = FakeManager(top=words, num_cached_tokens=2)
    result = start(manager).beam_search(*ask(n=2))
    total = math.log(0.4 * 0.9 * 0.99)
    assert [(o.index, o.text, o.token_ids, o.finish_reason) for o in result.outputs] == [
        (0, "ac", (*b"ac", EOS), "stop"),
        (1, "bc", (*b"bc", EOS), "stop"),
    ]
    assert result.outputs[0].cumulative_logprob == pytest.approx(total)
    assert result.outputs[0].score == pytest.approx(total / 3)
    assert (result.text, result.outputs[0].logprobs, result.num_cached_tokens) == ("ac", (), 2)


def test_each_step_asks_for_one_token_of_each_beam(start: Start):
    manager = FakeManager(top=words)
    result = start(manager).beam_search(*ask(width=2, max_tokens=2))
    assert [(tuple(r.prompt_token_ids[1:]), r.sampling.max_tokens, r.n) for r in manager.submitted] == [
        ((*b"?",), 1, 1),
        ((*b"?b",), 1, 1),
        ((*b"?a",), 1, 1),
    ]
    assert {r.logprobs for r in manager.submitted} == {2 + 1}
    assert result.num_generated_tokens == 3


def test_logprobs_of_the_answer(start: Start):
    result = start(FakeManager(top=words)).beam_search(*ask(logprobs=1))
    assert [entry.token_id for entry in result.logprobs] == [*b"ac", EOS]
    assert result.logprobs[0].top == ((ord("b"), math.log(0.6)),)
    assert sum(entry.logprob for entry in result.logprobs) == pytest.approx(result.outputs[0].cumulative_logprob)


def test_ends_are_those_of_the_request(start: Start):
    executor = start(FakeManager(top=words))
    request, _ = ask(stop_token_ids=[ord("c")])
    stopped = executor.beam_search(request, BeamSearchParams(3, length_penalty=0.0))
    assert (stopped.text, stopped.finish_reason, stopped.outputs[0].stop_reason) == ("a", "stop", ord("c"))
    request, _ = ask(stop_token_ids=[ord("c")], include_stop_str_in_output=True)
    assert executor.beam_search(request, BeamSearchParams(3, length_penalty=0.0)).text == "ac"
    endless = executor.beam_search(*ask(ignore_eos=True, max_tokens=4))
    assert (endless.token_ids[:3], endless.finish_reason) == ((*b"ac", EOS), "length")


def test_many_searches_on_one_loop(start: Start):
    async def main() -> list[str]:
        executor = start(FakeManager(top=words))
        searches = [executor.beam_search_async(*ask(width)) for width in (1, 2, 3)]
        return [result.text for result in await asyncio.gather(*searches)]

    assert asyncio.run(main()) == ["bc", "ac", "ac"]


def test_a_batch_of_beams_larger_than_the_queue(start: Start):
    assert start(FakeManager(top=words, max_queue_size=1)).beam_search(*ask(width=4)).text == "ac"


def test_cancelling_the_task_cancels_the_step(start: Start):
    async def main() -> None:
        manager = FakeManager(top=words, stepping="by hand")
        task = asyncio.ensure_future(start(manager).beam_search_async(*ask()))
        await asyncio.to_thread(manager.wait_until, lambda m: bool(m.running))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not manager.running

    asyncio.run(main())


@pytest.mark.parametrize("reason", ["timeout", "cancelled"])
def test_a_search_that_is_cut_keeps_its_beams(start: Start, reason: str):
    def answer(request: ManagerRequest) -> Iterator[int]:
        if len(request.prompt_token_ids) == 3:  # the second step
            if reason == "timeout":
                manager.time_out(len(manager.submitted))
            else:
                manager.cancel(len(manager.submitted))
        yield ord("x")

    manager = FakeManager(answer, top=words)
    result = start(manager).beam_search(*ask(n=2))
    assert [(o.text, o.finish_reason) for o in result.outputs] == [("b", reason), ("a", reason)]


def test_the_time_of_a_search_is_that_of_all_its_steps(start: Start):
    manager = FakeManager(top=words)
    start(manager).beam_search(Request(prompt="?", timeout=100, sampling=SamplingParams(max_tokens=3)))
    times = [request.timeout for request in manager.submitted]
    assert all(0 < later <= earlier <= 100 for earlier, later in itertools.pairwise(times))
    assert times[-1] < times[0]


@pytest.mark.parametrize(
    ("sampling", "params", "param"),
    [
        ({"n": 4}, {"beam_width": 3}, "n"),
        ({"stop": "a"}, {}, "stop"),
        ({"best_of": 2}, {}, "best_of"),
        ({}, {"beam_width": 0}, "beam_width"),
        ({}, {"beam_width": 65}, "beam_width"),
        ({}, {"length_penalty": float("inf")}, "length_penalty"),
        ({}, {"early_stopping": "soon"}, "early_stopping"),
        ({}, {"early_stopping": None}, "early_stopping"),
    ],
)
def test_what_beam_search_does_not_know_is_refused_by_name(
    start: Start, sampling: dict[str, object], params: dict[str, object], param: str
):
    executor = start(FakeManager(top=words))
    with pytest.raises(InvalidRequest) as caught:
        executor.beam_search(Request(prompt="?", sampling=SamplingParams(**sampling)), BeamSearchParams(**params))
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"structured_outputs": StructuredOutputs(regex="a+")}, "structured_outputs"),
        ({"return_logits": True}, "return_logits"),
    ],
)
def test_options_that_beam_search_would_ignore_are_refused_by_name(
    start: Start, options: dict[str, object], param: str
):
    with pytest.raises(InvalidRequest) as caught:
        start(FakeManager(top=words)).beam_search(Request(prompt="?", **options))
    assert caught.value.param == param


def test_sampling_that_the_engine_itself_asks_for_is_no_hindrance(start: Start):
    executor = start(FakeManager(top=words), FakeEngine({"temperature": 0.3, "top_k": 5}))
    assert executor.beam_search("?", BeamSearchParams(2)).text == "ac"
