"""An engine process with its front ends, all on one event loop."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from aotllm.errors import EngineError
from aotllm.serving.process.engine_server import EngineServer
from aotllm.serving.process.plan import ServePlan
from aotllm.serving.process.remote_repository import RemoteRepository
from tests.aotllm.fake_manager import FakeEngine, FakeManager

MINUTE = 60


class Group:
    """One engine process and any number of front ends."""

    def __init__(self, folder: Path, managers: dict[str, list[FakeManager]]) -> None:
        self.path = str(folder / "engine.sock")
        self.managers = managers
        """By engine, one for each time that it is loaded"""
        self.plan = ServePlan({name: name for name in managers}, socket_path=self.path)
        self.front_ends: list[RemoteRepository] = []

    async def start(self) -> None:
        self.server = EngineServer(self.plan)
        sock = socket.socket(socket.AF_UNIX)
        sock.bind(self.path)
        self.listener = await self.server.listen(sock)
        await self.server.start()

    async def front_end(self) -> RemoteRepository:
        repository = RemoteRepository()
        await repository.connect(self.path)
        await asyncio.wait_for(repository.complete.wait(), MINUTE)
        self.front_ends.append(repository)
        return repository

    async def stop(self) -> None:
        self.listener.close()
        for front_end in self.front_ends:
            front_end.link.close()
        await self.server.stop()


Run = Callable[..., None]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Runs a test's coroutine with a group whose engines have the given managers."""

    def run(test: Callable[[Group], Coroutine[Any, Any, None]], *managers: FakeManager, **named: Any) -> None:
        by_name = named or {"m": list(managers)}
        made = {name: iter(list_) for name, list_ in by_name.items()}
        monkeypatch.setattr("aotllm.engines.open_engine", lambda path, verify=True: FakeEngine(path=str(path)))
        monkeypatch.setattr(
            "aotllm.serving.process.remote_repository.open_engine", lambda path, verify: FakeEngine(path=str(path))
        )

        def factory(rank_file: Path, *_: object) -> FakeManager:
            manager = next(made[rank_file.parent.name], None)
            if manager is None:
                raise EngineError("there is no second time")
            return manager

        monkeypatch.setattr(ServePlan, "factory", lambda self: factory)

        @asynccontextmanager
        async def group() -> AsyncIterator[Group]:
            it = Group(tmp_path, by_name)
            await it.start()
            try:
                yield it
            finally:
                await it.stop()

        async def main() -> None:
            async with group() as it:
                await asyncio.wait_for(test(it), MINUTE)

        asyncio.run(main())

    return run
