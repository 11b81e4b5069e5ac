"""`Verification`: the digests of an engine's files, compared beside the work that needs those files."""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

_SETTLED_SECONDS = 2.0
"""A file that changed later than this before it was compared may change again within one tick of its time stamp"""


class Verification:
    """Runs `check` on a thread of its own, from now on.

    Hashing a file takes as long as all else that loading does, and leaves the interpreter alone meanwhile.
    """

    def __init__(self, check: Callable[[], None]) -> None:
        self._check = check
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="aotllm-verification", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Wait for the end. Raises what the check raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._check()
        except BaseException as error:  # for the thread that waits
            self._error = error


class VerifiedFiles:
    """Remembers, in the user's cache folder, that the digests of a folder's files were right.

    What is remembered is which files they were: device, inode, size, and the times of their last change, of which the
    kernel sets one itself. A file that was written to, replaced or copied is another one. What this cannot see is a
    disk that forgets; `aotllm verify` always reads.

    Args:
        folder: that of the engine.
        names: its files.
        manifest: digest of what they have to be.
    """

    def __init__(self, folder: Path, names: Sequence[str], manifest: str) -> None:
        self._facts = [manifest]
        self._changed = 0.0
        for name in names:
            status = (folder / name).stat()
            times = (status.st_mtime_ns, status.st_ctime_ns)
            self._facts.append(json.dumps([name, status.st_dev, status.st_ino, status.st_size, *times]))
            self._changed = max(self._changed, status.st_ctime_ns / 1e9)
        self._seen_at = time.time()
        home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        key = hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()
        self._note = Path(home) / "aotllm" / "verified" / key

    def known(self) -> bool:
        """Whether these very files were found to be right before."""
        try:
            return self._note.read_text(encoding="ascii") == self._digest()
        except (OSError, UnicodeDecodeError):
            return False

    def remember(self) -> None:
        """They are right. Without a folder to write to nothing is remembered."""
        if not 0 <= self._changed < self._seen_at - _SETTLED_SECONDS:
            return
        with contextlib.suppress(OSError):
            self._note.parent.mkdir(parents=True, exist_ok=True)
            staged = self._note.with_name(f"{self._note.name}.{os.getpid()}")
            staged.write_text(self._digest(), encoding="ascii")
            staged.replace(self._note)

    def _digest(self) -> str:
        return hashlib.sha256("\n".join(self._facts).encode()).hexdigest()


def file_sha256(path: Path) -> str:
    """Hex SHA-256 of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        if path.stat().st_size > 0:
            # In one call, which holds the interpreter's lock at its begin and end only.
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                digest.update(data)
    return digest.hexdigest()
