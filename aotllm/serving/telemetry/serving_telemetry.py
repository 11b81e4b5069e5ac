"""`ServingTelemetry`: metrics, log and traces of a front end, as its options say."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aotllm.request import Request
from aotllm.request_handle import RequestListener
from aotllm.serving.call import Call
from aotllm.serving.options import ServingOptions
from aotllm.serving.telemetry.request_log import RequestLog
from aotllm.serving.telemetry.request_metrics import RequestMetrics
from aotllm.serving.telemetry.request_watch import RequestWatch, Sink

if TYPE_CHECKING:
    from aotllm.serving.telemetry.tracing import Tracing


class ServingTelemetry:
    """The `Telemetry` of a server; one per front end.

    Args:
        options: log_requests, log_prompts, log_prompt_chars, otlp_endpoint.
        sinks: more places that the records of requests go to.

    Raises:
        AotllmError: otlp_endpoint is set and the extra `tracing` is not installed.
        InvalidRequest: otlp_endpoint is no URL.
    """

    def __init__(self, options: ServingOptions, *sinks: Sink) -> None:
        self.metrics = RequestMetrics()
        self._sinks: list[Sink] = list(sinks)
        if options.log_requests:
            self._sinks.append(RequestLog(options.log_prompt_chars if options.log_prompts else None))
        self._tracing: Tracing | None = None
        if options.otlp_endpoint is not None:
            from aotllm.serving.telemetry.tracing import Tracing

            self._tracing = Tracing(options.otlp_endpoint)
            self._sinks.append(self._tracing)

    def begin(self, call: Call, request: Request) -> RequestListener:
        """See `Telemetry.begin`."""
        return RequestWatch(call, request, self.metrics.of(call.model), self._sinks)

    def close(self) -> None:
        """See `Telemetry.close`."""
        if self._tracing is not None:
            self._tracing.close()
