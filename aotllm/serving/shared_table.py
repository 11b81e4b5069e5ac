"""`SharedTable`: a small table that all front ends of a server see alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class SharedTable(Protocol):
    """Name -> value of plain types (numbers, strings, lists, dicts)."""

    def items(self) -> Mapping[str, Any]:
        """What is in it now."""

    async def put(self, name: str, value: Any) -> bool:
        """Add an entry, which all front ends see when this returns. False, and no change, for a name that is taken."""

    async def remove(self, name: str) -> Any | None:
        """Take an entry out; None where there is none."""


class LocalTable:
    """The table of a server of one process."""

    def __init__(self) -> None:
        self._entries: dict[str, Any] = {}

    def items(self) -> Mapping[str, Any]:
        """See `SharedTable.items`."""
        return dict(self._entries)

    async def put(self, name: str, value: Any) -> bool:
        """See `SharedTable.put`."""
        return self._entries.setdefault(name, value) is value

    async def remove(self, name: str) -> Any | None:
        """See `SharedTable.remove`."""
        return self._entries.pop(name, None)
