"""`Dispatcher`: the one thread that takes responses from the manager and hands them to their requests."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from aotllm.errors import ERROR_KINDS, AotllmError, Cancelled, Internal
from aotllm.manager import Manager, ManagerRequest, Response
from aotllm.output_assembler import OutputAssembler
from aotllm.request import RequestOutput, Timings
from aotllm.request_handle import OutputStream, Stopwatch

_POLL_SECONDS = 1.0  # only how often an idle thread looks around: a response or shutdown wakes it


@dataclass
class _InFlight:
    request_id: int
    prompt_token_ids: tuple[int, ...]
    assembler: OutputAssembler
    stream: OutputStream = field(default_factory=OutputStream)
    stopwatch: Stopwatch = field(default_factory=Stopwatch)

    def result(self) -> RequestOutput:
        done = self.assembler
        assert done.finish_reason is not None
        return RequestOutput(
            request_id=self.request_id,
            text=done.text,
            token_ids=tuple(done.token_ids),
            finish_reason=done.finish_reason,
            stop_reason=done.stop_reason,
            prompt_token_ids=self.prompt_token_ids,
            num_cached_tokens=done.num_cached_tokens,
            timings=Timings(self.stopwatch.first_token_seconds, self.stopwatch.elapsed()),
            logprobs=tuple(done.logprobs),
            logits=tuple(done.logits),
        )


class Dispatcher:
    """Owns the manager and the table of requests in flight.

    It knows nothing of `Executor` or `RequestHandle`, so that both can be garbage collected while it runs, and their
    finalizers can end the requests, or the dispatcher itself.
    """

    def __init__(self, manager: Manager) -> None:
        self._manager = manager
        # Reentrant: a handle's finalizer may run in the middle of anything.
        self._lock = threading.RLock()
        self._requests: dict[int, _InFlight] = {}
        self._closing = False
        self._broken: AotllmError | None = None
        self._thread = threading.Thread(target=self._run, name="aotllm-dispatcher", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Takes requests: neither shut down nor broken."""
        return not self._closing and self._broken is None

    def submit(
        self, request: ManagerRequest, make_assembler: Callable[[], OutputAssembler]
    ) -> tuple[int, OutputStream]:
        """Hand a request to the manager.

        Returns:
            its id and the stream that its outputs will come in.
        """
        assembler = make_assembler()
        prompt = tuple(request.prompt_token_ids)
        # Under the lock the dispatcher thread cannot meet a response of a request that is not in the table yet.
        with self._lock:
            if self._broken is not None:
                raise type(self._broken)(self._broken.message)
            if self._closing:
                raise Cancelled("the executor is shut down; make a new one")
            stopwatch = Stopwatch()
            request_id = self._manager.submit(request)
            entry = _InFlight(request_id, prompt, assembler, stopwatch=stopwatch)
            self._requests[request_id] = entry
        return request_id, entry.stream

    def cancel(self, request_id: int) -> None:
        """No-op for a finished or unknown request."""
        self._manager.cancel(request_id)

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
            self._deliver(entry, response)
        except Exception as error:  # one request's fault must not reach another
            self._forget(entry)
            self._manager.cancel(entry.request_id)
            entry.stream.fail(_as_internal(error))

    def _deliver(self, entry: _InFlight, response: Response) -> None:
        if response.error_kind is not None:
            self._forget(entry)
            kind = ERROR_KINDS.get(response.error_kind, Internal)
            entry.stream.fail(kind(response.error_message or kind.kind))
            return
        if response.token_ids:
            entry.stopwatch.saw_token()
        output = entry.assembler.add(response)
        if output.finish_reason is not None:
            self._forget(entry)
            if response.finish_reason is None:
                self._manager.cancel(entry.request_id)  # a stop string: the runtime would go on
            entry.stream.put(output, entry.result())
        elif not entry.stream.put(output):
            self._manager.cancel(entry.request_id)

    def _forget(self, entry: _InFlight) -> None:
        with self._lock:
            self._requests.pop(entry.request_id, None)

    def _fail_all(self, error: Exception) -> None:
        with self._lock:
            self._broken = _as_internal(error)
            entries = list(self._requests.values())
            self._requests.clear()
        for entry in entries:
            entry.stream.fail(_as_internal(error))

    def _cancel_rest(self) -> None:
        with self._lock:
            entries = list(self._requests.values())
            self._requests.clear()
        for entry in entries:
            output = entry.assembler.cancel()
            entry.stream.put(output, entry.result())


def _as_internal(error: Exception) -> AotllmError:
    if isinstance(error, AotllmError):
        return error
    wrapped = Internal(f"{type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped
