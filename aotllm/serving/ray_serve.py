"""`run_ray`: replicas of a server on Ray Serve. What it consists of is in `aotllm.serving.ray`."""

from __future__ import annotations

from aotllm.serving.ray.options import RayOptions
from aotllm.serving.ray.run import run_ray

__all__ = ["RayOptions", "run_ray"]
