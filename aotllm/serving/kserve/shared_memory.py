"""`SystemSharedMemory`: tensors that clients leave in, and want in, POSIX shared memory.

A region is a file below /dev/shm. It is opened for each use and read and written by `pread` and `pwrite`, not mapped: a
client can cut a region short at any time, also between a check and the access, and what is a short read here would be a
SIGBUS there. Front ends need no state of their own, either.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from aotllm.errors import InvalidRequest
from aotllm.serving.kserve.errors import RegionExists, RegionNotFound
from aotllm.serving.shared_table import SharedTable

MAX_REGIONS = 10_000
_MAX_NAME = 1024
_MAX_KEY = 255  # of a file's name
_FOLDER = Path("/dev/shm")


class SystemSharedMemory:
    """The regions that clients have registered.

    Args:
        table: region's name -> {"key", "offset", "byte_size"}.
    """

    def __init__(self, table: SharedTable) -> None:
        self._table = table

    def regions(self, name: str = "") -> dict[str, dict[str, Any]]:
        """Name -> name, key, offset and byte_size, of one region or all. Raises RegionNotFound."""
        table = self._table.items()
        if name:
            table = {name: _find(table, name)}
        return {region: {"name": region, **entry} for region, entry in table.items()}

    async def register(self, name: str, key: Any, offset: Any, byte_size: Any) -> None:
        """Make a part of a POSIX shared-memory object usable by a name.

        Raises:
            InvalidRequest: a name or size is wrong, or there is no such object, or it is too small.
            RegionExists: the name is taken.
        """
        if not 1 <= len(name) <= _MAX_NAME:
            raise InvalidRequest(f"the name of a region has 1 to {_MAX_NAME} characters, got {len(name)}", "name")
        for field, value, low in (("offset", offset, 0), ("byte_size", byte_size, 1)):
            if not isinstance(value, int) or isinstance(value, bool) or not low <= value < 2**63:
                raise InvalidRequest(f"{field} of a region must be an integer ≥ {low}, got {value!r:.60}", field)
        if len(self._table.items()) >= MAX_REGIONS:
            raise InvalidRequest(f"{MAX_REGIONS} regions are registered, which is the most; unregister some", "name")
        os.close(_open(_path(key), name, offset + byte_size))
        if not await self._table.put(name, {"key": key, "offset": offset, "byte_size": byte_size}):
            raise RegionExists(f"a region {name!r:.80} is registered already; unregister it first")

    async def unregister(self, name: str = "") -> None:
        """Forget a region, or all; no-op for a name that is not registered."""
        for region in [name] if name else self._table.items():
            await self._table.remove(region)

    def read(self, name: str, offset: int, byte_size: int) -> bytes:
        """A part of a region. Raises RegionNotFound; InvalidRequest beyond its end, or where its object is gone."""
        descriptor, position = self._locate(name, offset, byte_size)
        try:
            data = os.pread(descriptor, byte_size, position)
        finally:
            os.close(descriptor)
        if len(data) != byte_size:
            raise _shrunk(name)
        return data

    def write(self, name: str, offset: int, data: bytes) -> None:
        """Put bytes into a region. Raises as `read`."""
        descriptor, position = self._locate(name, offset, len(data))
        try:
            while data:
                written = os.pwrite(descriptor, data, position)
                data, position = data[written:], position + written
        finally:
            os.close(descriptor)

    def _locate(self, name: str, offset: int, byte_size: int) -> tuple[int, int]:
        """An open file, and where in it the part begins."""
        region = _find(self._table.items(), name)
        if offset < 0 or byte_size < 0 or offset + byte_size > region["byte_size"]:
            raise InvalidRequest(
                f"bytes {offset} to {offset + byte_size} lie outside of the region {name!r:.80}, which has "
                f"{region['byte_size']} bytes",
                "shared_memory_byte_size",
            )
        end = region["offset"] + region["byte_size"]
        return _open(_path(region["key"]), name, end), region["offset"] + offset


def _find(table: Mapping[str, Any], name: str) -> dict[str, Any]:
    if name not in table:
        raise RegionNotFound(f"no region {name!r:.80} of shared memory is registered")
    entry: dict[str, Any] = table[name]
    return entry


def _path(key: Any) -> Path:
    """The file behind a key of `shm_open`, which is one component of a path."""
    name = key.removeprefix("/") if isinstance(key, str) else ""
    encodable = "\0" not in name and len(name.encode("utf-8", "replace")) <= _MAX_KEY
    if not name or not encodable or "/" in name or name in (".", ".."):
        raise InvalidRequest(
            f"the key of a region is a name such as '/my_region', without further slashes, got {key!r:.80}", "key"
        )
    return _FOLDER / name


def _open(path: Path, name: str, size: int) -> int:
    # Nonblocking: a named pipe below /dev/shm would hang the server.
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        descriptor = os.open(path, flags)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise InvalidRequest(
            f"region {name!r:.80}: cannot open shared memory '/{path.name}': {reason}", "key"
        ) from None
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_size < size:
        os.close(descriptor)
        if stat.S_ISREG(status.st_mode):
            raise _shrunk(name, f"; it has {status.st_size} bytes, {size} are needed")
        raise InvalidRequest(f"region {name!r:.80}: '/{path.name}' is no shared memory", "key")
    return descriptor


def _shrunk(name: str, sizes: str = "") -> InvalidRequest:
    return InvalidRequest(f"the shared memory behind the region {name!r:.80} is smaller than registered{sizes}", "key")
