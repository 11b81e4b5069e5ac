"""Spans as a collector gets them: OTLP over HTTP, decoded from protobuf."""

from __future__ import annotations

import gzip
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from aotllm import SamplingParams
from aotllm.errors import Internal, InvalidRequest
from aotllm.request import Request, RequestOutput, SequenceOutput, Timings
from aotllm.serving.call import Call
from aotllm.serving.telemetry.base import NoTelemetry
from aotllm.serving.telemetry.request_record import RequestRecord
from aotllm.serving.telemetry.tracing import Tracing, traces_url
from tests.aotllm.fake_manager import FakeManager, says
from tests.aotllm.serving.http_client import Ask

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector:
    """A collector that keeps what it gets."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, ExportTraceServiceRequest]] = []
        self.arrived = threading.Condition()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                with collector.arrived:
                    collector.requests.append((self.path, ExportTraceServiceRequest.FromString(body)))
                    collector.arrived.notify_all()
                self.send_response(200)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()

    def spans(self, count: int) -> dict[str, Span]:
        """By name, once there are `count` of them."""
        with self.arrived:
            assert self.arrived.wait_for(lambda: len(self._spans()) >= count, timeout=60)
            spans = self._spans()
        assert len(spans) == count
        return {span.name: span for span in spans}

    def _spans(self) -> list[Span]:
        return [
            span
            for _, request in self.requests
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.close()


def values(attributes: Any) -> dict[str, Any]:
    """Attributes as a mapping."""

    def value(any_value: Any) -> Any:
        kind = any_value.WhichOneof("value")
        if kind == "array_value":
            return [value(v) for v in any_value.array_value.values]
        return getattr(any_value, kind)

    return {attribute.key: value(attribute.value) for attribute in attributes}


def record_of(
    result: RequestOutput | None, error: Any = None, request: Request | None = None, **headers: Any
) -> RequestRecord:
    call = Call("/v1/completions", NoTelemetry(), request_id="r-1", model="m", arrival=10.0, **headers)
    return RequestRecord.of(call, request or Request(prompt="a"), 12.5, result, error, None, 12.25)


def result_of(timings: Timings) -> RequestOutput:
    answer = SequenceOutput(0, "x", (7, 7), "length", None, timings)
    return RequestOutput(1, (1, 2, 3), 2, (answer,), timings, num_generated_tokens=2)


def test_spans_have_the_times_of_the_request(collector: Collector):
    tracing = Tracing(collector.url, epoch=1000.0)
    tracing(record_of(result_of(Timings(0.5, 2.0, 0.125))))
    tracing.close()
    spans = collector.spans(4)
    times = {name: (span.start_time_unix_nano / 1e9, span.end_time_unix_nano / 1e9) for name, span in spans.items()}
    assert times == {
        "llm_request": (1010.0, 1012.5),
        "queue": (1010.5, 1010.625),
        "prefill": (1010.625, 1011.0),
        "decode": (1011.0, 1012.25),
    }
    whole = spans["llm_request"]
    assert whole.kind == Span.SPAN_KIND_SERVER
    assert whole.parent_span_id == b""
    for name in ("queue", "prefill", "decode"):
        assert (spans[name].trace_id, spans[name].parent_span_id) == (whole.trace_id, whole.span_id)


def test_attributes_follow_the_conventions(collector: Collector):
    tracing = Tracing(collector.url)
    sampling = SamplingParams(max_tokens=9, temperature=0.5, top_p=0.25, n=2, seed=3)
    request = Request(messages=[{"role": "user", "content": "a secret"}], sampling=sampling)
    tracing(record_of(result_of(Timings(0.5, 2.0, 0.125)), request=request))
    tracing.close()
    expected = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "aotllm",
        "gen_ai.request.id": "r-1",
        "gen_ai.request.model": "m",
        "gen_ai.response.model": "m",
        "gen_ai.request.max_tokens": 9,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.25,
        "gen_ai.request.n": 2,
        "gen_ai.request.choice.count": 2,
        "gen_ai.request.seed": 3,
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 2,
        "gen_ai.usage.cache_read.input_tokens": 2,
        "gen_ai.usage.prompt_tokens": 3,
        "gen_ai.usage.completion_tokens": 2,
        "gen_ai.usage.num_sequences": 1,
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.latency.e2e": 2.5,
        "gen_ai.latency.time_to_first_token": 1.0,
        "gen_ai.latency.time_in_queue": 0.125,
        "gen_ai.latency.time_in_model_prefill": 0.375,
        "gen_ai.latency.time_in_model_decode": 1.25,
        "gen_ai.latency.time_in_model_inference": 1.625,
        "url.path": "/v1/completions",
    }
    assert values(collector.spans(4)["llm_request"].attributes) == expected
    resource = collector.requests[0][1].resource_spans[0].resource
    assert values(resource.attributes)["service.name"] == "aotllm"
    assert "a secret" not in str(collector.requests)


def test_the_trace_of_the_client_goes_on(collector: Collector):
    tracing = Tracing(collector.url)
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=value"}
    tracing(record_of(result_of(Timings(0.5, 2.0, None)), **headers))
    tracing.close()
    spans = collector.spans(2)  # without a time in the queue there is neither queue nor prefill
    assert {span.trace_id.hex() for span in spans.values()} == {TRACE}
    assert spans["llm_request"].parent_span_id.hex() == PARENT
    assert spans["llm_request"].trace_state == "vendor=value"
    assert spans["decode"].parent_span_id == spans["llm_request"].span_id


@pytest.mark.parametrize("traceparent", ["nonsense", f"00-{'0' * 32}-{PARENT}-01", ""])
def test_a_broken_trace_context_begins_a_new_trace(collector: Collector, traceparent: str):
    tracing = Tracing(collector.url)
    tracing(record_of(None, Internal("broken"), traceparent=traceparent))
    tracing.close()
    span = collector.spans(1)["llm_request"]
    assert span.parent_span_id == b""
    assert span.trace_id != bytes(16)


def test_a_trace_that_its_client_does_not_sample_is_not_sent(collector: Collector):
    tracing = Tracing(collector.url)
    tracing(record_of(None, Internal("broken"), traceparent=f"00-{TRACE}-{PARENT}-00"))
    tracing(record_of(None, Internal("broken")))
    tracing.close()
    assert collector.spans(1)["llm_request"].trace_id.hex() != TRACE


def test_a_failed_request_has_the_status_of_an_error(collector: Collector):
    tracing = Tracing(collector.url)
    tracing(record_of(None, Internal("broken")))
    tracing.close()
    span = collector.spans(1)["llm_request"]
    assert (span.status.code, span.status.message) == (Status.STATUS_CODE_ERROR, "internal")
    assert values(span.attributes)["error.type"] == "internal"


def test_requests_over_http_are_traced(ask: Ask, collector: Collector, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "1")  # milliseconds
    client = ask(FakeManager(says("sea")), otlp_endpoint=collector.url)
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    client.post("/v1/completions", {"prompt": "a", "max_tokens": 2}, headers=headers)
    spans = collector.spans(4)
    assert collector.requests[0][0] == "/v1/traces"
    whole = spans["llm_request"]
    assert whole.trace_id.hex() == TRACE
    assert values(whole.attributes)["gen_ai.usage.output_tokens"] == 2
    for name in ("queue", "prefill", "decode"):
        assert whole.start_time_unix_nano <= spans[name].start_time_unix_nano
        assert spans[name].start_time_unix_nano <= spans[name].end_time_unix_nano <= whole.end_time_unix_nano


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("http://c:4318", "http://c:4318/v1/traces"),
        ("http://c:4318/", "http://c:4318/v1/traces"),
        ("https://c/otlp/v1/traces", "https://c/otlp/v1/traces"),
    ],
)
def test_endpoints(given: str, url: str):
    assert traces_url(given) == url


@pytest.mark.parametrize("given", ["collector:4318", "grpc://c:4317", "http://", "/v1/traces"])
def test_what_is_no_endpoint_is_refused(given: str):
    with pytest.raises(InvalidRequest, match="otlp_endpoint must be a URL"):
        traces_url(given)


WITHOUT_SDK = """
import sys
sys.modules["opentelemetry.exporter"] = sys.modules["opentelemetry.sdk"] = None
from aotllm.serving.options import ServingOptions
from aotllm.serving.telemetry.serving_telemetry import ServingTelemetry
from aotllm.errors import AotllmError
ServingTelemetry(ServingOptions())
try:
    ServingTelemetry(ServingOptions(otlp_endpoint="http://c:4318"))
except AotllmError as error:
    print(error)
"""


def test_without_the_extra_only_traces_are_missing():
    output = subprocess.run([sys.executable, "-c", WITHOUT_SDK], capture_output=True, text=True, check=True).stdout
    assert "pip install 'aotllm[tracing]'" in output
