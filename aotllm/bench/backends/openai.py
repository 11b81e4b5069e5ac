"""The OpenAI API: `/v1/completions` and `/v1/chat/completions` as streams."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec

from aotllm.bench.backends.base import RequestSettings
from aotllm.bench.backends.stream_answer import StreamAnswer
from aotllm.bench.conversation import Message, plain_text
from aotllm.bench.http_client import HttpClient
from aotllm.bench.record import RequestRecord


class OpenAIBackend:
    """`chat` takes messages; else they are joined into one prompt."""

    def __init__(self, client: HttpClient, *, chat: bool, endpoint: str | None = None) -> None:
        self.name = "openai-chat" if chat else "openai"
        self._client, self._chat = client, chat
        self.endpoint = endpoint or ("/v1/chat/completions" if chat else "/v1/completions")

    async def generate(
        self, messages: Sequence[Message], max_tokens: int, settings: RequestSettings, record: RequestRecord
    ) -> None:
        """Part of `Backend`."""
        body = self._body(messages, max_tokens, settings)
        answer = _Answer(record)
        await self._client.send("POST", self.endpoint, json.dumps(body).encode(), answer)
        answer.finish()

    async def close(self) -> None:
        """Part of `Backend`."""
        self._client.close()

    def _body(self, messages: Sequence[Message], max_tokens: int, settings: RequestSettings) -> dict[str, Any]:
        body: dict[str, Any] = {"model": settings.model, "stream": True}
        if self._chat:
            body["messages"] = [{"role": role, "content": text} for role, text in messages]
            body["max_completion_tokens"] = max_tokens
        else:
            body["prompt"] = plain_text(messages)
            body["max_tokens"] = max_tokens
        if settings.temperature is not None:
            body["temperature"] = settings.temperature
        if settings.count_tokens:
            body["stream_options"] = {"include_usage": True}
            if settings.continuous_usage:
                body["stream_options"]["continuous_usage_stats"] = True
        if settings.ignore_eos:
            body["ignore_eos"] = True
        return body | dict(settings.extra_body)


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: Any = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []  # msgspec copies it
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Chunk).decode


class _Answer(StreamAnswer):
    """Chunks of both kinds, as OpenAI, vLLM, SGLang and llama.cpp send them."""

    def __init__(self, record: RequestRecord) -> None:
        super().__init__()
        self._record = record
        self._done = False

    @property
    def complete(self) -> bool:
        return self._done or self._record.finished is not None

    def event(self, data: bytes, now: float) -> None:
        if data == b"[DONE]":
            self._done = True
            return
        chunk = _decode(data)
        if chunk.error:
            self.fail("stream", f"error within the stream: {self.error_message(data)}")
            return
        total = chunk.usage.completion_tokens if chunk.usage is not None else None
        for choice in chunk.choices:
            text, visible = choice.text or "", False
            if choice.delta is not None:
                delta = choice.delta
                text = delta.content or ""
                visible = bool(delta.reasoning_content or delta.reasoning or delta.refusal or delta.tool_calls)
            self._record.chunk(now, text, visible=visible, total_tokens=total)
            if choice.finish_reason:
                self._record.finished = now
        if chunk.usage is not None:
            details = chunk.usage.prompt_tokens_details
            self._record.usage(chunk.usage.prompt_tokens, total, details.cached_tokens if details else None)

    def error_message(self, body: bytes) -> str | None:
        return error_message(body)


def error_message(body: bytes) -> str | None:
    """The message of `{"error": {"message": …}}`, and of the forms that other servers have: `{"error": text}`,
    `{"message": text}`, `{"detail": …}`."""
    try:
        value = json.loads(body)
    except ValueError:
        return None
    for key in ("error", "message", "detail"):
        if isinstance(value, dict) and value.get(key):
            value = value[key]
    return value if isinstance(value, str) else json.dumps(value)[:500]
