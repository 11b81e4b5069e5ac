"""Errors on the wire: one body for all, `{"error": {message, type, param, code}}`."""

from __future__ import annotations

from typing import Any

from aotllm.errors import AotllmError


class ModelNotFound(AotllmError):
    """The request names a model that is not served."""

    kind = "model_not_found"
    http_status = 404
    error_type = "NotFoundError"
    param = "model"
    """The field that has the name"""


def error_body(message: str, error_type: str, code: int, param: str | None = None) -> dict[str, Any]:
    """The body of an error, also inside a stream."""
    # A message may quote text that is not valid Unicode.
    message = message.encode("utf-8", "replace").decode("utf-8")
    return {"error": {"message": message, "type": error_type, "param": param, "code": code}}


def body_of(error: AotllmError) -> dict[str, Any]:
    """The body of one of our own errors."""
    return error_body(error.message, error.error_type, error.http_status, getattr(error, "param", None))
