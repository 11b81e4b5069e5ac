"""Fixtures that several folders of tests share: the real models and engines built from them."""

from __future__ import annotations

from pathlib import Path

import pytest

from get_model import get_model


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct Q4_1 as GGUF (98 MB, fetched once)."""
    return get_model("smollm2")


@pytest.fixture(scope="session")
def gemma3_gguf() -> Path:
    """Gemma-3-270M Q4_K_M as GGUF (253 MB, fetched once); tests that use it are marked slow."""
    return get_model("gemma3")
