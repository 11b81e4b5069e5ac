"""What all verbs share: JSON on stdout, one-line errors on stderr, sizes for people."""

from __future__ import annotations

import json
import os
import sys
from typing import Any


def print_json(value: Any) -> None:
    """One JSON value on one line of stdout."""
    print(json.dumps(value, ensure_ascii=False), flush=True)


def error_line(message: str) -> None:
    """`error: message` on stderr, on a single line."""
    print("error:", " ".join(message.split()), file=sys.stderr)


def note(message: str = "") -> None:
    """A line for people on stderr."""
    print(message, file=sys.stderr, flush=True)


def silence_stdout() -> None:
    """After a broken pipe: keep the interpreter from failing again when it flushes stdout at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def size(count: int) -> str:
    """Bytes with a binary unit: `1.5 MiB`."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{count} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
