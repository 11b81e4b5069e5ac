"""`MetricsExporter` and `GET /metrics`: everything that is measured, for Prometheus."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator

from prometheus_client import ProcessCollector, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.metrics_core import Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample
from starlette.applications import Starlette
from starlette.responses import Response

from aotllm.serving.context import ServingContext
from aotllm.serving.router import Router
from aotllm.serving.telemetry.engine_metrics import EngineReading, engine_families, read_engines
from aotllm.serving.telemetry.request_metrics import shared_folder
from aotllm.serving.telemetry.serving_telemetry import ServingTelemetry

_TRITON = "nv_"


class MetricsExporter:
    """Counts of requests are those of all front ends of the server, past and present; figures of engines are asked for
    each time. So every front end exposes the same."""

    def __init__(self, context: ServingContext) -> None:
        self._context = context
        telemetry = context.telemetry
        self._metrics = telemetry.metrics if isinstance(telemetry, ServingTelemetry) else None
        # Of several processes, the one that happens to answer says nothing of the server.
        self._process = None if shared_folder() else ProcessCollector(registry=None)

    async def read(self) -> tuple[list[EngineReading], list[Metric]]:
        """What engines say, and all metrics."""
        readings = await read_engines(self._context.repository)
        if self._metrics is not None:
            for reading in readings:
                self._metrics.of(reading.name)  # series that begin at 0: a rate sees the first request, too
        families = await asyncio.to_thread(self._counted)
        return readings, [*families, *engine_families(readings)]

    async def render(self) -> bytes:
        """In the text format of Prometheus, version 0.0.4."""
        _, families = await self.read()
        return await asyncio.to_thread(_render, families)

    def _counted(self) -> list[Metric]:
        families: list[Metric] = []
        if self._metrics is not None:
            registry: Collector = self._metrics.registry
            folder = shared_folder()
            if folder is not None:
                registry = MultiProcessCollector(None, folder)  # type: ignore[no-untyped-call]
            families += registry.collect()
        if self._process is not None:
            families += self._process.collect()
        return families


class _Families(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        """See `Collector.collect`."""
        yield from self._families


def _render(families: list[Metric]) -> bytes:
    own = [_without_created(family) for family in families if not family.name.startswith(_TRITON)]
    # Triton's counters have no `_total`, which the library adds to every counter's name.
    triton = [_unsuffixed(family) for family in families if family.name.startswith(_TRITON)]
    counters = {family.name for family in families if family.type == "counter"}
    text = generate_latest(_Families(triton)).decode()
    for name in counters:
        text = text.replace(f"# TYPE {name} untyped\n", f"# TYPE {name} counter\n")
    return generate_latest(_Families(own)) + text.encode()


def _without_created(family: Metric) -> Metric:
    """Times of creation, one per series, would double the size for nobody's use."""
    kept = Metric(family.name, family.documentation, family.type)
    kept.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
    return kept


def _unsuffixed(family: Metric) -> Metric:
    bare = Metric(family.name, family.documentation, "unknown" if family.type == "counter" else family.type)
    bare.samples = [
        Sample(sample.name.removesuffix("_total"), sample.labels, sample.value)
        for sample in family.samples
        if not sample.name.endswith("_created")
    ]
    return bare


def metrics_routes(context: ServingContext) -> Router:
    """`GET /metrics`, open to everybody who reaches the port."""
    router = Router()
    exporter = MetricsExporter(context)

    @router.get("/metrics")
    async def get_metrics() -> Response:
        return Response(await exporter.render(), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    return router


def create_metrics_app(context: ServingContext) -> Starlette:
    """An application that has `/metrics` only, for a port that only the operator reaches."""
    return Starlette(routes=metrics_routes(context).routes)
