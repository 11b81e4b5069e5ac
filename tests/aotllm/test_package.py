"""`import aotllm`: all public names, and nothing imported before it is used."""

from __future__ import annotations

import subprocess
import sys

import pytest

import aotllm


@pytest.mark.parametrize("name", aotllm.__all__)
def test_every_public_name_is_there(name: str):
    assert getattr(aotllm, name) is not None


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nope'"):
        _ = aotllm.nope


def test_importing_the_package_imports_nothing_else():
    program = "import sys, aotllm; print(sorted(name for name in sys.modules if name.startswith('aotllm')))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "['aotllm']\n"


HEAVY = (
    *("typer", "rich", "pydantic", "uvicorn", "grpc", "google.protobuf", "jinja2", "numpy", "asyncio"),
    *("onnx_ir", "gguf"),
)
"""What takes tens of milliseconds to import, each"""


@pytest.mark.parametrize(
    ("modules", "needed"),
    [
        ("aotllm.cli, aotllm.cli.run, aotllm.executor, aotllm.engines, aotllm.tokenization.compact_codec", set()),
        ("aotllm.cli, aotllm.cli.serve, aotllm.serving.process.supervisor", {"asyncio"}),
        ("aotllm.serving.process.engine_process, aotllm.tokenization.compact_codec", {"asyncio"}),
        ("aotllm.serving.process.front_end_process", {"asyncio", "uvicorn"}),
    ],
)
def test_a_process_imports_no_more_than_it_needs_to_start(modules: str, needed: set[str]):
    program = f"import sys, {modules}; print(*(name for name in {HEAVY} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert set(done.stdout.split()) == needed
