from __future__ import annotations

from tests.aotllm.conftest import start

__all__ = ["start"]
