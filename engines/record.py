"""`Record`: dataclasses that JSON is read into, checked field by field.

The manifest of an engine is read each time one is loaded. Checking it takes a fraction of a millisecond here, and needs
no library whose import takes longer than mapping the weights.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

T = TypeVar("T", bound="Record")
_KINDS = {int: "an integer", str: "a string", bool: "true or false"}


class RecordError(ValueError):
    """What a field should be; `where` is its path."""

    def __init__(self, where: str, reason: str) -> None:
        super().__init__(f"{where}: {reason}")


@dataclasses.dataclass(frozen=True)
class Record:
    """Fields are int, str, bool, tuples and dictionaries of those, records, or one of these or None.

    An int whose name is in `POSITIVE` is above 0; a field whose name is in `OMITTED` is not stored while it is None.
    """

    POSITIVE: typing.ClassVar[frozenset[str]] = frozenset()
    OMITTED: typing.ClassVar[frozenset[str]] = frozenset()

    @classmethod
    def model_validate(cls: type[T], value: Any, where: str = "") -> T:
        """The record that a JSON object holds. Raises RecordError for fields that are missing, unknown or wrong."""
        if not isinstance(value, dict):
            raise RecordError(where or cls.__name__.lower(), f"expected an object, got {value!r:.40}")
        hints = _hints(cls)  # type: ignore[arg-type]  # mypy does not see that classes are hashable
        for name in value:
            if name not in hints:
                raise RecordError(_path(where, str(name)), "no such field is known")
        values = {}
        for field in dataclasses.fields(cls):
            path = _path(where, field.name)
            if field.name in value:
                values[field.name] = _read(hints[field.name], value[field.name], path)
                if field.name in cls.POSITIVE and values[field.name] <= 0:
                    raise RecordError(path, f"expected an integer above 0, got {values[field.name]}")
            elif field.default is dataclasses.MISSING:
                raise RecordError(path, "is missing")
        return cls(**values)

    def model_dump(self, mode: str = "json") -> dict[str, Any]:
        """The JSON object that `model_validate` reads. `mode`: json, with lists for tuples, or python."""
        record: dict[str, Any] = _plain(self, list if mode == "json" else tuple)
        return record

    def model_copy(self: T, update: dict[str, Any]) -> T:
        """The same with other values in some fields."""
        return dataclasses.replace(self, **update)


@functools.cache
def _hints(cls: type[Record]) -> dict[str, Any]:
    names = {field.name for field in dataclasses.fields(cls)}
    return {name: hint for name, hint in typing.get_type_hints(cls).items() if name in names}


def _path(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name


def _read(kind: Any, value: Any, where: str) -> Any:
    arguments = typing.get_args(kind)
    origin = typing.get_origin(kind)
    if origin is types.UnionType:
        return None if value is None else _read(arguments[0], value, where)
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise RecordError(where, f"expected a list, got {value!r:.40}")
        return tuple(_read(arguments[0], element, f"{where}.{i}") for i, element in enumerate(value))
    if origin is dict:
        if not isinstance(value, dict):
            raise RecordError(where, f"expected an object, got {value!r:.40}")
        return {key: _read(arguments[1], element, _path(where, key)) for key, element in value.items()}
    if issubclass(kind, Record):
        return kind.model_validate(value, where)
    if type(value) is not kind:
        raise RecordError(where, f"expected {_KINDS[kind]}, got {value!r:.40}")
    return value


def _plain(value: Any, sequence: Callable[[Iterable[Any]], Any]) -> Any:
    if isinstance(value, Record):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        stored = {name: part for name, part in fields.items() if part is not None or name not in value.OMITTED}
        return _plain(stored, sequence)
    if isinstance(value, dict):
        return {key: _plain(element, sequence) for key, element in value.items()}
    return sequence(_plain(element, sequence) for element in value) if isinstance(value, (list, tuple)) else value
