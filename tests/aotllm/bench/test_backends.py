"""What each protocol sends, and how its answers are counted."""

from __future__ import annotations

import json
from typing import Any

import pytest

from aotllm.bench.backends.base import Backend, RequestSettings
from aotllm.bench.backends.kserve_http import KServeHttpBackend
from aotllm.bench.backends.openai import OpenAIBackend, _Answer, error_message
from aotllm.bench.conversation import Message
from aotllm.bench.http_client import HttpClient
from aotllm.bench.record import RequestFailed, RequestRecord
from tests.aotllm.bench.socket_server import Request, SocketServer, event_stream, http

TALK = [Message("system", "be"), Message("user", "hi"), Message("assistant", " yo"), Message("user", "so")]


def backend_of(name: str, client: HttpClient) -> Backend:
    return KServeHttpBackend(client) if name == "kserve-http" else OpenAIBackend(client, chat=name == "openai-chat")


def generate(
    name: str, answer: bytes, settings: RequestSettings | None = None
) -> tuple[RequestRecord, Request, dict[str, Any]]:
    """The record of one request, and the request as the server saw it."""
    server, record = SocketServer(lambda request: answer), RequestRecord()

    async def ask(port: int) -> None:
        backend = backend_of(name, HttpClient(f"http://127.0.0.1:{port}"))
        await backend.generate(TALK, 9, settings or RequestSettings("m"), record)
        await backend.close()

    server.run(ask)
    return record, server.requests[0], json.loads(server.requests[0].body)


def chat(content: str | None = None, finish: str | None = None, **delta: Any) -> str:
    return json.dumps({"choices": [{"index": 0, "delta": {"content": content, **delta}, "finish_reason": finish}]})


def text(text: str, finish: str | None = None, **fields: Any) -> str:
    return json.dumps({"choices": [{"index": 0, "text": text, "finish_reason": finish}], **fields})


USAGE = '{"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":4}}}'


