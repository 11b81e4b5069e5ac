"""`RequestWatch`: the listener that follows one request for metrics, log and traces."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from aotllm.errors import AotllmError
from aotllm.request import Request, RequestOutput, TokenOutput
from aotllm.serving.call import Call
from aotllm.serving.telemetry.request_metrics import ModelMetrics
from aotllm.serving.telemetry.request_record import RequestRecord

Sink = Callable[[RequestRecord], None]
FLUSH_SECONDS = 1.0
"""Tokens are counted together for that long: often enough for a scrape, seldom enough to cost next to nothing"""

_log = logging.getLogger(__name__)


class RequestWatch:
    """A `RequestListener`.

    Args:
        call, request: of the request.
        metrics: of its model.
        sinks: get the record at the end. What one of them raises is logged, and harms nobody else.
        clock: `time.monotonic`, or another one for tests.
    """

    __slots__ = (
        "_call",
        "_clock",
        "_first_token",
        "_flush_due",
        "_intervals",
        "_last",
        "_metrics",
        "_request",
        "_sinks",
        "_tokens",
        "_tokens_flushed",
    )

    def __init__(
        self,
        call: Call,
        request: Request,
        metrics: ModelMetrics,
        sinks: Sequence[Sink],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._call = call
        self._request = request
        self._metrics = metrics
        self._sinks = sinks
        self._clock = clock
        self._last: dict[int, float] = {}  # sequence -> its last output
        self._intervals: list[float] = []
        self._first_token: float | None = None
        self._tokens = 0
        self._tokens_flushed = 0
        self._flush_due = 0.0

    def on_output(self, output: TokenOutput) -> None:
        """See `RequestListener.on_output`."""
        count = len(output.token_ids)
        if not count:
            return
        now = self._clock()
        last = self._last.get(output.index)
        self._last[output.index] = now
        self._tokens += count
        if last is not None:
            self._intervals.append(now - last)
        elif self._first_token is None and not self._comes_at_the_end:
            self._first_token = now
            self._metrics.saw_first_token(now - self._call.arrival)
        if now >= self._flush_due:
            self._flush()
            self._flush_due = now + FLUSH_SECONDS

    def on_end(self, result: RequestOutput | None, error: AotllmError | None) -> None:
        """See `RequestListener.on_end`."""
        end = self._clock()
        last = max(self._last.values(), default=None)
        record = RequestRecord.of(self._call, self._request, end, result, error, self._first_token, last)
        if result is not None:
            # Of those answers, too, that best_of and beam search did not show.
            self._tokens = max(self._tokens, result.num_generated_tokens)
        if self._first_token is None and record.time_to_first_token is not None:
            self._metrics.saw_first_token(record.time_to_first_token)
        self._flush()
        self._metrics.finish(record)
        for sink in self._sinks:
            try:
                sink(record)
            except Exception:
                _log.exception("telemetry of request %s failed", self._call.request_id)

    @property
    def _comes_at_the_end(self) -> bool:
        """best_of chooses: outputs are handed out whole, when all have ended."""
        sampling = self._request.sampling
        return sampling is not None and sampling.num_sequences > sampling.n

    def _flush(self) -> None:
        self._metrics.count_tokens(self._tokens - self._tokens_flushed, self._intervals)
        self._tokens_flushed = self._tokens
        self._intervals = []
