"""`Fields`: typed access to named values of a checkpoint; its errors name the file, the field and what it wants."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NoReturn, TypeVar, overload

from aotllm.errors import CheckpointError

T = TypeVar("T")


class _Required:
    """Default of fields that must be there."""


REQUIRED = _Required()


class Fields:
    """The values of one JSON object or one GGUF header.

    A field that is absent or null yields the default; without a default it is an error. JSON is untyped, so each
    accessor checks what it got: `true` is no number, `"8"` is no integer.

    Args:
        source: the file, for messages.
        values: the fields by name.
        prefix: put before each name, in look-ups (`flat=True`, GGUF's `llama.`) or only in messages (`text_config.`).
    """

    def __init__(self, source: str, values: Mapping[str, Any], prefix: str = "", *, flat: bool = False) -> None:
        self.source = source
        self._values = values
        self._prefix = prefix
        self._lookup_prefix = prefix if flat else ""

    def __contains__(self, name: str) -> bool:
        return self.raw(name) is not None

    def raw(self, name: str) -> Any:
        """The value as it is; None where absent or null."""
        return self._values.get(self._lookup_prefix + name)

    def states(self, name: str) -> bool:
        """Whether the field is written at all, be it as null."""
        return self._lookup_prefix + name in self._values

    def _get(self, name: str, default: T | _Required, expected: str) -> Any:
        value = self.raw(name)
        if value is not None:
            return value
        if isinstance(default, _Required):
            raise CheckpointError(f"{self.source}: field '{self._prefix}{name}' is missing; expected {expected}")
        return default

    def fail(self, name: str, expected: str) -> NoReturn:
        """Raises CheckpointError for the value of `name`."""
        text = repr(self.raw(name))
        text = text if len(text) <= 80 else text[:77] + "..."
        raise CheckpointError(f"{self.source}: field '{self._prefix}{name}' is {text}; expected {expected}")

    @overload
    def integer(self, name: str, default: _Required = ..., *, minimum: int = ..., maximum: int = ...) -> int: ...
    @overload
    def integer(self, name: str, default: T, *, minimum: int = ..., maximum: int = ...) -> int | T: ...
    def integer(self, name: str, default: Any = REQUIRED, *, minimum: int = 1, maximum: int = 2**31 - 1) -> Any:
        """An integer from `minimum` to `maximum`."""
        expected = f"an integer from {minimum} to {maximum}"
        value = self._get(name, default, expected)
        if value is default:
            return value
        if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value <= maximum:
            self.fail(name, expected)
        return value

    @overload
    def number(self, name: str, default: _Required = ..., *, positive: bool = ...) -> float: ...
    @overload
    def number(self, name: str, default: T, *, positive: bool = ...) -> float | T: ...
    def number(self, name: str, default: Any = REQUIRED, *, positive: bool = True) -> Any:
        """A finite number, above zero where `positive`, else at least zero."""
        expected = "a finite number above zero" if positive else "a finite number of at least zero"
        value = self._get(name, default, expected)
        if value is default:
            return value
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            self.fail(name, expected)
        try:
            result = float(value)
        except OverflowError:
            self.fail(name, expected)
        if not math.isfinite(result) or result < 0 or (positive and result == 0):
            self.fail(name, expected)
        return result

    @overload
    def boolean(self, name: str, default: _Required = ...) -> bool: ...
    @overload
    def boolean(self, name: str, default: T) -> bool | T: ...
    def boolean(self, name: str, default: Any = REQUIRED) -> Any:
        """True or false."""
        value = self._get(name, default, "true or false")
        if value is not default and not isinstance(value, bool):
            self.fail(name, "true or false")
        return value

    @overload
    def string(self, name: str, default: _Required = ...) -> str: ...
    @overload
    def string(self, name: str, default: T) -> str | T: ...
    def string(self, name: str, default: Any = REQUIRED) -> Any:
        """A string."""
        value = self._get(name, default, "a string")
        if value is not default and not isinstance(value, str):
            self.fail(name, "a string")
        return value

    def numbers(self, name: str) -> tuple[float, ...] | None:
        """A list of finite numbers above zero, or None where absent."""
        value = self.raw(name)
        if value is None:
            return None
        expected = "a list of finite numbers above zero"
        if not isinstance(value, list) or not value:
            self.fail(name, expected)
        for item in value:
            if not isinstance(item, (int, float)) or isinstance(item, bool) or not 0 < item < math.inf:
                self.fail(name, expected)
        return tuple(float(item) for item in value)

    def token_ids(self, name: str) -> tuple[int, ...]:
        """One token id or a list of them; empty where absent. `validate` drops 2**32 - 1, GGUF's way to say none."""
        value = self.raw(name)
        if value is None:
            return ()
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i < 2**32 for i in ids):
            self.fail(name, "a token id or a list of token ids (integers of at least 0)")
        return tuple(ids)

    def child(self, name: str) -> Fields | None:
        """The object under `name`, or None where absent."""
        value = self.raw(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            self.fail(name, "an object")
        return Fields(self.source, value, f"{self._prefix}{name}.")
