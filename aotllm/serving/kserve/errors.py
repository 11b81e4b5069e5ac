"""Errors that only this protocol has, and the one map from errors to gRPC status codes."""

from __future__ import annotations

import logging

import grpc

from aotllm.errors import AotllmError, Internal

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
    400: grpc.StatusCode.INVALID_ARGUMENT,
    404: grpc.StatusCode.NOT_FOUND,
    409: grpc.StatusCode.ALREADY_EXISTS,
    499: grpc.StatusCode.CANCELLED,
    501: grpc.StatusCode.UNIMPLEMENTED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}


def grpc_status(error: AotllmError) -> grpc.StatusCode:
    """The status code of an error: each HTTP status has one."""
    return _CODES.get(error.http_status, grpc.StatusCode.INTERNAL)


def sentence(error: AotllmError) -> str:
    """The message as text that can be sent: it may quote what is not valid Unicode."""
    return error.message.encode("utf-8", "replace").decode("utf-8")


def fault(error: Exception, where: str) -> Internal:
    """What a client is told of an error that was not foreseen: the log has the details."""
    _log.error("%s failed", where, exc_info=error)
    return Internal(f"a fault of the server ({type(error).__name__}); its log has the details")
