"""Triton's side of its Python backend, `triton_python_backend_utils`, for tests without Triton.

A model is brought up by `Server.load`. As in the real one the inputs of a request are gone once `execute` has returned,
and a response after the final one, or a question about a request that has ended, is a fault.
"""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np

TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1


class Tensor:
    def __init__(self, name: str, array: np.ndarray) -> None:
        self._name, self._array = name, np.array(array)

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> np.ndarray:
        return self._array


class TritonError(Exception):
    UNKNOWN, INTERNAL, NOT_FOUND, INVALID_ARG, UNAVAILABLE, UNSUPPORTED, ALREADY_EXISTS, CANCELLED = range(8)

    def __init__(self, message: str, code: int = INTERNAL) -> None:
        super().__init__(message)
        self.message, self.code = message, code


class InferenceResponse:
    def __init__(self, output_tensors: list[Tensor] | None = None, error: TritonError | None = None) -> None:
        self._tensors, self._error = output_tensors or [], error

    def output_tensors(self) -> list[Tensor]:
        return self._tensors

    def has_error(self) -> bool:
        return self._error is not None

    def error(self) -> TritonError | None:
        return self._error


class ResponseSender:
    def __init__(self, decoupled: bool) -> None:
        self.cancelled = False
        self.responses: list[InferenceResponse] = []
        self.final = False
        self.changed = threading.Condition()
        self._decoupled = decoupled

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        with self.changed:
            assert not self.final, "a response after the final one"
            if not self._decoupled:
                assert response is not None, "a model that is not decoupled sends exactly one response"
                assert flags == TRITONSERVER_RESPONSE_COMPLETE_FINAL
            if response is not None:
                self.responses.append(response)
            self.final = flags == TRITONSERVER_RESPONSE_COMPLETE_FINAL
            self.changed.notify_all()

    def is_cancelled(self) -> bool:
        assert not self.final, "a question about a request that has ended"
        return self.cancelled


class InferenceRequest:
    """Also what a model sends to another one."""

    server: Server

    def __init__(
        self,
        model_name: str,
        requested_output_names: list[str],
        inputs: list[Tensor],
        request_id: str = "",
        parameters: dict[str, Any] | None = None,
        timeout: int = 0,
    ) -> None:
        self.model_name = model_name
        self._wanted, self._inputs, self._request_id = requested_output_names, inputs, request_id
        self._parameters, self._timeout = parameters, timeout
        self._sender: ResponseSender | None = None
        self.readable = True

    def inputs(self) -> list[Tensor]:
        assert self.readable, "the inputs are gone when execute has returned"
        return self._inputs

    def request_id(self) -> str:
        return self._request_id

    def requested_output_names(self) -> set[str]:
        return set(self._wanted)

    def parameters(self) -> str:
        return json.dumps(self._parameters) if self._parameters else ""

    def timeout(self) -> int:
        return self._timeout

    def get_response_sender(self) -> ResponseSender:
        assert self._sender is not None
        return self._sender

    def exec(self, decoupled: bool = False) -> Any:
        loaded = InferenceRequest.server.models.get(self.model_name)
        if loaded is None:
            raise RuntimeError(f"Failed for execute the inference request. Model '{self.model_name}' is not ready.")
        assert loaded.decoupled == decoupled
        responses = loaded.answers(self)
        return responses if decoupled else next(responses)


class Loaded:
    """A model of the server."""

    def __init__(self, model: Any, decoupled: bool) -> None:
        self.model, self.decoupled = model, decoupled

    def send(self, request: InferenceRequest) -> ResponseSender:
        request._sender = ResponseSender(self.decoupled)
        self.model.execute([request])
        request.readable = False
        for tensor in request._inputs:
            tensor._array = np.full_like(tensor._array, b"gone" if tensor._array.dtype == np.object_ else 0)
        return request._sender

    def answers(self, request: InferenceRequest) -> Iterator[InferenceResponse]:
        sender = self.send(request)
        for index in itertools.count():
            with sender.changed:
                while len(sender.responses) == index and not sender.final:
                    assert sender.changed.wait(60)
                if len(sender.responses) == index:
                    return
                response = sender.responses[index]
            yield response


class Server:
    """A Triton with models."""

    def __init__(self) -> None:
        self.models: dict[str, Loaded] = {}
        InferenceRequest.server = self

    def load(self, model: Any, name: str, decoupled: bool = True, **parameters: str) -> Loaded:
        config = {
            "parameters": {key: {"string_value": value} for key, value in parameters.items()},
            "model_transaction_policy": {"decoupled": decoupled},
        }
        model.initialize(
            {
                "model_config": json.dumps(config),
                "model_repository": f"/repository/{name}",
                "model_version": "1",
                "model_name": name,
            }
        )
        self.models[name] = Loaded(model, decoupled)
        return self.models[name]

    def close(self) -> None:
        for loaded in reversed(self.models.values()):
            loaded.model.finalize()


def using_decoupled_model_transaction_policy(config: dict[str, Any]) -> bool:
    return bool(config["model_transaction_policy"]["decoupled"])


class MetricFamily:
    COUNTER, GAUGE = "counter", "gauge"
    values: dict[tuple[str, str], float]
    """(name, outcome or empty) -> value, of the family that was made last under a name"""

    def __init__(self, name: str, description: str, kind: str) -> None:
        self._name = name

    def Metric(self, labels: dict[str, str]) -> Any:
        key = self._name, labels.get("outcome", "")
        MetricFamily.values[key] = 0.0
        return SimpleNamespace(increment=lambda by: MetricFamily.values.__setitem__(key, MetricFamily.values[key] + by))


MetricFamily.values = {}

Logger = SimpleNamespace(log_error=print, log_warn=print)
