"""The package in its installed layout, as a tree of links: for tools that must see sources, not an install.

`builder/` and `engines/` are `aotllm.builder` and `aotllm.engines` (pyproject.toml, `wheel.packages`).
"""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def lay_package_tree() -> Path:
    """Makes or refreshes the tree; returns the folder that holds `aotllm`."""
    tree = ROOT / ".cache" / "package"
    package = tree / "aotllm"
    package.mkdir(parents=True, exist_ok=True)
    for entry in (ROOT / "aotllm").iterdir():
        if entry.name not in ("builder", "engines", "__pycache__"):
            _link(entry, package / entry.name)
    _link(ROOT / "builder", package / "builder")
    _link(ROOT / "engines", package / "engines")
    return tree


def _link(target: Path, name: Path) -> None:
    """Links; at no time is there nothing by that name, since others may be reading the tree."""
    fresh = name.with_name(f".{name.name}.{os.getpid()}")
    fresh.symlink_to(os.path.relpath(target, name.parent))
    fresh.replace(name)
