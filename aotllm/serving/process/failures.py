"""Errors on their way between processes."""

from __future__ import annotations

from aotllm.errors import ERROR_KINDS, AotllmError, Internal, Overloaded
from aotllm.serving.errors import ModelNotFound
from aotllm.serving.process.messages import Failure

_KINDS = ERROR_KINDS | {ModelNotFound.kind: ModelNotFound}


def failure_of(error: Exception) -> Failure:
    """An error as a message."""
    if not isinstance(error, AotllmError):
        return Failure(Internal.kind, f"{type(error).__name__}: {error}")
    return Failure(error.kind, error.message, getattr(error, "param", None), getattr(error, "retry_after", None))


def error_of(failure: Failure) -> AotllmError:
    """The error that a message stands for."""
    kind = _KINDS.get(failure.kind, Internal)
    if issubclass(kind, Overloaded):
        return kind(failure.message, 1.0 if failure.retry_after is None else failure.retry_after)
    error = kind(failure.message)
    if failure.param is not None:
        error.param = failure.param  # type: ignore[attr-defined]
    return error