def test_a_chat():
    events = [chat("", role="assistant"), chat("a"), chat("b"), chat("", "stop"), USAGE, "[DONE]"]
    record, request, body = generate("openai-chat", event_stream(*events))
    assert request.line == "POST /v1/chat/completions HTTP/1.1"
    assert body == {
        "model": "m",
        "messages": [{"role": role, "content": content} for role, content in TALK],
        "max_completion_tokens": 9,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert (record.text, len(record.chunk_times)) == ("ab", 2)
    assert (record.prompt_tokens, record.output_tokens, record.cached_tokens) == (7, 3, 4)


def test_a_completion():
    settings = RequestSettings("m", None, ignore_eos=True, continuous_usage=True, extra_body={"top_k": 5})
    first = text("ab", usage={"prompt_tokens": 7, "completion_tokens": 2})
    record, request, body = generate("openai", event_stream(first, text("c", "length"), USAGE, "[DONE]"), settings)
    assert request.line == "POST /v1/completions HTTP/1.1"
    assert body == {
        "model": "m",
        "prompt": "be\n\nhi yo\n\nso",
        "max_tokens": 9,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "ignore_eos": True,
        "top_k": 5,
    }
    assert (record.text, record.output_tokens) == ("abc", 3)


def test_generate_stream():
    events = [
        '{"model_name":"m","model_version":"1","text_output":"a","num_input_tokens":7,"num_output_tokens":1}',
        '{"text_output":["b"],"num_output_tokens":[1]}',
        '{"text_output":"c","num_output_tokens":2}',
    ]
    record, request, body = generate("kserve-http", event_stream(*events), RequestSettings("a/b", ignore_eos=True))
    assert request.line == "POST /v2/models/a%2Fb/generate_stream HTTP/1.1"
    assert body == {
        "text_input": "be\n\nhi yo\n\nso",
        "max_tokens": 9,
        "min_tokens": 9,
        "stream": True,
        "temperature": 0.0,
        "return_num_input_tokens": True,
        "return_num_output_tokens": True,
    }
    assert (record.text, record.prompt_tokens, record.output_tokens) == ("abc", 7, 4)


def test_a_response_counts_its_own_tokens():
    events = [json.dumps({"text_output": "x", "num_output_tokens": count}) for count in (3, 1, 2)]
    record, _, _ = generate("kserve-http", event_stream(*events))
    assert (record.output_tokens, list(record.chunk_tokens), len(record.itls)) == (6, [3, 1, 2], 3)


def answer_at(*events: tuple[float, bytes]) -> RequestRecord:
    """Events at known times."""
    record = RequestRecord(sent=10.0)
    answer = _Answer(record)
    answer.head(200, {"content-type": "text/event-stream"})
    for now, data in events:
        answer.data(b"data: " + data + b"\n\n", now)
    answer.finish()
    record.ended = events[-1][0]
    return record


def test_times_of_a_chat_as_vllm_sends_it():
    record = answer_at(
        (10.30, b'{"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}'),
        (10.50, b'{"choices":[{"index":0,"delta":{"content":"a"},"logprobs":null,"finish_reason":null}]}'),
        (10.75, b'{"choices":[{"index":0,"delta":{"content":"b"},"finish_reason":null}],"usage":null}'),
        (11.00, b'{"choices":[{"index":0,"delta":{"content":""},"finish_reason":"stop","stop_reason":null}]}'),
        (11.01, USAGE.encode()),
        (11.02, b"[DONE]"),
    )
    assert (record.ttft, record.itls) == (0.5, [0.25])
    assert record.tpot == 0.25  # three tokens: the end token came with the finish reason, at 11.0
    assert record.e2el == pytest.approx(1.02)


def test_times_of_a_chat_as_llama_cpp_sends_it():
    record = answer_at(
        (10.3, b'{"choices":[{"index":0,"delta":{"role":"assistant","content":null},"finish_reason":null}]}'),
        (10.5, b'{"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":null}],"timings":{"x":1}}'),
        (11.0, b'{"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}'),
        (11.0, b"[DONE]"),
    )
    assert (record.ttft, record.num_output_tokens) == (0.5, 1)


@pytest.mark.parametrize("delta", ['"reasoning_content":"hm"', '"tool_calls":[{"index":0}]', '"reasoning":"hm"'])
def test_a_first_token_may_be_no_text(delta: str):
    first = b'{"choices":[{"delta":{"content":null,%s}}]}' % delta.encode()
    assert answer_at((10.5, first), (11.0, chat("a", "stop").encode())).ttft == 0.5


@pytest.mark.parametrize("empty", ['"tool_calls":[]', '"tool_calls":null', '"reasoning_content":""'])
def test_empty_fields_are_no_token(empty: str):
    first = b'{"choices":[{"delta":{"content":null,%s}}],"error":null}' % empty.encode()
    assert answer_at((10.5, first), (11.0, chat("a", "stop").encode())).ttft == 1.0


ERROR = '{"error":{"message":"no","code":503}}'
NAMES = ["openai", "openai-chat", "kserve-http"]


@pytest.mark.parametrize(
    ("names", "answer", "kind", "message"),
    [
        (NAMES, http(ERROR.encode(), "503 Service Unavailable"), "http_503", "HTTP 503: no"),
        (NAMES, http(b"<h1>Bad\n Gateway</h1>", "502 Bad Gateway"), "http_502", "HTTP 502: <h1>Bad Gateway</h1>"),
        (NAMES, http(b"", "404 Not Found"), "http_404", "HTTP 404"),
        (NAMES, http(b'{"choices":[]}'), "protocol", "not a stream of events"),
        (NAMES, event_stream("{"), "protocol", "cannot read the event"),
        (NAMES, event_stream('{"choices":"x","text_output":1}'), "protocol", "cannot read the event"),
        (NAMES[:2], event_stream(ERROR, "[DONE]"), "stream", "error within the stream: no"),
        (["kserve-http"], event_stream('{"error":"no"}'), "stream", "error within the stream: no"),
        (["openai"], event_stream(text("a")), "incomplete", "before the answer was complete"),
        (["openai-chat"], event_stream(chat("a")), "incomplete", "before the answer was complete"),
        (["kserve-http"], event_stream(), "incomplete", "before the answer was complete"),
    ],
)
def test_failures_by_kind(names: list[str], answer: bytes, kind: str, message: str):
    for name in names:
        with pytest.raises(RequestFailed) as failure:
            generate(name, answer)
        assert failure.value.error_kind == kind
        assert message in failure.value.message


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ('{"error":{"message":"m","type":"t"}}', "m"),
        ('{"error":"Unauthorized"}', "Unauthorized"),
        ('{"object":"error","message":"m"}', "m"),
        ('{"detail":[{"loc":["body"]}]}', '[{"loc": ["body"]}]'),
        ("oh", None),
    ],
)
def test_error_bodies_of_several_servers(body: str, message: str | None):
    assert error_message(body.encode()) == message
