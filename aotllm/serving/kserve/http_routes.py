"""`kserve_routes`: KServe v2 and Triton's extensions over HTTP, below /v2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from aotllm.errors import AotllmError, InvalidRequest
from aotllm.serving.context import ServingContext
from aotllm.serving.error_responses import response_of as openai_response_of
from aotllm.serving.kserve import http_codec
from aotllm.serving.kserve.descriptions import model_config, model_metadata, server_metadata
from aotllm.serving.kserve.errors import NotImplementedHere, fault, sentence
from aotllm.serving.kserve.generate import generate
from aotllm.serving.kserve.inference import Inference
from aotllm.serving.kserve.model_control import ModelControl
from aotllm.serving.kserve.rpcs import NO_CUDA_MEMORY, NO_LOG_SETTINGS, NO_TRACE_SETTING, model_ready, server_live
from aotllm.serving.router import Call, Router

_MODEL = ("/v2/models/{model:path}/versions/{version}", "/v2/models/{model:path}")
"""A version in the URL comes first: names may hold slashes"""


def _with_tritons_errors(call: Call) -> Call:
    """Errors have Triton's form here: `{"error": "…"}`."""

    async def handle(request: Request) -> Response:
        try:
            return await call(request)
        except AotllmError as error:
            headers = openai_response_of(error).headers
            retry = {"Retry-After": headers["retry-after"]} if "retry-after" in headers else None
            return JSONResponse({"error": sentence(error)}, error.http_status, retry)
        except HTTPException as error:
            return JSONResponse({"error": error.detail}, error.status_code, error.headers)
        except Exception as error:
            told = fault(error, f"{request.method} {request.url.path}")
            return JSONResponse({"error": told.message}, told.http_status)

    return handle


def kserve_routes(context: ServingContext) -> Router:
    """All routes below /v2. They are not in the OpenAPI document, which could say of their bodies only that they are
    JSON: `/v2/models/NAME/config` tells what a model takes."""
    inference = Inference.of(context)
    router = Router(wrap=_with_tritons_errors, in_schema=False)
    _add_server_routes(router, inference)
    _add_repository_routes(router, inference)
    _add_shared_memory_routes(router, inference)
    _add_model_routes(router, inference)

    @router.route("/v2/{path:path}", ("GET", "POST"))
    async def get_nothing(path: str, client: Request) -> Response:
        raise HTTPException(404, f"there is no {client.method} /v2/{path[:200]}")

    return router


def _add_server_routes(router: Router, inference: Inference) -> None:
    context = inference.context

    @router.get("/v2/health/live")
    async def get_live() -> Response:
        return _health(server_live(inference))

    @router.get("/v2/health/ready")
    async def get_ready() -> Response:
        return _health(context.ready)

    @router.get("/v2")
    @router.get("/v2/")
    async def get_server() -> dict[str, Any]:
        return server_metadata()

    @router.route("/v2/logging", ("GET", "POST"))
    async def log_settings() -> Response:
        raise NotImplementedHere(NO_LOG_SETTINGS)

    @router.route("/v2/trace/setting", ("GET", "POST"))
    async def trace_setting() -> Response:
        raise NotImplementedHere(NO_TRACE_SETTING)


def _add_repository_routes(router: Router, inference: Inference) -> None:
    control = ModelControl(inference)
    limit = inference.context.options.max_body_bytes

    @router.post("/v2/repository/index")
    async def post_index(client: Request) -> list[dict[str, Any]]:
        body = http_codec.json_object(await _body(client, limit))
        ready = body.get("ready", False)
        if not isinstance(ready, bool):
            raise InvalidRequest(f"ready must be a boolean, got {ready!r:.60}", "ready")
        return control.index(ready=ready)

    @router.post("/v2/repository/models/{model:path}/load")
    async def post_load(model: str, client: Request) -> Response:
        body = http_codec.json_object(await _body(client, limit))
        await control.load(model, "", body.get("parameters"))
        return Response()

    @router.post("/v2/repository/models/{model:path}/unload")
    async def post_unload(model: str) -> Response:
        await control.unload(model, "")
        return Response()

    @router.get("/v2/models/stats")
    async def get_all_statistics() -> dict[str, Any]:
        return await control.statistics()


