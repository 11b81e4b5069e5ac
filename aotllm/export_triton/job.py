"""`Job`: a request of Triton in flight; `CancellationWatch`: who notices that its client has gone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import triton_python_backend_utils as triton

from aotllm.errors import AotllmError

# Triton puts its classes into the module after it has imported the model: none of them may be touched before.
_CODES = {
    "invalid_request": "INVALID_ARG",
    "context_too_long": "INVALID_ARG",
    "overloaded": "UNAVAILABLE",
    "cancelled": "CANCELLED",
}


def triton_error(error: BaseException) -> Any:
    """An error in Triton's form, with its status code."""
    if isinstance(error, AotllmError):
        return triton.TritonError(error.message, getattr(triton.TritonError, _CODES.get(error.kind, "INTERNAL")))
    return triton.TritonError(
        f"a fault of the model ({type(error).__name__}); Triton's log has the details", triton.TritonError.INTERNAL
    )


class Job:
    """Answers one request. Thread-safe.

    Args:
        request: of Triton. It may be read while `execute` runs only.
        on_gone: called once, on the thread of the watch, when the client has cancelled.
    """

    def __init__(self, request: Any, on_gone: Callable[[], object] = lambda: None) -> None:
        self.request_id: str = request.request_id()
        self.wanted = frozenset(request.requested_output_names())
        self.gone = False
        """The client has cancelled"""
        self.on_gone = on_gone
        self._sender = request.get_response_sender()
        # After the final response Triton's side of the sender is gone, and so must be all questions to it.
        self._lock = threading.Lock()
        self.closed = False

    def send(self, tensors: Sequence[Any], final: bool = False) -> None:
        """Send a response; no-op when closed."""
        self._send(triton.InferenceResponse(output_tensors=list(tensors)), final)

    def fail(self, error: BaseException) -> None:
        """End with an error; no-op when closed."""
        self.fail_with(triton_error(error))

    def fail_with(self, error: Any) -> None:
        """End with an error in Triton's form; no-op when closed."""
        self._send(triton.InferenceResponse(error=error), final=True)

    def close(self) -> None:
        """End without a further response; no-op when closed."""
        with self._lock:
            if not self.closed:
                self.closed = True
                self._sender.send(flags=triton.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def check(self) -> None:
        """Ask Triton whether the client has cancelled."""
        with self._lock:
            if self.closed or self.gone or not self._sender.is_cancelled():
                return
            self.gone = True
        self.on_gone()

    def _send(self, response: Any, final: bool) -> None:
        with self._lock:
            if self.closed:
                return
            self.closed = final
            self._sender.send(response, flags=triton.TRITONSERVER_RESPONSE_COMPLETE_FINAL if final else 0)


def begin_jobs(requests: Sequence[Any], begin: Callable[[Job, Any], None]) -> None:
    """Call `begin` for each request of Triton; where it raises, the request is answered with the error."""
    for request in requests:
        job = Job(request)
        try:
            begin(job, request)
        except Exception as error:
            if not isinstance(error, AotllmError):
                triton.Logger.log_error(f"request {job.request_id}: {error!r}")
            job.fail(error)


class CancellationWatch:
    """Asks for all jobs in flight, since Triton tells nobody by itself.

    Args:
        period: seconds between two rounds.
    """

    def __init__(self, period: float) -> None:
        self._period = period
        self._jobs: set[Job] = set()
        self._changed = threading.Condition()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="aotllm-cancellation", daemon=True)
        self._thread.start()

    def add(self, job: Job) -> None:
        """Watch it until it is closed or its client has gone."""
        with self._changed:
            self._jobs.add(job)
            self._changed.notify()

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()
        with self._changed:
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(self._period):
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._stopped.is_set())
                jobs = list(self._jobs)
            for job in jobs:
                job.check()
            done = {job for job in jobs if job.closed or job.gone}
            with self._changed:
                self._jobs -= done
