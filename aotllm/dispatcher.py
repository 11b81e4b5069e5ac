"""`Dispatcher`: the one thread that takes responses from the manager and hands them to their requests."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from aotllm.errors import AotllmError, Cancelled
from aotllm.manager import ALL_SEQUENCES, Manager, ManagerRequest
from aotllm.output_assembler import OutputAssembler
from aotllm.request_handle import OutputStream, RequestListener
from aotllm.request_table import RequestTable, as_internal

_POLL_SECONDS = 3600.0  # an idle thread sleeps: a response or shutdown wakes it


class Dispatcher:
    """Owns the manager and the table of requests in flight.

    It knows nothing of `Executor` or `RequestHandle`, so that both can be garbage collected while it runs, and their
    finalizers can end the requests, or the dispatcher itself.
    """

    def __init__(self, manager: Manager) -> None:
        self._manager = manager
        self._table = RequestTable(manager.cancel)
        self._closing = False
        self._broken: AotllmError | None = None
        self._thread = threading.Thread(target=self._run, name="aotllm-dispatcher", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Takes requests: neither shut down nor broken."""
        return not self._closing and self._broken is None

    @property
    def in_flight(self) -> int:
        """Requests that have not ended."""
        return len(self._table)

    def submit(
        self,
        request: ManagerRequest,
        make_assembler: Callable[[int], OutputAssembler],
        listener: RequestListener | None = None,
    ) -> tuple[int, OutputStream]:
        """Hand a request to the manager; see `RequestTable.add`. Returns its id and the stream of its outputs."""
        # Under the lock the dispatcher thread cannot meet a response of a request that is not in the table yet.
        with self._table.lock:
            if self._broken is not None:
                raise type(self._broken)(self._broken.message)
            if self._closing:
                raise Cancelled("the executor is shut down; make a new one")
            request_id = self._manager.submit(request)
            return request_id, self._table.add(request_id, request, make_assembler, listener)

    def cancel(self, request_id: int, sequence_index: int = ALL_SEQUENCES) -> None:
        """No-op for a finished or unknown request or sequence."""
        self._manager.cancel(request_id, sequence_index)

    def shutdown(self, drain: bool = False) -> None:
        """End all requests (`drain`: let them finish), then the thread. Idempotent; a second call may stop a drain."""
        with self._table.lock:
            self._closing = True
        self._manager.shutdown(drain)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        try:
            while not self._over():
                start = time.monotonic()
                responses = self._manager.poll(_POLL_SECONDS)
                for response in responses:
                    self._table.route(response)
                if not responses and self._closing and time.monotonic() - start < _POLL_SECONDS / 2:
                    break  # poll does not wait when the manager has nothing left
        except Exception as error:
            with self._table.lock:
                self._broken = as_internal(error)
            self._table.fail_all(as_internal(error))
        self._table.cancel_all()

    def _over(self) -> bool:
        with self._table.lock:
            return self._closing and not self._table