def _add_shared_memory_routes(router: Router, inference: Inference) -> None:
    shared_memory = inference.shared_memory
    limit = inference.context.options.max_body_bytes

    @router.get("/v2/systemsharedmemory/status")
    async def get_regions() -> list[dict[str, Any]]:
        return list(shared_memory.regions().values())

    @router.get("/v2/systemsharedmemory/region/{name:path}/status")
    async def get_region(name: str) -> list[dict[str, Any]]:
        return list(shared_memory.regions(name).values())

    @router.post("/v2/systemsharedmemory/region/{name:path}/register")
    async def post_register(name: str, client: Request) -> Response:
        body = http_codec.json_object(await _body(client, limit))
        await shared_memory.register(name, body.get("key"), body.get("offset", 0), body.get("byte_size"))
        return Response()

    @router.post("/v2/systemsharedmemory/unregister")
    async def post_unregister_all() -> Response:
        await shared_memory.unregister()
        return Response()

    @router.post("/v2/systemsharedmemory/region/{name:path}/unregister")
    async def post_unregister(name: str) -> Response:
        await shared_memory.unregister(name)
        return Response()

    @router.get("/v2/cudasharedmemory/status")
    async def get_cuda_regions() -> list[dict[str, Any]]:
        return []

    @router.post("/v2/cudasharedmemory/unregister")
    async def post_unregister_all_cuda() -> Response:
        return Response()

    @router.post("/v2/cudasharedmemory/region/{name:path}/register")
    async def post_register_cuda(name: str) -> Response:
        raise NotImplementedHere(NO_CUDA_MEMORY)


def _add_model_routes(router: Router, inference: Inference) -> None:
    context = inference.context
    control = ModelControl(inference)
    limit = context.options.max_body_bytes

    async def ready(model: str, version: str = "") -> Response:
        return _health(model_ready(inference, model, version))

    async def config(model: str, version: str = "") -> dict[str, Any]:
        return model_config(inference.models.get(model, version), context.options.max_prompts)

    async def statistics(model: str, version: str = "") -> dict[str, Any]:
        return await control.statistics(model, version)

    async def trace_setting(model: str) -> Response:
        raise NotImplementedHere(NO_TRACE_SETTING)

    async def metadata(model: str, version: str = "") -> dict[str, Any]:
        return model_metadata(inference.models.get(model, version))

    async def infer(client: Request, model: str, version: str = "") -> Response:
        call = inference.call(client.url.path, client.headers)
        data = await _body(client, limit)
        header_length = client.headers.get(http_codec.HEADER_LENGTH)
        request = http_codec.request_of(model, version, data, header_length, inference.shared_memory)
        generation = inference.generation(request, call)
        if generation.stream:
            raise NotImplementedHere("infer gives one response: for stream=true use generate_stream, or gRPC")
        return http_codec.response_of(request, await inference.whole(generation, call, client), inference.shared_memory)

    async def generate_one(client: Request, model: str, version: str = "") -> Response:
        return await generate(
            inference, model, version, http_codec.json_object(await _body(client, limit)), client, False
        )

    async def generate_stream(client: Request, model: str, version: str = "") -> Response:
        return await generate(
            inference, model, version, http_codec.json_object(await _body(client, limit)), client, True
        )

    routes: list[tuple[str, str, Callable[..., Any]]] = [
        ("GET", "/ready", ready),
        ("GET", "/config", config),
        ("GET", "/stats", statistics),
        ("POST", "/infer", infer),
        ("POST", "/generate", generate_one),
        ("POST", "/generate_stream", generate_stream),
        ("GET", "/trace/setting", trace_setting),
        ("POST", "/trace/setting", trace_setting),
        ("GET", "", metadata),
    ]
    for method, suffix, endpoint in routes:
        for prefix in _MODEL:
            router.route(prefix + suffix, (method,))(endpoint)


def _health(well: bool) -> Response:
    return Response(status_code=200 if well else 503)


async def _body(client: Request, limit: int) -> bytes:
    return http_codec.decompressed(await client.body(), client.headers.get("content-encoding", ""), limit)
