"""Declaring a parameter once: default, range and meaning, from which docs, HTTP models and CLI flags are made."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from aotllm.errors import InvalidRequest

_SPEC = "aotllm.parameter"

T = TypeVar("T")


@dataclass(frozen=True)
class ParameterSpec:
    """What is allowed for one parameter, and what it means."""

    doc: str
    """One sentence: meaning, unit, and the value that turns it off"""
    kind: type
    """bool | int | float | str: type of the value, or of one element where `many`"""
    low: float | None = None
    """Smallest allowed value"""
    low_open: bool = False
    """`low` itself is not allowed"""
    high: float | None = None
    """Largest allowed value"""
    many: bool = False
    """A list; a single element is accepted as a list of one"""
    max_items: int | None = None
    optional: bool = False
    """None is allowed"""

    @property
    def allowed(self) -> str:
        """The range in words, for messages and help texts: `an integer ≥ 1`."""
        noun = {bool: "a boolean", int: "an integer", float: "a number", str: "a string"}[self.kind]
        bounds = []
        if self.low is not None:
            bounds.append(f"{'>' if self.low_open else '≥'} {self.low:g}")
        if self.high is not None:
            bounds.append(f"≤ {self.high:g}")
        text = " ".join([noun, " and ".join(bounds)]).strip()
        return f"a list of at most {self.max_items} elements, each {text}" if self.many else text

    def check(self, name: str, value: Any) -> Any:
        """`value` in normal form (ints become floats where a number is due, lists tuples).

        Raises:
            InvalidRequest: wrong type or out of range; `param` is `name`.
        """
        if value is None:
            if self.optional:
                return None
            raise self._refuse(name, value)
        if not self.many:
            return self._check_one(name, value)
        elements = [value] if isinstance(value, (str, int)) else list(value)
        if self.max_items is not None and len(elements) > self.max_items:
            raise InvalidRequest(f"{name} has {len(elements)} elements; at most {self.max_items} are allowed", name)
        return tuple(self._check_one(name, element) for element in elements)

    def _check_one(self, name: str, value: Any) -> Any:
        if self.kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        kind: Any = self.kind
        if not isinstance(value, kind) or (isinstance(value, bool) and self.kind is not bool):
            raise self._refuse(name, value)
        if self.kind is str and not value:
            raise InvalidRequest(f"{name} must not be an empty string", name)
        if isinstance(value, float) and not math.isfinite(value):
            raise self._refuse(name, value)
        if self.low is not None and (value < self.low or (self.low_open and value == self.low)):
            raise self._refuse(name, value)
        if self.high is not None and value > self.high:
            raise self._refuse(name, value)
        return value

    def _refuse(self, name: str, value: Any) -> InvalidRequest:
        return InvalidRequest(f"{name} must be {self.allowed}, got {value!r:.80}", name)


def parameter(default: T, spec: ParameterSpec) -> T:
    """A dataclass field that carries its `ParameterSpec`. Typed as its default, like `dataclasses.field`."""
    return dataclasses.field(default=default, metadata={_SPEC: spec})  # type: ignore[return-value, call-overload, no-any-return]


def parameters(cls: type) -> Iterator[tuple[str, Any, ParameterSpec]]:
    """Name, default and spec of each declared parameter of a dataclass, in order."""
    for field in dataclasses.fields(cls):
        if _SPEC in field.metadata:
            yield field.name, field.default, field.metadata[_SPEC]


def check_parameters(instance: Any) -> None:
    """Validate and normalize all declared parameters of a (frozen) dataclass instance; for `__post_init__`."""
    for name, _, spec in parameters(type(instance)):
        object.__setattr__(instance, name, spec.check(name, getattr(instance, name)))


def documented(cls: type[T]) -> type[T]:
    """Class decorator: append the declared parameters to the docstring."""
    lines = [f"    {name}: {spec.doc} Allowed: {spec.allowed}. Default: {d!r}." for name, d, spec in parameters(cls)]
    cls.__doc__ = "\n".join([(cls.__doc__ or "").rstrip(), "", "Attributes:", *lines])
    return cls
