"""Routes for those who run the server: health, load and version."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.responses import Response

import aotllm
from aotllm.errors import AotllmError
from aotllm.request import Request
from aotllm.sampling_params import SamplingParams
from aotllm.serving.context import ServingContext
from aotllm.serving.engine import ServingEngine
from aotllm.serving.router import Query, Router

PROBE_SECONDS = 30.0
"""Longest that a probe waits for its token: behind a batch of long prompts it takes a while, too"""


def operations_routes(context: ServingContext) -> Router:
    """Open to everybody, whether or not there are API keys."""
    router = Router()
    probe = Probe(context)

    @router.get("/health", queries=(Query("deep", str, None, "Generate a token, too."),))
    async def get_health(deep: str | None) -> Response:
        if deep is not None and deep.lower() not in ("0", "false"):
            return Response(status_code=200 if await probe.generates() else 503)
        return Response(status_code=200 if context.alive else 503)

    @router.get("/health_generate")
    async def get_health_generate() -> Response:
        return Response(status_code=200 if await probe.generates() else 503)

    # SageMaker's name for it.
    @router.route("/ping", ("GET", "POST"))
    async def ping() -> Response:
        return Response(status_code=200 if context.alive else 503)

    @router.get("/load")
    async def get_load() -> dict[str, Any]:
        stats = [await engine.stats_async() for engine in context.repository.engines().values()]
        return {"server_load": sum(engine.running + engine.queued for engine in stats)}

    @router.get("/version")
    async def get_version() -> dict[str, str]:
        return {"version": aotllm.__version__}

    return router


class Probe:
    """Generates a token on every engine. Probes at the same time share one, so that they cannot load the server."""

    def __init__(self, context: ServingContext) -> None:
        self._context = context
        self._running: asyncio.Task[bool] | None = None

    async def generates(self) -> bool:
        """All engines make a token in time. False, too, when one of them is full."""
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(self._probe())
        return await asyncio.shield(self._running)

    async def _probe(self) -> bool:
        if not self._context.alive:
            return False
        engines = self._context.repository.engines().values()
        try:
            await asyncio.wait_for(asyncio.gather(*map(_generate, engines)), PROBE_SECONDS)
        except (AotllmError, asyncio.TimeoutError):
            return False
        return True


async def _generate(engine: ServingEngine) -> None:
    """Raises AotllmError. Reported to no telemetry: it is nobody's request."""
    sampling = SamplingParams(max_tokens=1, temperature=0.0)
    request = Request(prompt_token_ids=[0], sampling=sampling, priority=2**31 - 1, timeout=PROBE_SECONDS)
    result = await (await engine.submit_async(request))
    if not result.token_ids:
        raise AotllmError("no token came in time")
