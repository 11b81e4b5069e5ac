"""`POST /v1/load_lora_adapter` and `/v1/unload_lora_adapter`, as vLLM has them."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import PlainTextResponse, Response

from aotllm.errors import AotllmError, InvalidRequest
from aotllm.serving.context import ServingContext
from aotllm.serving.errors import ModelNotFound
from aotllm.serving.router import Router


class AdaptersAreFixed(AotllmError):
    """The server does not let clients load and unload adapters."""

    kind = "adapters_are_fixed"
    http_status = 403
    error_type = "PermissionDeniedError"


class LoadAdapterRequest(BaseModel):
    """Body of `/v1/load_lora_adapter`."""

    model_config = ConfigDict(extra="allow")

    lora_name: str = Field(description="The model's name by which requests use the adapter.")
    lora_path: str = Field(description="A PEFT folder of the server.")
    base_model_name: str | None = Field(None, description="The model that it is for; default: the first one.")


class UnloadAdapterRequest(BaseModel):
    """Body of `/v1/unload_lora_adapter`."""

    model_config = ConfigDict(extra="allow")

    lora_name: str


def lora_routes(context: ServingContext) -> Router:
    """They refuse everything unless `ServingOptions.allow_runtime_lora` is set: they read the server's files."""
    router = Router()

    def check_allowed() -> None:
        if not context.options.allow_runtime_lora:
            raise AdaptersAreFixed(
                "this server does not load or unload adapters at run time; start it with --allow-runtime-lora"
            )

    @router.post("/v1/load_lora_adapter", body=f"{__name__}:LoadAdapterRequest")
    async def post_load(body: LoadAdapterRequest) -> Response:
        check_allowed()
        base = context.models.get(body.base_model_name)
        if base.parent is not None:
            raise InvalidRequest(f"base_model_name {base.name!r:.80} is an adapter itself", "base_model_name")
        if any(body.lora_name == card["id"] for card in context.models.cards()):
            raise InvalidRequest(f"lora_name {body.lora_name!r:.80} is served already; unload it first", "lora_name")
        _check_text("lora_name", body.lora_name)
        _check_text("lora_path", body.lora_path)
        try:
            await base.engine.load_lora_async(body.lora_name, body.lora_path)
        except InvalidRequest as error:
            raise InvalidRequest(error.message, "lora_name" if error.param == "adapter" else "lora_path") from error
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    @router.post("/v1/unload_lora_adapter", body=f"{__name__}:UnloadAdapterRequest")
    async def post_unload(body: UnloadAdapterRequest) -> Response:
        check_allowed()
        try:
            served = context.models.get(body.lora_name)
        except ModelNotFound as error:
            error.param = "lora_name"
            raise
        if served.adapter is None:
            raise InvalidRequest(f"lora_name {body.lora_name!r:.80} is a model, not an adapter", "lora_name")
        await served.engine.unload_lora_async(served.adapter)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    return router


def _check_text(param: str, value: str) -> None:
    """Raises InvalidRequest for what no path and no header can hold."""
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidRequest(f"{param} holds half of a surrogate pair; send complete characters", param) from None
    if "\0" in value:
        raise InvalidRequest(f"{param} holds a NUL character, got {value!r:.80}", param)
