"""`Call`: one call of a client, whatever the protocol."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field

from aotllm.errors import Overloaded
from aotllm.request import Request
from aotllm.request_handle import RequestListener
from aotllm.serving.admission import Turn
from aotllm.serving.telemetry.base import Telemetry

REQUEST_ID = re.compile(r"[!-~]{1,128}")
"""Ids of clients that are taken over: one printable word of ASCII"""


@dataclass
class Call:
    """Who asked, where, and what is told of it to logs, metrics and traces."""

    endpoint: str
    """Route or RPC: `/v1/completions`, `ModelInfer`"""
    telemetry: Telemetry
    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    """The client's own `X-Request-Id`, or one of ours"""
    traceparent: str | None = None
    """W3C trace context"""
    tracestate: str | None = None
    model: str = ""
    """The name that answers, once it is known"""
    turn: Turn | None = None
    """To submit requests; left when they have been"""
    arrival: float = field(default_factory=time.monotonic)

    @classmethod
    def from_headers(cls, endpoint: str, headers: Mapping[str, str], telemetry: Telemetry) -> Call:
        """Of HTTP headers or gRPC metadata, whose names are in lower case."""
        call = cls(endpoint, telemetry, traceparent=headers.get("traceparent"), tracestate=headers.get("tracestate"))
        given = headers.get("x-request-id", "")
        if REQUEST_ID.fullmatch(given):
            call.request_id = given
        return call

    def submitted(self, refusal: Overloaded | None = None) -> None:
        """Its requests are with the engine, or the queue had no room: others may come."""
        if self.turn is not None:
            self.turn.leave(refusal)

    def begin(self, request: Request) -> RequestListener:
        """What is to be told of one of its requests from now on."""
        return self.telemetry.begin(self, request)
