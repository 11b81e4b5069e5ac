"""`ForwardingModel`: a model under a name and with tensors that clients know, which has another one answer."""

from __future__ import annotations

import json
import threading
import uuid
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import triton_python_backend_utils as triton

from aotllm.errors import Cancelled
from aotllm.export_triton.inputs import input_arrays, model_parameters, request_parameters
from aotllm.export_triton.job import CancellationWatch, Job, begin_jobs
from aotllm.export_triton.model_settings import ModelSettings


class ForwardingModel:
    """What Triton's Python backend calls. Triton runs each model in a process of its own, and the engine is to be
    loaded once: so one model has it, and the others call that one (Triton's "business logic scripting").

    An ensemble could forward, too, but does not pass on that a client has gone. Waiting for the next response of
    the other model blocks a thread; so there is one for each request in flight, up to `max_requests`.
    """

    def initialize(self, args: Mapping[str, str]) -> None:
        """Nothing to load: the other model may come later."""
        self._name = args["model_name"]
        self._settings = ModelSettings.from_parameters(model_parameters(args["model_config"]))
        self._decoupled = triton.using_decoupled_model_transaction_policy(json.loads(args["model_config"]))
        self._watch = CancellationWatch(self._settings.cancellation_check_period_ms / 1000)
        self._threads = ThreadPoolExecutor(self._settings.max_requests, thread_name_prefix="aotllm-forward")
        self._lock = threading.Lock()
        self._inner_ids: dict[str, set[str]] = defaultdict(set)
        """Client's id of a request -> our ids of it"""

    def execute(self, requests: Sequence[Any]) -> None:
        """Begin to forward."""
        begin_jobs(requests, self._begin)

    def finalize(self) -> None:
        """Wait for what is in flight."""
        self._threads.shutdown()
        self._watch.stop()

    def _begin(self, job: Job, request: Any) -> None:
        arrays = input_arrays(request)
        stop = arrays.pop("stop", None)
        if stop is not None and stop.any():
            self._threads.submit(self._stop_all, job)
            return
        # Ids of clients need not be unique, and `stop` must reach this request only.
        inner_id = f"{self._name}:{uuid.uuid4().hex}"
        inner = triton.InferenceRequest(
            model_name=self._settings.target_model,
            request_id=inner_id,
            inputs=[triton.Tensor(name, value) for name, value in arrays.items()],
            requested_output_names=sorted(job.wanted),
            parameters=request_parameters(request),
            timeout=request.timeout(),
        )
        job.on_gone = lambda: self._send_stop(inner_id)
        with self._lock:
            self._inner_ids[job.request_id].add(inner_id)
        self._threads.submit(self._forward, job, inner, inner_id)
        self._watch.add(job)

    def _forward(self, job: Job, inner: Any, inner_id: str) -> None:
        try:
            if job.gone:
                job.fail(Cancelled("the request was cancelled"))
                return
            for response in inner.exec(decoupled=True) if self._decoupled else [inner.exec()]:
                if response.has_error():
                    job.fail_with(response.error())
                    continue  # to the end: the other model is not done before it has been heard out
                tensors = response.output_tensors()
                if tensors or not self._decoupled:
                    outputs = [triton.Tensor(tensor.name(), tensor.as_numpy()) for tensor in tensors]
                    # Whether a streamed response is the last one is not known before the next one fails to come.
                    job.send(outputs, final=not self._decoupled)
            if job.gone:
                job.fail(Cancelled("the request was cancelled"))
            job.close()
        except Exception as error:
            triton.Logger.log_error(f"request {job.request_id}: {error!r}")
            # Also where the other model is not loaded, which Triton says in words for people.
            job.fail_with(triton.TritonError(str(error), triton.TritonError.UNAVAILABLE))
        finally:
            with self._lock:
                self._inner_ids[job.request_id].discard(inner_id)
                if not self._inner_ids[job.request_id]:
                    del self._inner_ids[job.request_id]

    def _stop_all(self, job: Job) -> None:
        with self._lock:
            inner_ids = list(self._inner_ids.get(job.request_id, ())) if job.request_id else []
        for inner_id in inner_ids:
            self._send_stop(inner_id)
        job.send([], final=True)

    def _send_stop(self, inner_id: str) -> None:
        request = triton.InferenceRequest(
            model_name=self._settings.target_model,
            request_id=inner_id,
            inputs=[triton.Tensor("stop", np.array([[True]]))],
            requested_output_names=["text_output"],
        )
        try:
            if self._decoupled:
                for _ in request.exec(decoupled=True):
                    pass
            else:
                request.exec()
        except Exception as error:
            triton.Logger.log_warn(f"request {inner_id} goes on: {error!r}")
