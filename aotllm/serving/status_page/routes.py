"""`GET /`, its files, and `GET /status.json`, from which the page draws."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from starlette.responses import Response

import aotllm
from aotllm.serving.context import ServingContext
from aotllm.serving.router import Query, Router
from aotllm.serving.status_page.history import MINUTES, WINDOW, StatusHistory
from aotllm.serving.status_page.snapshot import Snapshot
from aotllm.serving.telemetry.engine_metrics import EngineReading
from aotllm.serving.telemetry.metrics import MetricsExporter

_STATIC = Path(__file__).parent / "static"
_FILES = {
    "index.html": "text/html; charset=utf-8",
    "style.css": "text/css; charset=utf-8",
    "status.js": "text/javascript; charset=utf-8",
    "charts.js": "text/javascript; charset=utf-8",
    "chat.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
}
_HEADERS = {
    # Nothing from elsewhere, nothing inline: what a model writes cannot become code.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def status_routes(context: ServingContext, clock: Callable[[], float] = time.time) -> Router:
    """Open to everybody: figures and names of models, no texts. The chat calls /v1 like any client, with a key where
    one is needed.

    Args:
        context: of the server.
        clock: the time of day, or another one for tests.
    """
    router, figures = Router(in_schema=False), Router()
    status = _Status(context, clock)
    contents = {name: (_STATIC / name).read_bytes() for name in _FILES}

    def file(name: str) -> Response:
        return Response(contents[name], media_type=_FILES[name], headers=_HEADERS)

    @router.get("/")
    async def get_page() -> Response:
        return file("index.html")

    @router.get("/status/{name}")
    async def get_file(name: str) -> Response:
        return file(name) if name in contents else Response(status_code=404, headers=_HEADERS)

    @figures.get(
        "/status.json", queries=(Query("since", float, 0.0, "Points later than that, in seconds since 1970."),)
    )
    async def get_status(since: float) -> dict[str, Any]:
        return await status.answer(since)

    router.routes += figures.routes
    return router


class _Status:
    def __init__(self, context: ServingContext, clock: Callable[[], float]) -> None:
        self._context = context
        self._clock = clock
        self._exporter = MetricsExporter(context)
        self._history = StatusHistory()
        self._readings: list[EngineReading] = []
        self._reading = asyncio.Lock()

    async def answer(self, since: float) -> dict[str, Any]:
        """The body of /status.json."""
        # One page after the other, so that a crowd of them costs one reading a second.
        async with self._reading:
            if self._history.due(self._clock()):
                self._readings, families = await self._exporter.read()
                self._history.add(Snapshot.of(families, self._clock()))
        return {
            "version": aotllm.__version__,
            "time": self._clock(),
            "state": "draining" if self._context.draining else "ready" if self._context.ready else "not ready",
            "needs_key": bool(self._context.options.api_key),
            "minutes": MINUTES,
            "window_seconds": WINDOW,
            "models": self._models(),
            "points": self._history.points(since),
        }

    def _models(self) -> list[dict[str, Any]]:
        readings = {reading.name: reading for reading in self._readings}
        models = []
        for entry in self._context.repository.entries():
            reading = readings.get(entry.name)
            model: dict[str, Any] = {"name": entry.name, "state": entry.state, "reason": entry.reason}
            if reading is not None and reading.stats is not None:
                model |= {
                    "alive": reading.alive,
                    "running": reading.stats.running,
                    "waiting": reading.stats.queued,
                    "kv_usage": reading.stats.kv_usage,
                    "max_model_len": reading.engine.max_seq_len,
                    "adapters": list(reading.engine.lora_names),
                }
            models.append(model)
        return models
