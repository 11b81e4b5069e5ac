"""Reading JSON files of a checkpoint: bounded, strict about duplicate keys, errors that name the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from aotllm.errors import CheckpointError

MAX_JSON_BYTES = 32 << 20
"""Bound on a JSON text (a config, an index, a safetensors header). 32 MiB of safetensors header describe 300 000
tensors; the bound keeps the memory that a hostile file can claim in the hundreds of megabytes."""


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key '{twice}' appears twice")
    return result


def parse_json_object(text: bytes, source: str) -> dict[str, Any]:
    """The JSON object in `text` (UTF-8). Raises CheckpointError that starts with `source`."""
    if len(text) > MAX_JSON_BYTES:
        raise CheckpointError(f"{source}: {len(text)} bytes of JSON; at most {MAX_JSON_BYTES} are read")
    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=_unique_keys)
    except RecursionError:
        raise CheckpointError(f"{source}: not valid JSON (nested too deeply)") from None
    except ValueError as error:  # includes JSONDecodeError and UnicodeDecodeError
        raise CheckpointError(f"{source}: not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{source}: expected a JSON object, got {type(value).__name__}")
    return value


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object that the file holds. Raises CheckpointError."""
    try:
        if path.exists() and not path.is_file():  # opening a pipe would wait for its writer
            raise OSError("not a regular file")
        with path.open("rb") as file:
            text = file.read(MAX_JSON_BYTES + 1)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from error
    return parse_json_object(text, str(path))
