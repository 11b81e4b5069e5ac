"""`RequestInFlight`: gathers the answers of one request from the runtime's responses."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from aotllm.manager import Response
from aotllm.output_assembler import OutputAssembler
from aotllm.request import RequestOutput, SequenceOutput, Timings, TokenLogprob, TokenOutput


@dataclass
class News:
    """What a response meant."""

    outputs: list[TokenOutput] = field(default_factory=list)
    result: RequestOutput | None = None
    """Set when the request is finished"""
    stopped_early: bool = False
    """The text ended the sequence, and the runtime has to be told"""


class Stopwatch:
    """When things happened to a sequence, by the monotonic clock."""

    def __init__(self, start: float) -> None:
        self._start = start
        self.first_token_seconds: float | None = None

    def elapsed(self) -> float:
        """Seconds since submit."""
        return time.monotonic() - self._start

    def saw_token(self) -> None:
        """A token has arrived; only the first one counts."""
        if self.first_token_seconds is None:
            self.first_token_seconds = self.elapsed()


class RequestInFlight:
    """The sequences of one request. Used by the dispatcher thread, except to make it.

    Where fewer answers are kept than generated (`best_of`) no output comes before the last one has ended: which ones
    are kept, and under which index, is not known earlier. Where the prompt is scored none comes before the first one of
    sequence 0: the runtime scores the prompt with that one, and the others may overtake it.

    Args:
        request_id, prompt_token_ids: of the request.
        assemblers: one per sequence, by index.
        keep: how many answers are handed out, at most as many as there are.
        start: `time.monotonic()` at submit.
        scores_prompt: log-probabilities of the prompt will come with sequence 0.
    """

    def __init__(
        self,
        request_id: int,
        prompt_token_ids: Sequence[int],
        assemblers: Sequence[OutputAssembler],
        keep: int,
        start: float,
        scores_prompt: bool = False,
    ) -> None:
        self._request_id = request_id
        self._prompt_token_ids = tuple(prompt_token_ids)
        self._assemblers = assemblers
        self._stopwatches = [Stopwatch(start) for _ in assemblers]
        self._done: dict[int, SequenceOutput] = {}
        self._keep = keep
        self._chooses = keep < len(assemblers)
        self._prompt_logprobs: tuple[TokenLogprob, ...] = ()
        self._waits_for_scores = scores_prompt
        self._held: list[tuple[TokenOutput, bool]] = []
        self._num_cached_tokens = 0
        self._embedding: Any = None

    def take(self, response: Response) -> News:
        """A response without error. One for a sequence that has ended (by a stop string) says nothing new."""
        index = response.sequence_index
        if index in self._done:
            return News()
        self._num_cached_tokens = max(self._num_cached_tokens, response.num_cached_tokens)
        if response.prompt_logprobs:
            self._prompt_logprobs = tuple(map(TokenLogprob.from_native, response.prompt_logprobs))
        if response.embedding is not None:
            self._embedding = response.embedding
        assembler, stopwatch = self._assemblers[index], self._stopwatches[index]
        first = stopwatch.first_token_seconds is None
        if response.token_ids:
            stopwatch.saw_token()
        output = assembler.add(response)
        if output.finish_reason is None and not (first or self._waits_for_scores or self._chooses):
            return News([output])  # nearly every token
        outputs = self._in_order(index, output, first)
        if output.finish_reason is None:
            return self._news(outputs)
        queue_seconds = response.timings.queue_seconds if response.timings is not None else None
        self._finish(index, queue_seconds)
        return self._news(outputs, stopped_early=response.finish_reason is None)

    def cancel(self) -> News:
        """End what has not ended, without last responses of the runtime."""
        outputs = self._release_held()
        for index, assembler in enumerate(self._assemblers):
            if index not in self._done:
                outputs.append(assembler.cancel())
                self._finish(index, None)
        return self._news(outputs)

    def _in_order(self, index: int, output: TokenOutput, first: bool) -> list[TokenOutput]:
        """What may be handed out now. The first response of sequence 0 has the scores of the prompt, or is its last."""
        if self._waits_for_scores and index > 0:
            self._held.append((output, first))
            return []
        self._waits_for_scores = False
        own = replace(output, prompt_logprobs=self._prompt_logprobs) if first else output
        return [own, *self._release_held()]

    def _release_held(self) -> list[TokenOutput]:
        held, self._held = self._held, []
        return [replace(o, prompt_logprobs=self._prompt_logprobs) if first else o for o, first in held]

    def _finish(self, index: int, queue_seconds: float | None) -> None:
        stopwatch = self._stopwatches[index]
        timings = Timings(stopwatch.first_token_seconds, stopwatch.elapsed(), queue_seconds)
        self._done[index] = self._assemblers[index].result(timings)

    def _news(self, outputs: list[TokenOutput], stopped_early: bool = False) -> News:
        if len(self._done) < len(self._assemblers):
            return News([] if self._chooses else outputs, None, stopped_early)
        result = self._result()
        if self._chooses:
            outputs = [_whole(answer, result.prompt_logprobs) for answer in result.outputs]
        return News(outputs, result, stopped_early)

    def _result(self) -> RequestOutput:
        answers = [self._done[index] for index in sorted(self._done)]
        kept = answers
        if self._chooses:
            best = sorted(answers, key=lambda answer: (-answer.mean_logprob, answer.index))[: self._keep]
            kept = [replace(answer, index=rank) for rank, answer in enumerate(best)]
        return RequestOutput(
            request_id=self._request_id,
            prompt_token_ids=self._prompt_token_ids,
            num_cached_tokens=self._num_cached_tokens,
            outputs=tuple(kept),
            timings=_together([answer.timings for answer in answers]),
            prompt_logprobs=self._prompt_logprobs,
            num_generated_tokens=sum(len(answer.token_ids) for answer in answers),
            embedding=self._embedding,
        )


def _together(timings: Sequence[Timings]) -> Timings:
    firsts = [t.first_token_seconds for t in timings if t.first_token_seconds is not None]
    queues = [t.queue_seconds for t in timings if t.queue_seconds is not None]
    return Timings(min(firsts, default=None), max(t.total_seconds for t in timings), min(queues, default=None))


def _whole(answer: SequenceOutput, prompt_logprobs: tuple[TokenLogprob, ...]) -> TokenOutput:
    """A finished answer as a single output."""
    return TokenOutput(
        text=answer.text,
        token_ids=answer.token_ids,
        logprobs=answer.logprobs,
        logits=answer.logits,
        finish_reason=answer.finish_reason,
        stop_reason=answer.stop_reason,
        index=answer.index,
        prompt_logprobs=prompt_logprobs,
    )
