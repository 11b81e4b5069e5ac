"""A machine without AVX2, by emulation: a sentence and an exit code, not SIGILL."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from aotllm import _runtime

QEMU = shutil.which("qemu-x86_64")
PROGRAM = """
import sys
sys.path[:0] = {paths!r}
from aotllm.errors import EngineIncompatible
from aotllm import _runtime
try:
    print("runs", _runtime.cpu_isa())
except EngineIncompatible as error:
    print("refused:", error)
"""


@pytest.mark.skipif(QEMU is None, reason="needs qemu-x86_64 (apt-get install qemu-user)")
def test_no_avx2_is_a_sentence() -> None:
    # The loader of an editable install is left out: under emulation each import counts.
    program = PROGRAM.format(paths=[p for p in sys.path if p and Path(p).is_dir()])
    done = subprocess.run(
        [str(QEMU), "-cpu", "Nehalem", sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "refused: The cpu target and FP8 builds need a CPU and an operating system with AVX2" in done.stdout
    assert _runtime.cpu_isa() in ("avx2", "avx512", "avx512_vnni", "avx512_bf16", "amx")  # and this one has it
