"""`Dispatcher`: the one thread that takes responses from the manager and hands them to their requests."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from aotllm.errors import ERROR_KINDS, AotllmError, Cancelled, Internal
from aotllm.manager import ALL_SEQUENCES, Manager, ManagerRequest, Response
from aotllm.output_assembler import OutputAssembler
from aotllm.request_handle import OutputStream
from aotllm.request_in_flight import RequestInFlight

_POLL_SECONDS = 1.0  # only how often an idle thread looks around: a response or shutdown wakes it


class Dispatcher:
    """Owns the manager and the table of requests in flight.

    It knows nothing of `Executor` or `RequestHandle`, so that both can be garbage collected while it runs, and their
    finalizers can end the requests, or the dispatcher itself.
    """

    def __init__(self, manager: Manager) -> None:
        self._manager = manager
        # Reentrant: a handle's finalizer may run in the middle of anything.
        self._lock = threading.RLock()
        self._requests: dict[int, tuple[RequestInFlight, OutputStream]] = {}
        self._closing = False
        self._broken: AotllmError | None = None
        self._thread = threading.Thread(target=self._run, name="aotllm-dispatcher", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Takes requests: neither shut down nor broken."""
        return not self._closing and self._broken is None

    def submit(
        self, request: ManagerRequest, make_assembler: Callable[[int], OutputAssembler]
    ) -> tuple[int, OutputStream]:
        """Hand a request to the manager.

        Args:
            request: what the manager gets.
            make_assembler: sequence index -> what takes the sequence's responses.

        Returns:
            its id and the stream that its outputs will come in.
        """
        assemblers = [make_assembler(index) for index in range(request.n)]
        stream = OutputStream()
        # Under the lock the dispatcher thread cannot meet a response of a request that is not in the table yet.
        with self._lock:
            if self._broken is not None:
                raise type(self._broken)(self._broken.message)
            if self._closing:
                raise Cancelled("the executor is shut down; make a new one")
            start = time.monotonic()
            request_id = self._manager.submit(request)
            in_flight = RequestInFlight(
                request_id,
                request.prompt_token_ids,
                assemblers,
                keep=request.sampling.n,
                start=start,
                scores_prompt=request.prompt_logprobs is not None,
            )
            self._requests[request_id] = in_flight, stream
        return request_id, stream

    def cancel(self, request_id: int, sequence_index: int = ALL_SEQUENCES) -> None:
        """No-op for a finished or unknown request or sequence."""
        self._manager.cancel(request_id, sequence_index)

    def shutdown(self, drain: bool = False) -> None:
        """End all requests (`drain`: let them finish), then the thread. Idempotent; a second call may stop a drain."""
        with self._lock:
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
                    self._route(response)
                if not responses and self._closing and time.monotonic() - start < _POLL_SECONDS / 2:
                    break  # poll does not wait when the manager has nothing left
        except Exception as error:
            self._fail_all(error)
        self._cancel_rest()

    def _over(self) -> bool:
        with self._lock:
            return self._closing and not self._requests

    def _route(self, response: Response) -> None:
        with self._lock:
            entry = self._requests.get(response.request_id)
        if entry is None:
            return  # ended by a stop string, or by a fault of its own; the manager has been told
        try:
            self._deliver(response, *entry)
        except Exception as error:  # one request's fault must not reach another
            self._forget(response.request_id)
            self._manager.cancel(response.request_id)
            entry[1].fail(_as_internal(error))

    def _deliver(self, response: Response, in_flight: RequestInFlight, stream: OutputStream) -> None:
        request_id = response.request_id
        if response.error_kind is not None:
            self._forget(request_id)
            kind = ERROR_KINDS.get(response.error_kind, Internal)
            stream.fail(kind(response.error_message or kind.kind))
            return
        news = in_flight.take(response)
        if news.result is not None:
            self._forget(request_id)
        if news.stopped_early:
            self._manager.cancel(request_id, response.sequence_index)  # the runtime would go on
        if news.outputs and not stream.put(news.outputs, news.result):
            self._manager.cancel(request_id)

    def _forget(self, request_id: int) -> None:
        with self._lock:
            self._requests.pop(request_id, None)

    def _fail_all(self, error: Exception) -> None:
        with self._lock:
            self._broken = _as_internal(error)
            entries = list(self._requests.values())
            self._requests.clear()
        for _, stream in entries:
            stream.fail(_as_internal(error))

    def _cancel_rest(self) -> None:
        with self._lock:
            entries = list(self._requests.values())
            self._requests.clear()
        for in_flight, stream in entries:
            news = in_flight.cancel()
            stream.put(news.outputs, news.result)


def _as_internal(error: Exception) -> AotllmError:
    if isinstance(error, AotllmError):
        return error
    wrapped = Internal(f"{type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped
