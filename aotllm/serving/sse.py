"""Server-sent events as OpenAI's clients read them: `data: {json}`, an empty line, and `data: [DONE]` at the end."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
from typing import Any

from fastapi.responses import StreamingResponse

from aotllm.errors import AotllmError, Internal
from aotllm.serving.errors import body_of

_log = logging.getLogger(__name__)


def event_stream(chunks: AsyncIterator[dict[str, Any]]) -> StreamingResponse:
    """A response that sends each chunk as an event. A failure becomes an event of its own: the status is sent long
    since. [DONE] comes in any case, unless the client has left."""
    return StreamingResponse(
        _events(chunks),
        media_type="text/event-stream",
        headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
    )


async def _events(chunks: AsyncIterator[dict[str, Any]]) -> AsyncIterator[bytes]:
    try:
        async for chunk in chunks:
            yield _event(chunk)
    except AotllmError as error:
        yield _event(body_of(error))
    except Exception:
        _log.exception("a stream failed")
        yield _event(body_of(Internal("a fault of the server; its log has the details")))
    yield b"data: [DONE]\n\n"


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace") + b"\n\n"
