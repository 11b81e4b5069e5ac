"""`AdapterTable`: the LoRA adapters of an executor, by the name that requests use."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from aotllm.errors import InvalidRequest
from aotllm.manager import Manager

BARE_MODEL = 0
"""Adapter id of requests that name none"""


def read_adapter(folder: Path) -> Any:
    """A PEFT folder as the runtime takes it. Raises what `aotllm.lora.read_adapter` raises."""
    from aotllm import lora  # and with it the checkpoint readers, which an engine does not need else

    return lora.read_adapter(folder)


class AdapterTable:
    """Gives each adapter an id of its own, never used again, so that cached prefixes of an unloaded adapter cannot be
    taken for those of a new one with its name. Thread-safe."""

    def __init__(self, manager: Manager) -> None:
        self._manager = manager
        self._lock = threading.Lock()
        self._ids: dict[str, int] = {}
        self._holders: Counter[int] = Counter()
        self._leaving: set[int] = set()
        self._next_id = itertools.count(1)

    @property
    def names(self) -> tuple[str, ...]:
        """Of the adapters that requests can use, in order of loading."""
        with self._lock:
            return tuple(self._ids)

    @property
    def ids(self) -> dict[str, int]:
        """Name → the runtime's id, of the adapters that requests can use."""
        with self._lock:
            return dict(self._ids)

    def load(self, name: str, folder: Path) -> None:
        """Read a folder and give it to the runtime.

        Raises:
            InvalidRequest: the name is empty or taken, or the adapter does not fit the model.
            CheckpointError: the folder is damaged.
        """
        if not name:
            raise InvalidRequest("an adapter needs a name", "adapter")
        self._refuse_taken(name)
        adapter, adapter_id = read_adapter(folder), next(self._next_id)
        with self._lock:
            if name in self._ids:
                raise _taken(name)
            self._manager.load_adapter(adapter_id, adapter)
            self._ids[name] = adapter_id

    def unload(self, name: str) -> None:
        """Take no more requests for an adapter; those in flight finish with it. Raises InvalidRequest if unknown."""
        with self._lock:
            adapter_id = self._ids.pop(name, None)
            held = adapter_id is not None and self._holders[adapter_id] > 0
            if adapter_id is not None and held:
                self._leaving.add(adapter_id)
        if adapter_id is None:
            raise unknown_adapter(name, self.names)
        if not held:
            self._manager.unload_adapter(adapter_id)

    @contextmanager
    def held(self, adapter_id: int) -> Iterator[None]:
        """Keeps an adapter loaded that requests yet to come will use, even if it is unloaded meanwhile."""
        with self._lock:
            self._holders[adapter_id] += 1
        try:
            yield
        finally:
            with self._lock:
                self._holders[adapter_id] -= 1
                last = self._holders[adapter_id] == 0 and adapter_id in self._leaving
                self._leaving -= {adapter_id} if last else set()
            if last:
                self._manager.unload_adapter(adapter_id)

    def id_of(self, name: str | None) -> int:
        """The runtime's id; None is the bare model. Raises InvalidRequest for an unknown name."""
        if name is None:
            return BARE_MODEL
        with self._lock:
            adapter_id = self._ids.get(name)
        if adapter_id is None:
            raise unknown_adapter(name, self.names)
        return adapter_id

    def _refuse_taken(self, name: str) -> None:
        with self._lock:  # before the folder is read for nothing
            if name in self._ids:
                raise _taken(name)


def unknown_adapter(name: str, loaded: Iterable[str]) -> InvalidRequest:
    """What is said of a name that is not among those `loaded`."""
    return InvalidRequest(f"there is no adapter {name!r:.80}; loaded: {', '.join(loaded) or 'none'}", "adapter")


def _taken(name: str) -> InvalidRequest:
    return InvalidRequest(
        f"an adapter {name!r:.80} is loaded already; unload it first, or choose another name", "adapter"
    )
