#!/usr/bin/env python3
"""Runs mypy over the package in its installed layout (`builder/` is `aotllm.builder`, …)."""

from __future__ import annotations

import os
import subprocess
import sys

from package_tree import ROOT, lay_package_tree


def main() -> int:
    """The exit code of mypy."""
    tree = lay_package_tree()
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), "-p", "aotllm"]
    return subprocess.run(command, cwd=tree, env={**os.environ, "MYPYPATH": str(tree)}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
