"""Engine bundles: the folder that a build writes and a runtime loads (`docs/engine_format.md`)."""

from aotllm.engines.bundle import Engine, open_engine
from aotllm.engines.manifest import SCHEMA_VERSION, Manifest

__all__ = ["SCHEMA_VERSION", "Engine", "Manifest", "open_engine"]
