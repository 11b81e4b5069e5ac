"""`RequestTable`: the requests in flight, and the way of a response to the request it belongs to."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from aotllm.errors import ERROR_KINDS, AotllmError, Internal
from aotllm.manager import ALL_SEQUENCES, ManagerRequest, Response
from aotllm.output_assembler import OutputAssembler
from aotllm.request_handle import OutputStream, RequestListener
from aotllm.request_in_flight import RequestInFlight


class RequestTable:
    """Thread-safe; responses are routed by one thread.

    Args:
        cancel: request id, sequence index → tells the runtime that nobody wants the rest.
    """

    def __init__(self, cancel: Callable[[int, int], None]) -> None:
        self._cancel = cancel
        # Reentrant: a handle's finalizer may run in the middle of anything.
        self.lock = threading.RLock()
        self._requests: dict[int, tuple[RequestInFlight, OutputStream]] = {}

    def __len__(self) -> int:
        with self.lock:
            return len(self._requests)

    def add(
        self,
        request_id: int,
        request: ManagerRequest,
        make_assembler: Callable[[int], OutputAssembler],
        listener: RequestListener | None = None,
    ) -> OutputStream:
        """A request has been handed to the runtime, or is about to be. Returns the stream that its outputs come in.

        Args:
            request_id: no response of it has been routed yet.
            request: what the runtime gets.
            make_assembler: sequence index -> what takes the sequence's responses.
            listener: hears of its outputs and its end.
        """
        in_flight = RequestInFlight(
            request_id,
            request.prompt_token_ids,
            [make_assembler(index) for index in range(request.n)],
            keep=request.sampling.n,
            start=time.monotonic(),
            scores_prompt=request.prompt_logprobs is not None,
        )
        stream = OutputStream(listener)
        with self.lock:
            self._requests[request_id] = in_flight, stream
        return stream

    def forget(self, request_id: int) -> None:
        """It has ended, or was refused: its responses, if there are any, mean nothing."""
        with self.lock:
            self._requests.pop(request_id, None)

    def route(self, response: Response) -> None:
        """Hand a response to its request. Never raises: one request's fault must not reach another."""
        with self.lock:
            entry = self._requests.get(response.request_id)
        if entry is None:
            return  # ended by a stop string, or by a fault of its own; the runtime has been told
        in_flight, stream = entry
        try:
            self._deliver(response, in_flight, stream)
        except Exception as error:
            self.forget(response.request_id)
            self._cancel(response.request_id, ALL_SEQUENCES)
            stream.fail(as_internal(error))

    def fail_all(self, error: AotllmError) -> None:
        """End all requests with an error."""
        for _, stream in self._take_all():
            stream.fail(error)

    def cancel_all(self) -> None:
        """End all requests as cancelled, without last responses of the runtime."""
        for in_flight, stream in self._take_all():
            news = in_flight.cancel()
            stream.put(news.outputs, news.result)

    def _take_all(self) -> list[tuple[RequestInFlight, OutputStream]]:
        with self.lock:
            entries = list(self._requests.values())
            self._requests.clear()
        return entries

    def _deliver(self, response: Response, in_flight: RequestInFlight, stream: OutputStream) -> None:
        request_id = response.request_id
        if response.error_kind is not None:
            self.forget(request_id)
            kind = ERROR_KINDS.get(response.error_kind, Internal)
            stream.fail(kind(response.error_message or kind.kind))
            return
        news = in_flight.take(response)
        if news.result is not None:
            self.forget(request_id)
        if news.stopped_early:
            self._cancel(request_id, response.sequence_index)  # the runtime would go on
        if news.outputs and not stream.put(news.outputs, news.result):
            self._cancel(request_id, ALL_SEQUENCES)


def as_internal(error: Exception) -> AotllmError:
    """Our own errors as they are, others as faults of ours."""
    if isinstance(error, AotllmError):
        return error
    wrapped = Internal(f"{type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped
