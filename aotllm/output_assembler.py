"""`OutputAssembler`: turns the runtime's responses for one sequence into text, and applies stop strings."""

from __future__ import annotations

from typing import Any, Protocol, cast, get_args

from aotllm.manager import Response
from aotllm.request import FinishReason, SequenceOutput, Timings, TokenLogprob, TokenOutput
from aotllm.sampling_params import SamplingParams
from aotllm.stop_strings import StopStrings


class Detokenizer(Protocol):
    """What is needed of `aotllm.tokenization.IncrementalDetokenizer`."""

    def append(self, ids: list[int]) -> str:
        """Text that is complete with these tokens."""

    def flush(self) -> str:
        """End of the text: what is left of an incomplete character."""


class OutputAssembler:
    """Accumulates one of a request's answers. Used by the dispatcher thread only.

    Stop strings that complete within the first `min_tokens` tokens do not count.

    After `finish_reason` is set no more responses are taken. Where a stop string ended the answer the runtime does not
    know yet, and has to be told to cancel.
    """

    def __init__(self, detokenizer: Detokenizer, sampling: SamplingParams, index: int = 0) -> None:
        self.text = ""
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.logits: list[Any] = []
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self._index = index
        self._cumulative_logprob: float | None = None
        self._last: Response | None = None
        self._detokenizer = detokenizer
        self._sampling = sampling
        self._stops = StopStrings(sampling.stop, sampling.include_stop_str_in_output)

    def add(self, response: Response) -> TokenOutput:
        """Take a response without error; returns what it adds.

        Tokens after the one that completes a stop string are dropped.
        """
        assert self.finish_reason is None
        self._last = response
        if self._is_only_text(response):
            text = self._detokenizer.append(response.token_ids)
            return self._record(TokenOutput(text, tuple(response.token_ids), index=self._index))
        text, used = "", 0
        for used, token_id in enumerate(response.token_ids, start=1):
            hidden = (
                response.stop_token_id is not None
                and used == len(response.token_ids)
                and not self._sampling.include_stop_str_in_output
            )
            if not hidden:
                text += self._stops.append(self._detokenizer.append([token_id]), self._armed(used))
            if self._stops.matched is not None:
                break
        if response.finish_reason is not None and self._stops.matched is None:
            text += self._flush(self._armed(used))
            self._finish(response)
        if self._stops.matched is not None:
            self.finish_reason, self.stop_reason = "stop", self._stops.matched
        if response.logprobs:
            known = self._cumulative_logprob or 0.0
            self._cumulative_logprob = known + sum(entry.logprob for entry in response.logprobs[:used])
        shown = response.logprobs[:used] if self._sampling.logprobs is not None else []
        return self._record(
            TokenOutput(
                text=text,
                token_ids=tuple(response.token_ids[:used]),
                logprobs=tuple(map(TokenLogprob.from_native, shown)),
                logits=tuple(response.logits[:used]),
                finish_reason=self.finish_reason,
                stop_reason=self.stop_reason,
                index=self._index,
            )
        )

    def _is_only_text(self, response: Response) -> bool:
        """Nothing can end here, and nothing was asked for but the text: the way of nearly every token."""
        return not (response.finish_reason is not None or response.logprobs or response.logits or self._sampling.stop)

    def cancel(self) -> TokenOutput:
        """End without a last response of the runtime."""
        assert self.finish_reason is None
        self.finish_reason = "cancelled"
        return self._record(TokenOutput(self._flush(self._armed(0)), (), finish_reason="cancelled", index=self._index))

    def result(self, timings: Timings) -> SequenceOutput:
        """The whole answer, once it has ended."""
        assert self.finish_reason is not None
        return SequenceOutput(
            index=self._index,
            text=self.text,
            token_ids=tuple(self.token_ids),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            timings=timings,
            logprobs=tuple(self.logprobs),
            logits=tuple(self.logits),
            cumulative_logprob=self._cumulative_logprob,
            num_preemptions=self._last.num_preemptions if self._last is not None else 0,
            num_draft_tokens=self._last.num_draft_tokens if self._last is not None else 0,
            num_accepted_tokens=self._last.num_accepted_tokens if self._last is not None else 0,
        )

    def _armed(self, used: int) -> bool:
        """Whether a stop string that completes with the `used`th token of this step ends the answer."""
        return len(self.token_ids) + used > self._sampling.min_tokens

    def _flush(self, armed: bool) -> str:
        return self._stops.append(self._detokenizer.flush(), armed) + self._stops.flush()

    def _finish(self, response: Response) -> None:
        reason = response.finish_reason
        assert reason in get_args(FinishReason), f"unknown finish reason {reason!r}"
        self.finish_reason = cast(FinishReason, reason)
        if response.stop_token_id in self._sampling.stop_token_ids:
            self.stop_reason = response.stop_token_id

    def _record(self, output: TokenOutput) -> TokenOutput:
        self.text += output.text
        self.token_ids += output.token_ids
        if output.logprobs or output.logits:
            self.logprobs += output.logprobs
            self.logits += output.logits
        return output
