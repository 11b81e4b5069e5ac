#!/usr/bin/env python3
"""Runs mypy over the package in its installed layout (`builder/` is `aotllm.builder`, …)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TREE = ROOT / ".cache" / "typecheck"


def link(target: Path, name: Path) -> None:
    """Makes `name` a symbolic link to `target`."""
    name.unlink(missing_ok=True)
    name.symlink_to(os.path.relpath(target, name.parent))


def main() -> int:
    """Lays a tree of links that has the installed layout, and checks it."""
    package = TREE / "aotllm"
    package.mkdir(parents=True, exist_ok=True)
    for entry in (ROOT / "aotllm").iterdir():
        if entry.name not in ("builder", "engines", "__pycache__"):
            link(entry, package / entry.name)
    link(ROOT / "builder", package / "builder")
    link(ROOT / "engines", package / "engines")
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), "-p", "aotllm"]
    return subprocess.run(command, cwd=TREE, env={**os.environ, "MYPYPATH": str(TREE)}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
