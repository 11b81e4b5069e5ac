"""All tests of this folder need a CUDA device and a build with target cuda; elsewhere they are skipped."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import pytest

from aotllm import _runtime
from aotllm.engines import Engine
from tests.integration.engines import build_engine

HERE = Path(__file__).parent

# What the runtime sets for engines of several ranks; the driver reads it when it starts, which is below.
os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")


def missing() -> str | None:
    """What these tests lack here; None where they can run."""
    if not _runtime.has_cuda():
        return "aotllm was built without CUDA (AOTLLM_CUDA=1 pip install .)"
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "no NVIDIA driver"
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0 or count.value == 0:
        return "no CUDA device"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = [item for item in items if HERE in item.path.parents]
    reason = missing() if here else None
    for item in here:
        item.add_marker(pytest.mark.gpu)
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def smollm2_cpu(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """SmolLM2-135M-Instruct Q4_1 on the CPU."""
    return build_engine(smollm2_gguf, tmp_path_factory.mktemp("engines") / "cpu", max_seq_len=2048)


@pytest.fixture(scope="session")
def smollm2(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """The same weights in bf16 on the GPU."""
    output = tmp_path_factory.mktemp("engines") / "cuda"
    return build_engine(smollm2_gguf, output, max_seq_len=2048, target="cuda", max_num_tokens=1024)


@pytest.fixture(scope="session")
def smollm2_fp8(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """Its layers in FP8."""
    output = tmp_path_factory.mktemp("engines") / "fp8"
    return build_engine(smollm2_gguf, output, max_seq_len=2048, target="cuda", max_num_tokens=1024, quantize="fp8")


@pytest.fixture(scope="session")
def smollm2_fp8_cache(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """bf16 weights and an FP8 cache."""
    output = tmp_path_factory.mktemp("engines") / "fp8_cache"
    options = {"target": "cuda", "max_num_tokens": 1024, "kv_cache_dtype": "fp8"}
    return build_engine(smollm2_gguf, output, max_seq_len=2048, **options)
