"""`Repository`: which engines a server has, and which of them are loaded."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from aotllm.serving.engine import ServingEngine
from aotllm.serving.errors import ModelNotFound

if TYPE_CHECKING:
    from aotllm.executor import Executor

ModelState = Literal["READY", "LOADING", "UNLOADING", "UNAVAILABLE"]
"""In the words of Triton's repository index"""


@dataclass(frozen=True)
class RepositoryEntry:
    """One engine that the server was started with."""

    name: str
    state: ModelState
    reason: str = ""
    """Why it is not READY"""


class Repository(Protocol):
    """The engines of a server. Engines come and go by `load` and `unload`; their names are fixed at the start."""

    def engines(self) -> Mapping[str, ServingEngine]:
        """Those that are loaded now, in the order of the command line."""

    def entries(self) -> Sequence[RepositoryEntry]:
        """All of them."""

    @property
    def in_flight(self) -> int:
        """Requests of this front end that have not ended."""

    async def cancel_all(self) -> None:
        """End them as cancelled. No more can be submitted."""

    async def load(self, name: str) -> None:
        """Load an engine, again if it is loaded; waits until it is ready. Raises ModelNotFound, or why it failed."""

    async def unload(self, name: str) -> None:
        """Take no more requests for an engine, let those in flight finish, free its memory. Raises ModelNotFound."""


class LocalRepository:
    """Executors of this process.

    Args:
        executors: by name, in order. They stay the caller's, but for those that `load` makes.
        make: name -> a new executor, for `load`; None = an unloaded engine cannot come back.
    """

    def __init__(self, executors: Mapping[str, Executor], make: Callable[[str], Executor] | None = None) -> None:
        self._loaded: dict[str, Executor | None] = dict(executors)
        self._states: dict[str, tuple[ModelState, str]] = dict.fromkeys(executors, ("READY", ""))
        self._make = make
        self._made: set[str] = set()
        self._lock = asyncio.Lock()

    def engines(self) -> Mapping[str, ServingEngine]:
        """See `Repository.engines`."""
        return {name: executor for name, executor in self._loaded.items() if executor is not None}

    def entries(self) -> Sequence[RepositoryEntry]:
        """See `Repository.entries`."""
        return [RepositoryEntry(name, *state) for name, state in self._states.items()]

    @property
    def in_flight(self) -> int:
        """See `Repository.in_flight`."""
        return sum(executor.in_flight for executor in self._loaded.values() if executor is not None)

    async def cancel_all(self) -> None:
        """See `Repository.cancel_all`."""
        for executor in self._loaded.values():
            if executor is not None:
                await asyncio.to_thread(executor.shutdown)

    async def load(self, name: str) -> None:
        """See `Repository.load`."""
        self._check_known(name)
        async with self._lock:
            await self._retire(name)
            self._states[name] = "LOADING", ""
            try:
                if self._make is None:
                    raise ModelNotFound(f"The model `{name}` cannot be loaded again: it was passed in as it is.")
                self._loaded[name] = await asyncio.to_thread(self._make, name)
                self._made.add(name)
            except Exception as error:
                self._states[name] = "UNAVAILABLE", str(error)
                raise
            self._states[name] = "READY", ""

    async def unload(self, name: str) -> None:
        """See `Repository.unload`."""
        self._check_known(name)
        async with self._lock:
            await self._retire(name)
            self._states[name] = "UNAVAILABLE", "unloaded"

    def close(self) -> None:
        """End the executors that `load` has made."""
        for name in self._made:
            if (executor := self._loaded[name]) is not None:
                executor.shutdown()

    async def _retire(self, name: str) -> None:
        executor, self._loaded[name] = self._loaded[name], None
        if executor is not None:
            self._states[name] = "UNLOADING", ""
            await asyncio.to_thread(executor.shutdown, True)

    def _check_known(self, name: str) -> None:
        if name not in self._loaded:
            raise ModelNotFound(f"The model `{name:.80}` does not exist. Known: {', '.join(self._loaded)}.")
