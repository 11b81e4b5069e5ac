"""Engines that several integration tests share, built once per session."""

from __future__ import annotations

from pathlib import Path

import pytest

from aotllm.engines import Engine
from tests.integration.engines import build_engine
from tests.integration.stress import Models


@pytest.fixture(scope="session")
def smollm2(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """SmolLM2-135M-Instruct Q4_1."""
    return build_engine(smollm2_gguf, tmp_path_factory.mktemp("engines") / "smollm2", max_seq_len=2048)


@pytest.fixture(scope="session")
def smollm2_bf16_cache(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """SmolLM2-135M-Instruct Q4_1 with a bf16 KV cache."""
    output = tmp_path_factory.mktemp("engines") / "smollm2_bf16_cache"
    return build_engine(smollm2_gguf, output, max_seq_len=2048, kv_cache_dtype="bf16")


@pytest.fixture(scope="session")
def smollm2_int8(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """SmolLM2-135M-Instruct Q4_1 with an int8 KV cache."""
    output = tmp_path_factory.mktemp("engines") / "smollm2_int8"
    return build_engine(smollm2_gguf, output, max_seq_len=2048, kv_cache_dtype="int8")


@pytest.fixture(scope="session")
def gemma3(gemma3_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """Gemma-3-270M Q4_K_M; tests that use it are marked slow."""
    return build_engine(gemma3_gguf, tmp_path_factory.mktemp("engines") / "gemma3", max_seq_len=2048)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Tiny random models for the stress tests."""
    return Models(tmp_path_factory.mktemp("stress"))
