"""`BeamSearchDriver`: a beam search as rounds of one-token requests, whose prefixes the cache keeps."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from aotllm.beam_search import BeamSearch, BeamSearchParams, Hypothesis
from aotllm.errors import InvalidRequest
from aotllm.manager import ManagerRequest
from aotllm.parameters import parameters
from aotllm.request import RequestOutput, SequenceOutput, Timings
from aotllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from aotllm.tokenization import Tokenizer

_USED = {
    "max_tokens",
    "stop_token_ids",
    "ignore_eos",
    "logprobs",
    "prompt_logprobs",
    "n",
    "include_stop_str_in_output",
    "skip_special_tokens",
}
_WITHOUT_EFFECT = {"temperature", "top_k", "top_p", "min_p", "typical_p", "seed"}
"""Nothing is drawn, and the scores are of the raw logits"""


class BeamSearchDriver:
    """Runs one search: ask for `next_requests()`, answer with `take(outputs)`, until there are none; then
    `result()`.

    Every step submits each beam's text as a prompt and asks for the most likely next tokens; all but the last token of
    it are in the prefix cache.

    Args:
        request: the prompt and its options; `sampling.max_tokens` is set.
        params: how to search.
        eos_token_ids: of the engine.
        defaults: the engine's own sampling, which asks for nothing.
        vocab_size: of the engine.

    Raises:
        InvalidRequest: more answers than beams, or sampling that beam search does not know; `param` names it.
    """

    def __init__(
        self,
        request: ManagerRequest,
        params: BeamSearchParams,
        eos_token_ids: Sequence[int],
        defaults: SamplingParams,
        vocab_size: int,
    ) -> None:
        sampling = request.sampling
        _refuse_what_has_no_effect(sampling, defaults)
        for name, given in (
            ("structured_outputs", request.constraint is not None),
            ("return_logits", request.return_logits),
        ):
            if given:
                raise _has_no_effect(name)
        if sampling.n > params.beam_width:
            raise InvalidRequest(
                f"n must be at most beam_width, which is {params.beam_width}, got {sampling.n} answers", "n"
            )
        assert sampling.max_tokens is not None
        ends = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else eos_token_ids)}
        self._search = BeamSearch(params, sampling.max_tokens, frozenset(ends))
        self._request = request
        self._num_top = min(self._search.num_top, vocab_size)
        self._start = time.monotonic()
        self._first_token_seconds: float | None = None
        self._first: RequestOutput | None = None
        self._num_generated_tokens = 0

    def next_requests(self) -> list[ManagerRequest]:
        """One request per beam; none when the search has ended or its time is over."""
        timeout = self._request.timeout
        if timeout:
            timeout -= time.monotonic() - self._start
            if timeout <= 0:
                self._search.cut("timeout")
        step = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, logprobs=0)
        return [
            replace(
                self._request,
                prompt_token_ids=(*self._request.prompt_token_ids, *beam.token_ids),
                sampling=step,
                n=1,
                logprobs=self._num_top,
                timeout=timeout,
                prompt_logprobs=self._request.prompt_logprobs if self._first is None else None,
            )
            for beam in self._search.live
        ]

    def take(self, outputs: Sequence[RequestOutput]) -> None:
        """What the model said to each of the requests, in order."""
        self._first = self._first or outputs[0]
        for output in outputs:
            if output.finish_reason in ("timeout", "cancelled") and not output.token_ids:
                self._search.cut(output.finish_reason)
                return
        if self._first_token_seconds is None:
            self._first_token_seconds = time.monotonic() - self._start
        self._num_generated_tokens += len(outputs)
        self._search.advance([output.logprobs[0] for output in outputs])

    def result(self, tokenizer: Tokenizer) -> RequestOutput:
        """The best answers, best first."""
        first = self._first
        queue_seconds = first.timings.queue_seconds if first is not None else None
        timings = Timings(self._first_token_seconds, time.monotonic() - self._start, queue_seconds)
        best = self._search.finished[: self._request.sampling.n]
        return RequestOutput(
            request_id=first.request_id if first is not None else 0,
            prompt_token_ids=tuple(self._request.prompt_token_ids),
            num_cached_tokens=first.num_cached_tokens if first is not None else 0,
            outputs=tuple(self._answer(index, found, timings, tokenizer) for index, found in enumerate(best)),
            timings=timings,
            prompt_logprobs=first.prompt_logprobs if first is not None else (),
            num_generated_tokens=self._num_generated_tokens,
        )

    def _answer(self, index: int, found: Hypothesis, timings: Timings, tokenizer: Tokenizer) -> SequenceOutput:
        from aotllm.tokenization import IncrementalDetokenizer

        sampling, beam = self._request.sampling, found.beam
        shown = beam.token_ids
        if found.finish_reason == "stop" and not sampling.include_stop_str_in_output:
            shown = shown[:-1]
        detokenizer = IncrementalDetokenizer(tokenizer, self._request.prompt_token_ids, sampling.skip_special_tokens)
        stopped_by = beam.token_ids[-1] if found.finish_reason == "stop" else None
        num_logprobs = sampling.logprobs
        return SequenceOutput(
            index=index,
            text=detokenizer.append(shown) + detokenizer.flush(),
            token_ids=beam.token_ids,
            finish_reason=found.finish_reason,
            stop_reason=stopped_by if stopped_by in sampling.stop_token_ids else None,
            timings=timings,
            logprobs=()
            if num_logprobs is None
            else tuple(replace(entry, top=entry.top[:num_logprobs]) for entry in beam.logprobs),
            cumulative_logprob=beam.cumulative_logprob,
            score=found.score,
        )


def _refuse_what_has_no_effect(sampling: SamplingParams, defaults: SamplingParams) -> None:
    for name, default, _ in parameters(SamplingParams):
        if name in _USED | _WITHOUT_EFFECT:
            continue
        value = getattr(sampling, name)
        if value not in (default, getattr(defaults, name)):
            raise _has_no_effect(name)


def _has_no_effect(name: str) -> InvalidRequest:
    return InvalidRequest(f"{name} has no effect in beam search; leave one of them out", name)
