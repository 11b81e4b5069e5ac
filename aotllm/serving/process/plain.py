"""Objects of the runtime as plain values, and back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


def plain(value: Any) -> Any:
    """Numbers and texts as they are, lists of them, and the public attributes of any other object as a dict."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    names = [name for name in dir(value) if not name.startswith("_")]
    return {name: plain(item) for name in names if not callable(item := getattr(value, name))}


def namespace(value: Any) -> Any:
    """The inverse of `plain`: dicts become objects with attributes."""
    if isinstance(value, list):
        return [namespace(item) for item in value]
    if isinstance(value, dict):
        return SimpleNamespace(**{name: namespace(item) for name, item in value.items()})
    return value
