"""`Backend`: how requests are put to a server, and `Refused`, which the backends have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from aotllm.bench.conversation import Message
from aotllm.bench.record import RequestFailed, RequestRecord

BACKENDS = ("openai", "openai-chat", "kserve-http", "kserve-grpc")


@dataclass(frozen=True)
class RequestSettings:
    """What all requests of a run have in common."""

    model: str
    temperature: float | None = 0.0
    """None = the server's default"""
    ignore_eos: bool = False
    """Answers have exactly `max_tokens` tokens"""
    continuous_usage: bool = False
    """Ask for token counts in every chunk"""
    count_tokens: bool = True
    """Ask for token counts"""
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of each request, as the protocol has them"""

    def without(self) -> Sequence[tuple[str, RequestSettings]]:
        """What may be left out where a server refuses it: (name, settings without it)."""
        options = {"continuous_usage": False, "ignore_eos": False, "count_tokens": False}
        return [
            (name, replace(self, **{name: value}))  # type: ignore[arg-type]
            for name, value in options.items()
            if getattr(self, name)
        ]


class Backend(Protocol):
    """A connection to one server."""

    name: str

    async def generate(
        self, messages: Sequence[Message], max_tokens: int, settings: RequestSettings, record: RequestRecord
    ) -> None:
        """Put one request and fill `record` (not `sent`, `due` and `ended`) as its answer comes.

        Raises:
            RequestFailed: of any kind.
        """

    async def close(self) -> None:
        """Drop all connections."""


def http_failure(status: int, body: bytes, message: str | None) -> RequestFailed:
    """A response that is an error; `message` is what its body says, if that could be read."""
    text = message or " ".join(body[:500].decode("utf-8", "replace").split())
    return RequestFailed(f"http_{status}", f"HTTP {status}: {text}".rstrip(": "))
