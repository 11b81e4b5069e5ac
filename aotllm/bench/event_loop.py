"""The event loop of a load generator: uvloop where it is installed."""

from __future__ import annotations

import asyncio
import gc
import resource
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def run_on_fast_loop(work: Coroutine[Any, Any, T]) -> T:
    """As `asyncio.run`, with less work per chunk. A cancelled coroutine is a KeyboardInterrupt: only Ctrl-C cancels."""
    _allow_open_files()
    gc.freeze()  # what is loaded so far stays: collections look at the rest only, which keeps them short
    loop: asyncio.AbstractEventLoop
    try:
        import uvloop

        loop = uvloop.new_event_loop()
    except ImportError:
        loop = asyncio.new_event_loop()
    try:
        return loop.run_until_complete(work)
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    finally:
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


def _allow_open_files() -> None:
    """Each request under way is a socket, and shells often allow 1024 files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError):  # then so many as there are: the rest counts as failed to connect
            return
