"""`Tracing`: OpenTelemetry spans of requests, exported with OTLP over HTTP. Needs the extra `tracing`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import aotllm
from aotllm.errors import AotllmError, InvalidRequest
from aotllm.serving.telemetry.request_record import RequestRecord

try:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ImportError as error:
    raise AotllmError(
        f"tracing (--otlp-endpoint) needs {error.name}, which is not installed; install it with: "
        "pip install 'aotllm[tracing]'"
    ) from None

_TRACES_PATH = "/v1/traces"
_CHATS = ("/chat/completions", "/messages", "/responses")


class Tracing:
    """A span per request, made when it has ended, with children `queue`, `prefill` and `decode`. It continues the trace
    of the client's `traceparent` header. Attributes have the names of OpenTelemetry's conventions for generative AI,
    and those of vLLM where there is none. Sampling, resource attributes, headers and batching are set by the SDK's own
    environment variables (OTEL_TRACES_SAMPLER, OTEL_RESOURCE_ATTRIBUTES, OTEL_EXPORTER_OTLP_HEADERS, OTEL_BSP_…).

    Args:
        endpoint: URL of an OTLP/HTTP collector; without a path, /v1/traces is meant.
        epoch: what to add to the monotonic clock to get the time of day; None = as it is now.

    Raises:
        InvalidRequest: the endpoint is no http(s) URL.
    """

    def __init__(self, endpoint: str, epoch: float | None = None) -> None:
        service = {} if "OTEL_SERVICE_NAME" in os.environ else {SERVICE_NAME: "aotllm"}
        resource = Resource.create({**service, SERVICE_VERSION: aotllm.__version__})
        self._provider = TracerProvider(resource=resource)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=traces_url(endpoint))))
        self._tracer = self._provider.get_tracer("aotllm.serving", aotllm.__version__)
        self._propagator = TraceContextTextMapPropagator()
        self._epoch = epoch

    def __call__(self, record: RequestRecord) -> None:
        """A request has ended."""
        nanoseconds = self._clock()
        call = record.call
        headers = {"traceparent": call.traceparent, "tracestate": call.tracestate}
        parent = self._propagator.extract({name: value for name, value in headers.items() if value})
        span = self._tracer.start_span(
            "llm_request",
            parent,
            SpanKind.SERVER,
            _attributes(record),
            start_time=nanoseconds(call.arrival),
        )
        inside = set_span_in_context(span)
        for name, start, end in (
            ("queue", record.submitted, record.started),
            ("prefill", record.started, record.first_token),
            ("decode", record.first_token, record.last_token),
        ):
            if start is not None and end is not None:
                child = self._tracer.start_span(name, inside, start_time=nanoseconds(start))
                child.end(nanoseconds(max(start, end)))
        if record.error is not None and record.finished_reason == "error":
            span.set_status(Status(StatusCode.ERROR, record.error_kind))
        span.end(nanoseconds(record.end))

    def flush(self) -> None:
        """Send what waits to be sent."""
        self._provider.force_flush()

    def close(self) -> None:
        """Send what waits, and end. At the end of the process it happens by itself."""
        self._provider.shutdown()

    def _clock(self) -> Callable[[float], int]:
        # The time of day may be set while the server runs: one offset holds for one request, whose spans stay together.
        epoch = self._epoch if self._epoch is not None else time.time() - time.monotonic()
        return lambda moment: round((moment + epoch) * 1e9)


def traces_url(endpoint: str) -> str:
    """The URL that spans are posted to. Raises InvalidRequest."""
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise InvalidRequest(
            f"otlp_endpoint must be a URL like http://collector:4318, got {endpoint!r:.80}", "otlp_endpoint"
        )
    return endpoint if parts.path.strip("/") else parts._replace(path=_TRACES_PATH).geturl()


def _attributes(record: RequestRecord) -> dict[str, Any]:
    call, result, sampling = record.call, record.result, record.request.sampling
    attributes: dict[str, Any] = {
        "gen_ai.operation.name": _operation(record),
        "gen_ai.provider.name": "aotllm",
        "gen_ai.request.id": call.request_id,
        "gen_ai.request.model": call.model,
        "gen_ai.response.model": call.model,
        "url.path" if call.endpoint.startswith("/") else "rpc.method": call.endpoint,
        "gen_ai.latency.e2e": record.total_seconds,
        "gen_ai.latency.time_to_first_token": record.time_to_first_token,
        "gen_ai.latency.time_in_queue": record.queue_seconds,
        "gen_ai.latency.time_in_model_prefill": record.prefill_seconds,
        "gen_ai.latency.time_in_model_decode": record.decode_seconds,
        "gen_ai.latency.time_in_model_inference": record.inference_seconds,
    }
    if sampling is not None:
        attributes |= {
            "gen_ai.request.max_tokens": sampling.max_tokens,
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
            "gen_ai.request.top_k": sampling.top_k or None,
            "gen_ai.request.n": sampling.n,
            "gen_ai.request.choice.count": sampling.n if sampling.n != 1 else None,
            "gen_ai.request.seed": sampling.seed,
        }
    if result is not None:
        attributes |= {
            "gen_ai.usage.input_tokens": result.num_prompt_tokens,
            "gen_ai.usage.output_tokens": result.num_generated_tokens,
            "gen_ai.usage.cache_read.input_tokens": result.num_cached_tokens,
            # The same by the names that vLLM keeps from an older version of the conventions.
            "gen_ai.usage.prompt_tokens": result.num_prompt_tokens,
            "gen_ai.usage.completion_tokens": result.num_generated_tokens,
            "gen_ai.usage.num_sequences": len(result.outputs),
            "gen_ai.response.finish_reasons": [output.finish_reason for output in result.outputs],
        }
    else:
        attributes["error.type"] = record.error_kind
    return {name: value for name, value in attributes.items() if value is not None}


def _operation(record: RequestRecord) -> str:
    if record.request.messages is not None or record.call.endpoint.endswith(_CHATS):
        return "chat"
    return "text_completion"
