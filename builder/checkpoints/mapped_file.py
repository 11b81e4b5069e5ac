"""`MappedFile`: a read-only memory map that hands out bounds-checked views."""

from __future__ import annotations

import contextlib
import mmap
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from aotllm.errors import CheckpointError


class MappedFile:
    """A file mapped for reading. Pages are read by the kernel when they are touched, and dropped under pressure.

    Raises:
        CheckpointError: the file cannot be opened, is not a regular file, or is empty.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            if path.exists() and not path.is_file():  # opening a pipe would wait for its writer
                raise OSError("not a regular file")
            with path.open("rb") as file:
                self._map: mmap.mmap | None = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
            raise CheckpointError(f"{path}: cannot be read ({error})") from error
        self.size = len(self._map)

    @property
    def buffer(self) -> mmap.mmap:
        """The whole file. Raises CheckpointError after `close`."""
        if self._map is None:
            raise CheckpointError(f"{self.path}: the checkpoint is closed; open it again to read tensors")
        return self._map

    def array(self, offset: int, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Read-only array over the map; a copy where the file does not align it for its type."""
        kind = np.dtype(dtype)
        count = int(np.prod(shape, dtype=object)) if shape else 1
        end = offset + count * kind.itemsize
        if not 0 <= offset <= end <= self.size:
            raise CheckpointError(f"{self.path}: bytes {offset} to {end} are outside the file ({self.size} bytes)")
        view = np.frombuffer(self.buffer, kind, count, offset).reshape(shape)
        if view.flags.aligned:
            return view
        copy = view.copy()
        copy.flags.writeable = False
        return copy

    def close(self) -> None:
        """Unmap. Arrays handed out before stay valid: the map lives until the last of them is gone."""
        if self._map is None:
            return
        with contextlib.suppress(BufferError):  # views are still out; the map goes with the last of them
            self._map.close()
        self._map = None
