"""`ServingContext`: what all routes and RPCs of a server share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request as HttpRequest

from aotllm.serving.admission import TURN, Turnstile
from aotllm.serving.call import Call
from aotllm.serving.models import ServedModels
from aotllm.serving.options import ServingOptions
from aotllm.serving.peers import NoPeers, Peers
from aotllm.serving.repository import Repository
from aotllm.serving.shared_table import LocalTable, SharedTable
from aotllm.serving.telemetry.base import NoTelemetry, Telemetry


@dataclass
class ServingContext:
    """One per front end."""

    repository: Repository
    options: ServingOptions = field(default_factory=ServingOptions)
    telemetry: Telemetry = field(default_factory=NoTelemetry)
    shared_memory: SharedTable = field(default_factory=LocalTable)
    """Regions of system shared memory that clients have registered, by name"""
    responses: SharedTable = field(default_factory=LocalTable)
    """Answers of /v1/responses that later ones may go on from, by id"""
    peers: Peers = field(default_factory=NoPeers)
    """The front ends of this server"""
    turnstile: Turnstile = field(default_factory=Turnstile)
    """Those who want to submit pass through it"""
    draining: bool = False
    """The server ends: it is no longer ready, though it still answers"""

    shared: dict[type, Any] = field(default_factory=dict)
    """What a protocol keeps for all of its entrances, by type"""

    def __post_init__(self) -> None:
        self.models = ServedModels(self.repository)

    @property
    def alive(self) -> bool:
        """All loaded engines take requests, and there is at least one."""
        engines = self.repository.engines().values()
        return bool(engines) and all(engine.alive for engine in engines)

    @property
    def ready(self) -> bool:
        """Alive, and neither loading nor draining."""
        return self.alive and not self.draining

    def http_call(self, request: HttpRequest) -> Call:
        """The call behind an HTTP request."""
        call = Call.from_headers(request.url.path, request.headers, self.telemetry)
        call.turn = request.scope.get(TURN)
        return call

    @property
    def one_queue(self) -> bool:
        """All requests go to one engine."""
        return len(self.repository.engines()) == 1
