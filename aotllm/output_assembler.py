"""`OutputAssembler`: turns the runtime's responses for one request into text, and applies stop strings."""

from __future__ import annotations

from typing import Any, Protocol, cast, get_args

from aotllm.manager import Response
from aotllm.request import FinishReason, TokenLogprob, TokenOutput
from aotllm.sampling_params import SamplingParams
from aotllm.stop_strings import StopStrings


class Detokenizer(Protocol):
    """What is needed of `aotllm.tokenization.IncrementalDetokenizer`."""

    def append(self, ids: list[int]) -> str:
        """Text that is complete with these tokens."""

    def flush(self) -> str:
        """End of the text: what is left of an incomplete character."""


class OutputAssembler:
    """Accumulates one request's answer. Used by the dispatcher thread only.

    After `finish_reason` is set no more responses are taken. Where a stop string ended the answer the runtime does not
    know yet, and has to be told to cancel.
    """

    def __init__(self, detokenizer: Detokenizer, sampling: SamplingParams) -> None:
        self.text = ""
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.logits: list[Any] = []
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self.num_cached_tokens = 0
        self._detokenizer = detokenizer
        self._sampling = sampling
        self._stops = StopStrings(sampling.stop, sampling.include_stop_str_in_output)

    def add(self, response: Response) -> TokenOutput:
        """Take a response without error; returns what it adds.

        Tokens after the one that completes a stop string are dropped.
        """
        assert self.finish_reason is None
        self.num_cached_tokens = response.num_cached_tokens
        text, used = "", 0
        for used, token_id in enumerate(response.token_ids, start=1):
            hidden = (
                response.stop_token_id is not None
                and used == len(response.token_ids)
                and not self._sampling.include_stop_str_in_output
            )
            if not hidden:
                text += self._stops.append(self._detokenizer.append([token_id]))
            if self._stops.matched is not None:
                break
        if response.finish_reason is not None and self._stops.matched is None:
            text += self._flush()
            self._finish(response)
        if self._stops.matched is not None:
            self.finish_reason, self.stop_reason = "stop", self._stops.matched
        return self._record(
            TokenOutput(
                text=text,
                token_ids=tuple(response.token_ids[:used]),
                logprobs=tuple(
                    TokenLogprob(entry.token_id, entry.logprob, tuple((int(t), float(p)) for t, p in entry.top))
                    for entry in response.logprobs[:used]
                ),
                logits=tuple(response.logits[:used]),
                finish_reason=self.finish_reason,
                stop_reason=self.stop_reason,
            )
        )

    def cancel(self) -> TokenOutput:
        """End without a last response of the runtime."""
        assert self.finish_reason is None
        self.finish_reason = "cancelled"
        return self._record(TokenOutput(self._flush(), (), finish_reason="cancelled"))

    def _flush(self) -> str:
        return self._stops.append(self._detokenizer.flush()) + self._stops.flush()

    def _finish(self, response: Response) -> None:
        reason = response.finish_reason
        assert reason in get_args(FinishReason), f"unknown finish reason {reason!r}"
        self.finish_reason = cast(FinishReason, reason)
        if response.stop_token_id in self._sampling.stop_token_ids:
            self.stop_reason = response.stop_token_id

    def _record(self, output: TokenOutput) -> TokenOutput:
        self.text += output.text
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs
        self.logits += output.logits
        return output
