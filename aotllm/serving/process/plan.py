"""`ServePlan`: what the processes of a server are told when they start."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import Any

from aotllm.executor_config import ExecutorConfig
from aotllm.manager import ManagerFactory
from aotllm.serving.options import ServingOptions


@dataclass
class ServePlan:
    """Plain values, so that it can be handed to another process."""

    engines: dict[str, str]
    """Name → folder, in the order of the command line"""
    loras: dict[str, str] = field(default_factory=dict)
    """Adapters of the first engine: name → folder"""
    config: dict[str, Any] = field(default_factory=dict)
    """Fields of `ExecutorConfig`"""
    options: dict[str, Any] = field(default_factory=dict)
    """Fields of `ServingOptions`"""
    verify: bool = True
    host: str = "127.0.0.1"
    http_port: int = 8000
    """0 = any free one"""
    grpc_port: int | None = None
    """0 = any free one; None = no gRPC"""
    grpc_address: str | None = None
    """`host:port`, once the supervisor has reserved it"""
    metrics_port: int | None = None
    """0 = any free one; None = no port of their own"""
    frontends: int = 1
    """Processes that speak to clients; 0 = all in one process"""
    drain_timeout: float = 30.0
    """Seconds that SIGTERM leaves to requests in flight"""
    socket_path: str = ""
    """Unix socket of the engine process"""
    manager_factory: str = ""
    """`module:name` of a `ManagerFactory`, or of a class of such, in place of the compiled one"""

    def check(self) -> None:
        """Raises InvalidRequest for a value out of range, AotllmError where tracing is asked for and not installed,
        before anything is started."""
        self.executor_config()
        endpoint = self.serving_options().otlp_endpoint
        if endpoint is not None:
            from aotllm.serving.telemetry.tracing import traces_url

            traces_url(endpoint)

    def executor_config(self) -> ExecutorConfig:
        """Raises InvalidRequest."""
        return ExecutorConfig(**self.config)

    def serving_options(self) -> ServingOptions:
        """Raises InvalidRequest."""
        return ServingOptions(**self.options)

    def factory(self) -> ManagerFactory | None:
        """What makes the in-flight-batching loops."""
        if not self.manager_factory:
            return None
        module, _, name = self.manager_factory.partition(":")
        factory = getattr(importlib.import_module(module), name)
        made: ManagerFactory = factory() if isinstance(factory, type) else factory
        return made
