"""`Telemetry`: where requests report what happens to them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from aotllm.request import Request
from aotllm.request_handle import RequestListener, SilentListener

if TYPE_CHECKING:
    from aotllm.serving.call import Call


class Telemetry(Protocol):
    """Makes a listener per request."""

    def begin(self, call: Call, request: Request) -> RequestListener:
        """A request of a call has arrived. Its listener hears of its outputs and, exactly once, of its end, also when
        it is refused. Called on the event loop; the listener may be called on any thread, one at a time."""

    def close(self) -> None:
        """Hand over what has been gathered; nothing comes after it."""


class NoTelemetry:
    """Tells nobody."""

    def begin(self, call: Call, request: Request) -> RequestListener:
        """See `Telemetry.begin`."""
        return SilentListener()

    def close(self) -> None:
        """See `Telemetry.close`."""
