"""KServe's generate extension: `POST /v2/models/MODEL/generate_stream`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from urllib.parse import quote

import msgspec

from aotllm.bench.backends.base import RequestSettings
from aotllm.bench.backends.kserve import TokenCounts, inputs_of
from aotllm.bench.backends.openai import error_message
from aotllm.bench.backends.stream_answer import StreamAnswer
from aotllm.bench.conversation import Message
from aotllm.bench.http_client import HttpClient
from aotllm.bench.record import RequestRecord


class KServeHttpBackend:
    """One event per response; the end of the stream is the end of the answer."""

    name = "kserve-http"

    def __init__(self, client: HttpClient, endpoint: str | None = None) -> None:
        self._client, self._endpoint = client, endpoint

    async def generate(
        self, messages: Sequence[Message], max_tokens: int, settings: RequestSettings, record: RequestRecord
    ) -> None:
        """Part of `Backend`."""
        path = self._endpoint or f"/v2/models/{quote(settings.model, safe='')}/generate_stream"
        answer = _Answer(record)
        body = json.dumps(inputs_of(messages, max_tokens, settings)).encode()
        await self._client.send("POST", path, body, answer)
        answer.finish()

    async def close(self) -> None:
        """Part of `Backend`."""
        self._client.close()


class _Response(msgspec.Struct):
    text_output: str | list[str] = ""
    num_input_tokens: int | list[int] | None = None
    num_output_tokens: int | list[int] | None = None
    error: str | None = None


_decode = msgspec.json.Decoder(_Response).decode


class _Answer(StreamAnswer):
    def __init__(self, record: RequestRecord) -> None:
        super().__init__()
        self._counts = TokenCounts(record)
        self._last: float | None = None

    @property
    def complete(self) -> bool:
        return self._last is not None

    def event(self, data: bytes, now: float) -> None:
        response = _decode(data)
        if response.error is not None:
            self.fail("stream", f"error within the stream: {response.error}")
            return
        text = response.text_output if isinstance(response.text_output, str) else "".join(response.text_output)
        self._counts.response(now, text, _one(response.num_input_tokens), _one(response.num_output_tokens))
        self._last = now

    def finish(self) -> None:
        super().finish()
        assert self._last is not None
        self._counts.finish(self._last)

    def error_message(self, body: bytes) -> str | None:
        return error_message(body)


def _one(value: int | list[int] | None) -> int | None:
    return sum(value) if isinstance(value, list) else value
