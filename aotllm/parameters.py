"""Declaring a parameter once: default, range and meaning, from which docs, HTTP models and CLI flags are made."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from aotllm.errors import InvalidRequest

_SPEC = "aotllm.parameter"
_DIGITS = re.compile(r"[0-9]{1,20}")
_HUGE = 10**300  # integers beyond have no float

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
    key: ParameterSpec | None = None
    """A mapping from such keys to such values; JSON's string keys are accepted for ints"""
    min_items: int = 0
    """Of a list"""
    max_items: int | None = None
    """Of a list or mapping"""
    optional: bool = False
    """None is allowed"""
    choices: tuple[str, ...] | None = None
    """The strings that are allowed; None = any but an empty one"""

    @property
    def allowed(self) -> str:
        """The range in words, for messages and help texts: `an integer ≥ 1`."""
        noun = {bool: "a boolean", int: "an integer", float: "a number", str: "a string"}[self.kind]
        if self.choices is not None:
            noun = "one of " + ", ".join(self.choices)
        bounds = []
        if self.low is not None:
            bounds.append(f"{'>' if self.low_open else '≥'} {self.low:g}")
        if self.high is not None:
            bounds.append(f"≤ {self.high:g}")
        text = " ".join([noun, " and ".join(bounds)]).strip()
        if self.key is not None:
            return f"a mapping of at most {self.max_items} entries, each from {self.key.allowed} to {text}"
        if self.many:
            count = f"{self.min_items} to {self.max_items}" if self.min_items else f"at most {self.max_items}"
            return f"a list of {count} elements, each {text}"
        return text

    def check(self, name: str, value: Any) -> Any:
        """`value` in normal form: ints become floats where a number is due, lists tuples, mappings tuples of pairs in
        the order of their keys.

        Raises:
            InvalidRequest: wrong type or out of range; `param` is `name`.
        """
        if value is None:
            if self.optional:
                return None
            raise self._refuse(name, value)
        if self.key is not None:
            return self._check_mapping(name, value, self.key)
        if not self.many:
            return self._check_one(name, value)
        try:
            elements = [value] if isinstance(value, (str, int)) else list(value)
        except TypeError:
            raise self._refuse(name, value) from None
        self._check_count(name, len(elements))
        return tuple(self._check_one(name, element) for element in elements)

    def _check_mapping(self, name: str, value: Any, key_spec: ParameterSpec) -> tuple[tuple[Any, Any], ...]:
        try:
            entries = dict(value or ())  # of pairs, too: the normal form
        except (TypeError, ValueError):
            raise self._refuse(name, value) from None
        self._check_count(name, len(entries))
        checked = {}
        for key, element in entries.items():
            if key_spec.kind is int and isinstance(key, str) and _DIGITS.fullmatch(key):
                key = int(key)
            try:
                checked[key_spec._check_one(name, key)] = self._check_one(name, element)
            except InvalidRequest:
                raise self._refuse(name, {key: element}) from None
        return tuple(sorted(checked.items()))

    def _check_count(self, name: str, count: int) -> None:
        if count < self.min_items:
            raise InvalidRequest(f"{name} has {count} elements; at least {self.min_items} is needed", name)
        if self.max_items is not None and count > self.max_items:
            raise InvalidRequest(f"{name} has {count} elements; at most {self.max_items} are allowed", name)

    def _check_one(self, name: str, value: Any) -> Any:
        if self.kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value) if abs(value) < _HUGE else math.inf
        kind: Any = self.kind
        if not isinstance(value, kind) or (isinstance(value, bool) and self.kind is not bool):
            raise self._refuse(name, value)
        if self.kind is str and not value:
            raise InvalidRequest(f"{name} must not be an empty string", name)
        if self.kind is str and not _is_text(value):
            raise InvalidRequest(f"{name} holds half of a surrogate pair; send complete characters", name)
        if self.choices is not None and value not in self.choices:
            raise self._refuse(name, value)
        if isinstance(value, float) and not math.isfinite(value):
            raise self._refuse(name, value)
        if self.low is not None and (value < self.low or (self.low_open and value == self.low)):
            raise self._refuse(name, value)
        if self.high is not None and value > self.high:
            raise self._refuse(name, value)
        return value

    def _refuse(self, name: str, value: Any) -> InvalidRequest:
        return InvalidRequest(f"{name} must be {self.allowed}, got {value!r:.80}", name)


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


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
