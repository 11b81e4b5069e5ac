"""`aotllm serve`: OpenAI over HTTP, KServe over gRPC and HTTP, metrics."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from aotllm.cli.console import note, print_json
from aotllm.cli.flags import schema_flags, with_options
from aotllm.cli.lora_flag import LORA_OPTION, parse_loras
from aotllm.cli.memory_table import memory_table
from aotllm.cli.options import Argument, Option
from aotllm.errors import InvalidRequest
from aotllm.executor_config import ExecutorConfig
from aotllm.serving.options import ServingOptions
from aotllm.serving.ray.options import RayOptions

if TYPE_CHECKING:
    from aotllm.kv_memory import KvMemory
    from aotllm.serving.process.plan import ServePlan

    Announcement = Callable[[Mapping[str, str], Mapping[str, KvMemory]], None]

_API_KEY_VARIABLE = "AOTLLM_API_KEY"
_OFF = -1
"""Port that means none"""


@with_options([*schema_flags(ServingOptions), *schema_flags(ExecutorConfig), *schema_flags(RayOptions)])
def serve(
    engines: Annotated[list[Path], Argument(help="Folders of the engines.", metavar="ENGINE_DIR...")],
    host: Annotated[str, Option(("--host",), help="Address to listen on.")] = "127.0.0.1",
    http_port: Annotated[int, Option(("--http-port",), help="Port; 0 = any free one.", low=0, high=65535)] = 8000,
    grpc_port: Annotated[
        int, Option(("--grpc-port",), help="Port of KServe's gRPC; 0 = any free one, -1 = none.", low=-1, high=65535)
    ] = 8001,
    metrics_port: Annotated[
        int,
        Option(
            ("--metrics-port",),
            help="Port for /metrics, which the HTTP port has, too; 0 = any free one, -1 = none.",
            low=-1,
            high=65535,
        ),
    ] = 8002,
    frontends: Annotated[
        int,
        Option(
            ("--frontends",),
            help="Processes that speak to clients, beside the one that runs the engines; 0 = all in one process.",
            low=0,
            high=256,
        ),
    ] = 1,
    served_model_name: Annotated[
        list[str] | None,
        Option(("--served-model-name",), help="Name in the API, one per engine; default: the folder's name."),
    ] = None,
    lora: Annotated[list[str] | None, LORA_OPTION] = None,
    ray: Annotated[
        bool, Option(("--ray",), help="Deploy replicas on Ray Serve, for HTTP; requests go where their prefix is.")
    ] = False,
    drain_timeout: Annotated[
        float, Option(("--drain-timeout",), help="Seconds that SIGTERM leaves to requests in flight.", low=0)
    ] = 30.0,
    verify: Annotated[
        bool, Option(("--verify/--no-verify",), help="Check the engines' digests where files are new or have changed.")
    ] = True,
    manager_factory: Annotated[
        str, Option(("--manager-factory",), help="module:name; for load tests without a model.", hidden=True)
    ] = "",
    json: Annotated[bool, Option(("--json",), help="Print one JSON object when ready.")] = False,
    **options: Any,
) -> None:
    """Serve engines: OpenAI's API over HTTP, KServe's (Triton's) over gRPC and HTTP, Prometheus metrics.

    `Authorization: Bearer KEY` is asked for with --api-key, or with the variable AOTLLM_API_KEY.
    """
    names = _model_names(engines, served_model_name or [])
    loras = parse_loras(lora or [], taken=names)
    if loras and len(names) > 1:
        raise InvalidRequest(f"--lora needs to know its model: serve one engine, got {len(names)}", "lora")
    if not options.get("api_key") and (key := os.environ.get(_API_KEY_VARIABLE)):
        options["api_key"] = [key]
    options = {name: value for name, value in options.items() if value is not None}
    config, serving, replicas = (_only(options, cls) for cls in (ExecutorConfig, ServingOptions, RayOptions))

    from aotllm.serving import check_installed
    from aotllm.serving.process.plan import ServePlan

    check_installed()

    plan = ServePlan(
        engines={name: str(engine) for name, engine in zip(names, engines, strict=True)},
        loras={name: str(folder) for name, folder in loras.items()},
        config=config,
        options=serving,
        verify=verify,
        host=host,
        http_port=http_port,
        grpc_port=None if grpc_port == _OFF else grpc_port,
        metrics_port=None if metrics_port == _OFF else metrics_port,
        frontends=frontends,
        drain_timeout=drain_timeout,
        manager_factory=manager_factory,
    )
    plan.check()
    if ray:
        _serve_on_ray(plan, RayOptions(**replicas), json)
    elif frontends == 0:
        _serve_in_this_process(plan, json)
    else:
        from aotllm.serving.process.supervisor import supervise

        supervise(plan, _announcement(plan, json))


def _serve_in_this_process(plan: ServePlan, json: bool) -> None:
    from aotllm.executor import Executor
    from aotllm.serving import run_server
    from aotllm.serving.context import ServingContext
    from aotllm.serving.repository import LocalRepository
    from aotllm.serving.telemetry.request_log import configure_logging
    from aotllm.serving.telemetry.serving_telemetry import ServingTelemetry

    config, options, factory = plan.executor_config(), plan.serving_options(), plan.factory()

    def make(name: str) -> Executor:
        return Executor(plan.engines[name], config, verify=plan.verify, manager_factory=factory)

    configure_logging(options.log_level)
    with ExitStack() as stack:
        executors = {name: stack.enter_context(make(name)) for name in plan.engines}
        for name, folder in plan.loras.items():
            executors[next(iter(executors))].load_lora(name, folder)
        announce = _announcement(plan, json)
        repository = LocalRepository(executors, make)
        stack.callback(repository.close)
        context = ServingContext(repository, options, ServingTelemetry(options))
        stack.callback(context.telemetry.close)
        run_server(
            context,
            plan.host,
            plan.http_port,
            plan.drain_timeout,
            lambda addresses: announce(addresses, {name: e.memory() for name, e in executors.items()}),
            grpc_port=plan.grpc_port,
            metrics_port=plan.metrics_port,
        )


def _serve_on_ray(plan: ServePlan, replicas: RayOptions, json: bool) -> None:
    from aotllm.serving.ray.run import run_ray

    announce = _announcement(plan, json)
    run_ray(
        {name: Path(folder) for name, folder in plan.engines.items()},
        plan.executor_config(),
        plan.serving_options(),
        replicas,
        host=plan.host,
        port=plan.http_port,
        drain_timeout=plan.drain_timeout,
        ready=lambda url: announce({"http": url.removeprefix("http://")}, {}),
        loras={name: Path(folder) for name, folder in plan.loras.items()},
        verify=plan.verify,
    )


def _only(options: Mapping[str, Any], cls: type) -> dict[str, Any]:
    """The options that are fields of a dataclass."""
    names = {f.name for f in fields(cls)}
    return {name: value for name, value in options.items() if name in names}


def _announcement(plan: ServePlan, json: bool) -> Announcement:
    """Tells that the server takes requests, where, and what its memory buys."""

    def ready(addresses: Mapping[str, str], memory: Mapping[str, KvMemory]) -> None:
        scheme = "https" if plan.options.get("ssl_certfile") else "http"
        places = {"url": f"{scheme}://{addresses['http']}"}
        if "grpc" in addresses:
            places["grpc"] = addresses["grpc"]
        if "metrics" in addresses:
            places["metrics"] = f"{scheme}://{addresses['metrics']}/metrics"
        models = [*plan.engines, *plan.loras]
        if json:
            print_json({**places, "models": models, "kv_memory": {name: asdict(m) for name, m in memory.items()}})
            return
        for name, bought in memory.items():
            note(f"{name}: {memory_table(bought)}")
        others = "".join(f", {name} on {place}" for name, place in list(places.items())[1:])
        note(f"serving {', '.join(models)} on {places['url']}{others}")

    return ready


def _model_names(engines: list[Path], given: list[str]) -> list[str]:
    if given and len(given) != len(engines):
        raise InvalidRequest(
            f"--served-model-name was given {len(given)} times for {len(engines)} engines; give one per engine",
            "served_model_name",
        )
    names = given or [engine.resolve().name for engine in engines]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise InvalidRequest(
            f"several engines are named {twice.pop()!r}; tell them apart with --served-model-name", "served_model_name"
        )
    return names
