"""`Peers`: asking all front ends of a server for something that each has a part of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol


class Peers(Protocol):
    """The front ends of a server, this one included."""

    def offer(self, topic: str, source: Callable[[], Any]) -> None:
        """What this front end answers when one asks for a topic: plain types."""

    async def gather(self, topic: str) -> list[Any]:
        """What all front ends answer, in any order; those that end meanwhile are left out."""


class NoPeers:
    """A server of one process."""

    def __init__(self) -> None:
        self._sources: dict[str, Callable[[], Any]] = {}

    def offer(self, topic: str, source: Callable[[], Any]) -> None:
        """See `Peers.offer`."""
        self._sources[topic] = source

    async def gather(self, topic: str) -> list[Any]:
        """See `Peers.gather`."""
        return [self._sources[topic]()]
