"""Errors as HTTP responses. Apart from `errors`, so that processes that speak no HTTP need no Starlette."""

from __future__ import annotations

import math
from http import HTTPStatus

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from aotllm.errors import AotllmError, Internal, Overloaded
from aotllm.serving.errors import body_of, error_body

_TYPES = {
    400: "BadRequestError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    413: "ContentTooLargeError",
    415: "UnsupportedMediaTypeError",
}


def response_of(error: AotllmError) -> JSONResponse:
    """The whole response of one of our own errors."""
    headers = {"Retry-After": str(max(1, math.ceil(error.retry_after)))} if isinstance(error, Overloaded) else None
    return JSONResponse(body_of(error), error.http_status, headers)


async def _on_aotllm_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, AotllmError)
    return response_of(error)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    status = error.status_code
    message = f"{request.method} {request.url.path}: {error.detail or HTTPStatus(status).phrase}"
    error_type = _TYPES.get(status, "BadRequestError" if status < 500 else "InternalServerError")
    return JSONResponse(error_body(message, error_type, status), status, error.headers)


async def _on_fault(request: Request, error: Exception) -> Response:
    # What went wrong stands in the server's log; it is no business of the client.
    response = response_of(Internal(f"a fault of the server ({type(error).__name__}); its log has the details"))
    if "x-request-id" in request.headers:
        response.headers["X-Request-Id"] = request.headers["x-request-id"]
    return response


ERROR_HANDLERS = {AotllmError: _on_aotllm_error, HTTPException: _on_http_exception, Exception: _on_fault}
"""For an application: every failure comes out in our form"""
