"""`RequestLog`: one line of JSON per request, when it ends."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from datetime import datetime, timezone
from typing import Any

from aotllm.request import Request
from aotllm.serving.telemetry.request_record import RequestRecord

LOGGER = "aotllm.request"


def _now() -> datetime:
    return datetime.now(timezone.utc)


class RequestLog:
    """Writes to the logger `aotllm.request`: refused and failed requests too, with the kind of error. Texts of prompts
    never appear unless `prompt_chars` is set.

    Args:
        prompt_chars: write as many characters of each prompt; None = nothing of it.
        now: the time of day, or another one for tests.
    """

    def __init__(self, prompt_chars: int | None = None, now: Callable[[], datetime] = _now) -> None:
        self._logger = logging.getLogger(LOGGER)
        self._prompt_chars = prompt_chars
        self._now = now

    def __call__(self, record: RequestRecord) -> None:
        """A request has ended."""
        if not self._logger.isEnabledFor(logging.INFO):
            return
        line = self._line(record)
        self._logger.info("%s", json.dumps(line, ensure_ascii=True, separators=(",", ":")))

    def _line(self, record: RequestRecord) -> dict[str, Any]:
        call, result, error = record.call, record.result, record.error
        line: dict[str, Any] = {
            "time": self._now().isoformat(timespec="milliseconds"),
            "request_id": call.request_id,
            "endpoint": call.endpoint,
            "model": call.model,
            "finished_reason": record.finished_reason,
        }
        if result is None:
            line["error_kind"] = record.error_kind
            # A client's mistake may quote the prompt; the kind says enough.
            if error is not None and (error.http_status >= 500 or self._prompt_chars is not None):
                line["error"] = error.message
        else:
            line |= {
                "prompt_tokens": result.num_prompt_tokens,
                "cached_tokens": result.num_cached_tokens,
                "generated_tokens": result.num_generated_tokens,
                "preemptions": result.num_preemptions,
            }
        line |= {
            "prepare_ms": _milliseconds(record.prepare_seconds),
            "queue_ms": _milliseconds(record.queue_seconds),
            "prefill_ms": _milliseconds(record.prefill_seconds),
            "ttft_ms": _milliseconds(record.time_to_first_token),
            "decode_ms": _milliseconds(record.decode_seconds),
            "total_ms": _milliseconds(record.total_seconds),
        }
        if record.request.adapter is not None:
            line["adapter"] = record.request.adapter
        if self._prompt_chars is not None:
            line["prompt"] = _prompt_text(record.request, self._prompt_chars)
        return {name: value for name, value in line.items() if value is not None}


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 3)


def _prompt_text(request: Request, chars: int) -> str:
    if request.prompt is not None:
        return request.prompt[:chars]
    if request.messages is not None:
        return json.dumps(list(request.messages), ensure_ascii=False, default=str)[:chars]
    # Each id takes two characters at least, so that no more of them can be shown.
    return str(list(request.prompt_token_ids or ())[: chars // 2 + 1])[:chars]


def configure_logging(level: str) -> None:
    """Let the loggers of aotllm write to standard error, once: requests, and what a front end holds,
    as bare JSON, all others as text.

    Args:
        level: debug | info | warning | error
    """
    log_level = getattr(logging, level.upper())
    for name, form in (("aotllm", "%(asctime)s %(levelname)s %(name)s: %(message)s"), (LOGGER, "%(message)s")):
        logger = logging.getLogger(name)
        logger.setLevel(log_level)
        logger.propagate = False
        if not logger.handlers:
            handler = logging.StreamHandler(sys.stderr)
            handler.setFormatter(logging.Formatter(form))
            logger.addHandler(handler)
