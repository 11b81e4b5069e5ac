"""Errors that only this protocol has, and the one map from errors to gRPC status codes."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from aotllm.errors import AotllmError, Internal

if TYPE_CHECKING:
    import grpc

_log = logging.getLogger(__name__)


class NotImplementedHere(AotllmError):
    """A part of the protocol that this server does not have."""

    kind = "not_implemented"
    http_status = 501
    error_type = "NotImplementedError"


class ModelNotReady(AotllmError):
    """A model of the repository that is not loaded."""

    kind = "model_not_ready"
    http_status = 503
    error_type = "ServiceUnavailableError"


class RegionNotFound(AotllmError):
    """No region of shared memory is registered under a name."""

    kind = "region_not_found"
    http_status = 404
    error_type = "NotFoundError"


class RegionExists(AotllmError):
    """A region of shared memory is registered under a name already."""

    kind = "region_exists"
    http_status = 409
    error_type = "ConflictError"


_CODES = {
    400: "INVALID_ARGUMENT",
    404: "NOT_FOUND",
    409: "ALREADY_EXISTS",
    499: "CANCELLED",
    501: "UNIMPLEMENTED",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}


def grpc_status(error: AotllmError) -> grpc.StatusCode:
    """The status code of an error: each HTTP status has one."""
    import grpc  # here: a server without gRPC needs none of it

    return grpc.StatusCode[_CODES.get(error.http_status, "INTERNAL")]


def sentence(error: AotllmError) -> str:
    """The message as text that can be sent: it may quote what is not valid Unicode."""
    return error.message.encode("utf-8", "replace").decode("utf-8")


def fault(error: Exception, where: str) -> Internal:
    """What a client is told of an error that was not foreseen: the log has the details."""
    _log.error("%s failed", where, exc_info=error)
    return Internal(f"a fault of the server ({type(error).__name__}); its log has the details")
