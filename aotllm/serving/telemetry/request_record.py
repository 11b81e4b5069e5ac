"""`RequestRecord`: what became of one request."""

from __future__ import annotations

from dataclasses import dataclass

from aotllm.errors import AotllmError
from aotllm.request import Request, RequestOutput
from aotllm.serving.call import Call

FINISHED_REASONS = ("stop", "length", "timeout", "abort", "error")
"""`finished_reason` of metrics and logs, in vLLM's words: abort = cancelled by the client or by shutdown"""


@dataclass(frozen=True)
class RequestRecord:
    """Moments are seconds of the monotonic clock; None = it never came to that, or nobody told. `result` and `error`
    are as of `RequestListener.on_end`."""

    call: Call
    request: Request
    end: float
    result: RequestOutput | None
    error: AotllmError | None
    submitted: float | None = None
    """The prompt was tokenized, and the request given to the engine"""
    started: float | None = None
    """The prompt began to be computed"""
    first_token: float | None = None
    last_token: float | None = None

    @classmethod
    def of(
        cls,
        call: Call,
        request: Request,
        end: float,
        result: RequestOutput | None,
        error: AotllmError | None,
        first_token: float | None,
        last_token: float | None,
    ) -> RequestRecord:
        """From what was seen (`first_token`, `last_token`), and the timings of the result, which know better."""
        if result is None:
            return cls(call, request, end, None, error, None, None, first_token, last_token)
        timings = result.timings
        submitted = max(call.arrival, end - timings.total_seconds)
        if timings.first_token_seconds is not None:
            first_token = submitted + timings.first_token_seconds
            last_token = max(first_token, last_token or end)
        started = None
        if timings.queue_seconds is not None:
            # Clocks of two sides: a prompt cannot have begun after its first token.
            started = min(submitted + timings.queue_seconds, first_token or end)
        return cls(call, request, end, result, error, submitted, started, first_token, last_token)

    @property
    def finished_reason(self) -> str:
        """One of FINISHED_REASONS."""
        if self.result is None:
            return "abort" if self.error is not None and self.error.kind == "cancelled" else "error"
        reason = self.result.finish_reason
        return "abort" if reason == "cancelled" else reason

    @property
    def error_kind(self) -> str | None:
        """`AotllmError.kind`; None for a request with a result."""
        if self.result is not None:
            return None
        return self.error.kind if self.error is not None else "internal"

    @property
    def prepare_seconds(self) -> float | None:
        """From the call to the engine's queue: reading the body, chat template, tokens, grammar."""
        return _between(self.call.arrival, self.submitted)

    @property
    def queue_seconds(self) -> float | None:
        """In the engine's queue."""
        return _between(self.submitted, self.started)

    @property
    def prefill_seconds(self) -> float | None:
        """From the queue's end to the first token."""
        return _between(self.started, self.first_token)

    @property
    def decode_seconds(self) -> float | None:
        """From the first token to the last one."""
        return _between(self.first_token, self.last_token)

    @property
    def inference_seconds(self) -> float | None:
        """Prefill and decode."""
        return _between(self.started, self.last_token)

    @property
    def time_to_first_token(self) -> float | None:
        """From the call to the first token."""
        return _between(self.call.arrival, self.first_token)

    @property
    def total_seconds(self) -> float:
        """From the call to the end."""
        return self.end - self.call.arrival


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else max(0.0, end - start)
