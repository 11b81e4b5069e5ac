"""`/generate` and `/generate_stream`: inputs as fields of a JSON object, outputs as fields of another."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse

from aotllm.errors import AotllmError, InvalidRequest
from aotllm.serving.kserve.errors import fault, sentence
from aotllm.serving.kserve.infer_request import InferRequest
from aotllm.serving.kserve.inference import Inference, Stream
from aotllm.serving.kserve.models import VERSION
from aotllm.triton_tensors.tensors import Tensor


async def generate(
    inference: Inference, model: str, version: str, body: Mapping[str, Any], client: HttpRequest, streams: bool
) -> Response:
    """One JSON object or, where `streams`, one per event. Raises AotllmError for what can be refused beforehand."""
    call = inference.call(client.url.path, client.headers)
    request = _request(model, version, body)
    generation = inference.generation(request, call, stream=streams)
    if generation.stream and not streams:
        raise InvalidRequest("generate gives one response: for stream=true use generate_stream", "stream")
    head = {"id": request.id} if request.id else {}
    head |= {"model_name": model, "model_version": VERSION}
    if not streams:
        return _json(head | _fields(await inference.whole(generation, call, client)))
    if generation.stream:
        events = _steps(await inference.start(generation, call), head)
    else:
        events = _one(head | _fields(await inference.whole(generation, call, client)))
    return StreamingResponse(
        events, media_type="text/event-stream", headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    )


def _request(model: str, version: str, body: Mapping[str, Any]) -> InferRequest:
    """All fields are parameters, those of `parameters` included; null is the same as leaving a field out."""
    request_id = body.get("id") or ""
    inner = body.get("parameters") or {}
    if not isinstance(inner, dict) or not isinstance(request_id, str):
        raise InvalidRequest("parameters must be an object, and id a string", "parameters")
    twice = sorted(inner.keys() & body.keys())
    if twice:
        raise InvalidRequest(f"{twice[0]}: given twice, in parameters and beside them; give it once", twice[0])
    fields = {**{k: v for k, v in body.items() if k not in ("id", "parameters")}, **inner}
    return InferRequest(
        model, version, request_id, {name: value for name, value in fields.items() if value is not None}
    )


def _fields(tensors: Sequence[Tensor]) -> dict[str, Any]:
    """A tensor of one element is a plain value, any other one a flat list."""
    values = ((tensor.name, tensor.to_json()) for tensor in tensors)
    return {name: value[0] if len(value) == 1 else value for name, value in values}


async def _steps(stream: Stream, head: dict[str, Any]) -> AsyncIterator[bytes]:
    try:
        async with aclosing(stream.steps()) as steps:
            async for step in steps:
                yield _event(head | _fields(stream.answers.step(step)))
    except AotllmError as error:
        yield _event({"error": sentence(error)})
    except Exception as error:
        yield _event({"error": fault(error, "generate_stream").message})


async def _one(answer: dict[str, Any]) -> AsyncIterator[bytes]:
    yield _event(answer)


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def _json(value: dict[str, Any]) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
