"""`RemoteRepository`, `RemoteTable`, `RemotePeers`: what a front end knows of the rest of the server."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from aotllm.engines import open_engine
from aotllm.serving.engine import ServingEngine
from aotllm.serving.process.engine_link import EngineLink, News, engine_lost
from aotllm.serving.process.messages import ModelState, State, TableChange
from aotllm.serving.process.remote_engine import RemoteEngine
from aotllm.serving.repository import RepositoryEntry

_log = logging.getLogger(__name__)


class RemoteRepository:
    """Follows the states that the engine process sends. `connect` comes first."""

    def __init__(self) -> None:
        self._engines: dict[str, RemoteEngine] = {}
        self._state: State | None = None
        self._link: EngineLink | None = None
        self.topics: dict[str, Callable[[], Any]] = {}
        """See `EngineLink.topics`"""
        self._tables: dict[str, dict[str, Any]] = {}
        self._news: asyncio.Queue[News] = asyncio.Queue()
        self.complete = asyncio.Event()
        """All engines have been served at least once"""

    async def connect(self, path: str) -> EngineLink:
        """Connect to the engine process; states are followed from now on by a task of this loop."""
        self._link = await EngineLink.connect(path, self._news.put_nowait)
        self._link.topics = self.topics
        self._follower = asyncio.create_task(self._follow(self._link))
        return self._link

    @property
    def link(self) -> EngineLink:
        """To the engine process. Raises Unavailable before it listens."""
        if self._link is None:
            raise engine_lost()
        return self._link

    def table(self, name: str) -> Mapping[str, Any]:
        """A shared table as it is now."""
        return self._tables.get(name, {})

    def engines(self) -> Mapping[str, ServingEngine]:
        """See `Repository.engines`."""
        return self._engines

    def entries(self) -> Sequence[RepositoryEntry]:
        """See `Repository.entries`."""
        models = [] if self._state is None else self._state.models
        return [RepositoryEntry(m.name, m.state, m.reason) for m in models]  # type: ignore[arg-type]

    @property
    def in_flight(self) -> int:
        """See `Repository.in_flight`."""
        return 0 if self._link is None else len(self._link)

    async def cancel_all(self) -> None:
        """See `Repository.cancel_all`."""
        if self._link is not None:
            self._link.cancel_all()

    async def load(self, name: str) -> None:
        """See `Repository.load`."""
        await self.link.query("load", name)

    async def unload(self, name: str) -> None:
        """See `Repository.unload`."""
        await self.link.query("unload", name)

    async def _follow(self, link: EngineLink) -> None:
        while True:
            news = await self._news.get()
            if isinstance(news, TableChange):
                self._change(news)
            else:
                try:
                    await self._apply(link, news)
                except Exception:
                    _log.exception("cannot serve what the engine process has loaded")
            link.seen(news.version)

    def _change(self, change: TableChange) -> None:
        entries = self._tables.setdefault(change.table, {})
        if change.present:
            entries[change.name] = change.value
        else:
            entries.pop(change.name, None)

    async def _apply(self, link: EngineLink, state: State) -> None:
        engines = {}
        for model in state.models:
            if model.state != "READY":
                continue
            known = self._engines.get(model.name)
            if known is not None and known.state.generation == model.generation:
                known.state = model
                engines[model.name] = known
            else:
                engines[model.name] = await asyncio.to_thread(_open, link, model, state.timeout)
        self._engines, self._state = engines, state
        if len(engines) == len(state.models):
            self.complete.set()


def _open(link: EngineLink, model: ModelState, timeout: float) -> RemoteEngine:
    # The engine process has compared the digests.
    return RemoteEngine(link, open_engine(model.path, verify=False), model, timeout)


class RemoteTable:
    """A `SharedTable` of the engine process."""

    def __init__(self, repository: RemoteRepository, name: str) -> None:
        self._repository = repository
        self._name = name

    def items(self) -> Mapping[str, Any]:
        """See `SharedTable.items`."""
        return dict(self._repository.table(self._name))

    async def put(self, name: str, value: Any) -> bool:
        """See `SharedTable.put`."""
        return bool(await self._repository.link.query("table_put", self._name, name, value))

    async def remove(self, name: str) -> Any | None:
        """See `SharedTable.remove`."""
        return await self._repository.link.query("table_remove", self._name, name)


class RemotePeers:
    """The front ends around an engine process."""

    def __init__(self, repository: RemoteRepository) -> None:
        self._repository = repository

    def offer(self, topic: str, source: Callable[[], Any]) -> None:
        """See `Peers.offer`."""
        self._repository.topics[topic] = source

    async def gather(self, topic: str) -> list[Any]:
        """See `Peers.gather`."""
        answers: list[Any] = await self._repository.link.query("gather", topic)
        return answers
