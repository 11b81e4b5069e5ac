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
