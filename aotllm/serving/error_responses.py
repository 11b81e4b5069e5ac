"""Errors as HTTP responses. Apart from `errors`, so that processes that speak no HTTP need no FastAPI."""

from __future__ import annotations

import math
from http import HTTPStatus

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

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


def install_handlers(app: FastAPI) -> None:
    """Make every failure of `app` come out in our form."""
    app.add_exception_handler(AotllmError, _on_aotllm_error)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(Exception, _on_fault)


async def _on_aotllm_error(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, AotllmError)
    return response_of(error)


async def _on_validation_error(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    # ("body", "messages", 0, "role"): the parameter is the field of the body, the message says where inside it.
    where = [str(part) for part in first["loc"][1:]]
    if first["type"] == "json_invalid":
        return _bad_request(f"the body is not valid JSON: {first.get('ctx', {}).get('error', first['msg'])}")
    if not where:
        return _bad_request("the body must be a JSON object, sent as Content-Type: application/json")
    return _bad_request(f"{'.'.join(where)}: {first['msg']}", where[0])


def _bad_request(message: str, param: str | None = None) -> JSONResponse:
    return JSONResponse(error_body(message, _TYPES[400], 400, param), 400)


async def _on_http_exception(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    status = error.status_code
    message = f"{request.method} {request.url.path}: {error.detail or HTTPStatus(status).phrase}"
    error_type = _TYPES.get(status, "BadRequestError" if status < 500 else "InternalServerError")
    return JSONResponse(error_body(message, error_type, status), status, error.headers)


async def _on_fault(request: Request, error: Exception) -> JSONResponse:
    # What went wrong stands in the server's log; it is no business of the client.
    response = response_of(Internal(f"a fault of the server ({type(error).__name__}); its log has the details"))
    if "x-request-id" in request.headers:
        response.headers["X-Request-Id"] = request.headers["x-request-id"]
    return response
