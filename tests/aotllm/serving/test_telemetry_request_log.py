"""One line of JSON per request on the logger `aotllm.request`."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from datetime import datetime, timezone
from typing import Any

import pytest

from aotllm.errors import Cancelled, Internal, InvalidRequest
from aotllm.request import Request, RequestOutput, SequenceOutput, Timings
from aotllm.serving.call import Call
from aotllm.serving.telemetry.base import NoTelemetry
from aotllm.serving.telemetry.request_log import LOGGER, RequestLog, configure_logging
from aotllm.serving.telemetry.request_record import RequestRecord
from tests.aotllm.fake_manager import FakeManager, says
from tests.aotllm.serving.http_client import Ask

SECRET = "my secret wish"


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())

    @property
    def parsed(self) -> list[dict[str, Any]]:
        return [json.loads(text) for text in self.texts]


@pytest.fixture
def lines() -> Iterator[Lines]:
    """What the logger is told."""
    logger, handler = logging.getLogger(LOGGER), Lines()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(level)


def test_a_line_per_request(ask: Ask, lines: Lines):
    client = ask(FakeManager(says("sea"), num_cached_tokens=1))
    client.post("/v1/completions", {"prompt": [1, 2]}, headers={"X-Request-Id": "mine-1"})
    client.post("/v1/completions", {"prompt": [[1], [2]], "max_tokens": 1, "stream": True})
    first, *others = lines.parsed
    figures = {name: first[name] for name in first if not name.endswith("_ms") and name != "time"}
    assert figures == {
        "request_id": "mine-1",
        "endpoint": "/v1/completions",
        "model": "m",
        "finished_reason": "stop",
        "prompt_tokens": 2,
        "cached_tokens": 1,
        "generated_tokens": 4,
        "preemptions": 1,
    }
    times = {name for name in first if name.endswith("_ms")}
    assert times == {"prepare_ms", "queue_ms", "prefill_ms", "ttft_ms", "decode_ms", "total_ms"}
    assert [line["finished_reason"] for line in others] == ["length", "length"]
    assert len({line["request_id"] for line in others}) == 1, "they belong to one call"


@pytest.mark.parametrize("body", [{"prompt": SECRET}, {"messages": [{"role": "user", "content": SECRET}]}], ids=str)
@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ({}, None),
        ({"log_prompts": True}, SECRET),
        ({"log_prompts": True, "log_prompt_chars": 3}, ""),
        ({"log_requests": False, "log_prompts": True}, None),
    ],
    ids=str,
)
def test_prompts_are_shown_only_where_asked_for(
    ask: Ask, lines: Lines, body: dict[str, Any], options: dict[str, Any], shown: str | None
):
    path = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
    ask(FakeManager(says("x")), **options).post(path, body)
    assert len(lines.texts) == (0 if options.get("log_requests") is False else 1)
    assert any(SECRET in text for text in lines.texts) == (shown == SECRET)
    if lines.texts:
        assert ("prompt" in lines.parsed[0]) == (shown is not None)
    if "log_prompt_chars" in options:
        assert len(lines.parsed[0]["prompt"]) == 3


def test_prompts_of_ids_are_cut_too():
    shown = _line(Request(prompt_token_ids=list(range(1000))), prompt_chars=10)["prompt"]
    assert shown == str(list(range(1000)))[:10]


def test_errors_of_clients_and_of_the_server(ask: Ask, lines: Lines):
    ask(FakeManager(max_seq_len=8)).post("/v1/completions", {"prompt": SECRET})
    ask(FakeManager(lambda _: [Internal("a tap leaks")])).post("/v1/completions", {"prompt": SECRET})
    refused, failed = lines.parsed
    assert (refused["finished_reason"], refused["error_kind"]) == ("error", "context_too_long")
    assert (failed["finished_reason"], failed["error_kind"], failed["error"]) == ("error", "internal", "a tap leaks")
    assert not any(SECRET in text for text in lines.texts)


@pytest.mark.parametrize(
    ("error", "reason", "shows_message"),
    [
        (InvalidRequest("no such word as 'secret'"), "error", False),
        (Internal("a fault"), "error", True),
        (Cancelled("the client has gone"), "abort", False),
    ],
    ids=lambda value: value.kind if isinstance(value, Exception) else str(value),
)
def test_messages_to_clients_may_quote_prompts_and_stay_out(error: Any, reason: str, shows_message: bool):
    line = _line(Request(prompt="a"), error=error)
    assert (line["finished_reason"], line["error_kind"]) == (reason, error.kind)
    assert ("error" in line) == shows_message


def test_times_are_milliseconds_between_moments():
    line = _line(Request(prompt="a"), result=_result(Timings(0.5, 2.0, 0.125)), end=12.5, arrival=10.0)
    # Arrived at 10, submitted at 10.5, began at 10.625, first token at 11, last one at 12.25, ended at 12.5.
    assert {name: line[name] for name in line if name.endswith("_ms")} == {
        "prepare_ms": 500,
        "queue_ms": 125,
        "prefill_ms": 375,
        "ttft_ms": 1000,
        "decode_ms": 1250,
        "total_ms": 2500,
    }
    assert line["time"] == "2026-01-02T03:04:05.678+00:00"


def test_a_line_is_one_line_whatever_the_client_sends(lines: Lines):
    call = Call("/v1/completions", NoTelemetry(), model="a\nb\x1b[31m", arrival=0.0)
    RequestLog(prompt_chars=50)(RequestRecord(call, Request(prompt='"\n\u2028\x1b'), 1.0, None, Internal("x\r\ny")))
    (text,) = lines.texts
    assert text.isascii()
    assert text.isprintable()
    assert json.loads(text)["prompt"] == '"\n\u2028\x1b'


@pytest.mark.usefixtures("own_loggers")
def test_logging_is_set_up_once(capsys: pytest.CaptureFixture[str]):
    configure_logging("warning")
    configure_logging("info")
    logging.getLogger("aotllm.serving").info("hello")
    logging.getLogger("aotllm.serving").debug("nobody hears that")
    logging.getLogger(LOGGER).info("%s", '{"a":1}')
    text, bare = capsys.readouterr().err.splitlines()
    assert text.endswith(" INFO aotllm.serving: hello")
    assert bare == '{"a":1}'


def _result(timings: Timings) -> RequestOutput:
    answer = SequenceOutput(0, "x", (7, 7), "stop", None, timings)
    return RequestOutput(1, (1,), 0, (answer,), timings, num_generated_tokens=2)


def _line(
    request: Request,
    *,
    result: RequestOutput | None = None,
    error: Any = None,
    arrival: float = 0.0,
    end: float = 1.0,
    prompt_chars: int | None = None,
) -> dict[str, Any]:
    call = Call("/v1/completions", NoTelemetry(), model="m", arrival=arrival)
    record = RequestRecord.of(call, request, end, result, error, None, end - 0.25)
    now = datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=timezone.utc)
    return RequestLog(prompt_chars, lambda: now)._line(record)
