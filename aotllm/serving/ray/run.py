"""`run_ray`: `aotllm serve --ray`."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from aotllm.errors import AotllmError
from aotllm.executor import Executor
from aotllm.executor_config import ExecutorConfig
from aotllm.serving.options import ServingOptions
from aotllm.serving.ray.options import RayOptions

_APPLICATION = "aotllm"


def run_ray(
    engines: Mapping[str, Path],
    config: ExecutorConfig,
    serving: ServingOptions,
    options: RayOptions,
    *,
    host: str,
    port: int,
    drain_timeout: float,
    ready: Callable[[str], None],
    loras: Mapping[str, Path] | None = None,
    verify: bool = True,
) -> None:
    """Serve engines on Ray until SIGTERM or Ctrl-C; requests in flight then have `drain_timeout` seconds.

    Args:
        engines: model name -> folder, which all nodes of the cluster see under the same path.
        config: of each executor.
        serving, options: of the server, and of its replicas.
        host, port: of Ray's HTTP proxy.
        drain_timeout: seconds.
        ready: called with the URL when all is up.
        loras: adapter name -> folder, for the first engine.
        verify: check the engines' digests.

    Raises:
        AotllmError: Ray is not installed or cannot be reached, or an engine does not load.
        KeyboardInterrupt: it was Ctrl-C.
    """
    try:
        import ray
        from ray import serve
    except ImportError:
        raise AotllmError("--ray needs Ray, which is not installed; install it: pip install 'aotllm[ray]'") from None
    from aotllm.serving.ray.deployments import application

    folders = {name: folder.resolve() for name, folder in engines.items()}
    adapters = {name: folder.resolve() for name, folder in (loras or {}).items()}
    make = partial(open_executors, folders, config, adapters, verify)
    try:
        ray.init(address=options.ray_address, ignore_reinit_error=True, log_to_driver=True)
        serve.start(http_options={"host": host, "port": port})
        serve.run(application(make, serving, options, drain_timeout), name=_APPLICATION, route_prefix="/")
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise AotllmError(f"cannot serve on Ray: {error}") from error
    try:
        with _sigterm() as ended:
            ready(f"http://{host}:{port}")
            ended.wait()
    finally:
        serve.delete(_APPLICATION)
        serve.shutdown()


def open_executors(
    folders: Mapping[str, Path], config: ExecutorConfig, loras: Mapping[str, Path], verify: bool
) -> dict[str, Executor]:
    """The engines of one replica, in its process. Raises what `Executor` raises."""
    executors = {name: Executor(folder, config, verify=verify) for name, folder in folders.items()}
    for name, folder in loras.items():
        next(iter(executors.values())).load_lora(name, folder)
    return executors


@contextmanager
def _sigterm() -> Iterator[threading.Event]:
    ended = threading.Event()
    previous = signal.signal(signal.SIGTERM, lambda *_: ended.set())
    try:
        yield ended
    finally:
        signal.signal(signal.SIGTERM, previous)
