"""The fixture of engine processes."""

from tests.aotllm.serving.process.engine_group import run  # noqa: F401
