"""Whether something is a JSON schema at all. What its keywords mean, and which can be met, is the compiler's matter."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from aotllm.errors import InvalidRequest

MAX_DEPTH = 100

_TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
_SCHEMAS = ("items", "additionalProperties", "contains", "propertyNames", "not", "if", "then", "else")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_MAPPINGS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


def check_depth(value: Any, where: str, param: str) -> None:
    """Bound the nesting of any JSON value, so that whoever walks it later need not. Raises InvalidRequest."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [inner for outer in level for inner in _inside(outer)]
        if not level:
            return
    raise InvalidRequest(f"{where} is nested too deeply; at most {MAX_DEPTH} levels are allowed", param)


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, list) else ()


def check_schema(schema: Any, where: str, param: str) -> None:
    """Check the shape of a schema (draft 2020-12, and the forms of older ones) and of all that it contains.

    Args:
        schema: what a client sent, its nesting checked.
        where: its place in the request, for the message.
        param: the field, for the error.

    Raises:
        InvalidRequest: it is none.
    """
    if isinstance(schema, bool):
        return
    if not isinstance(schema, Mapping):
        raise InvalidRequest(f"{where} must be a JSON schema (an object or a boolean), got {schema!r:.60}", param)
    _check_type(schema, where, param)
    for name in ("enum", "required"):
        value = schema.get(name, [])
        if not isinstance(value, list) or (name == "required" and not all(isinstance(key, str) for key in value)):
            raise InvalidRequest(f"{where}.{name} must be a list{' of strings' * (name == 'required')}", param)
    if not isinstance(schema.get("$ref", ""), str):
        raise InvalidRequest(f"{where}.$ref must be a string", param)
    for name in _SCHEMAS:
        # `items` was a list before draft 2020-12.
        for inner in _elements(schema[name]) if name in schema else ():
            check_schema(inner, f"{where}.{name}", param)
    for name in _LISTS:
        if not isinstance(schema.get(name, []), list):
            raise InvalidRequest(f"{where}.{name} must be a list of schemas", param)
        for index, inner in enumerate(schema.get(name, [])):
            check_schema(inner, f"{where}.{name}[{index}]", param)
    for name in _MAPPINGS:
        if not isinstance(schema.get(name, {}), Mapping):
            raise InvalidRequest(f"{where}.{name} must be an object of schemas", param)
        for key, inner in schema.get(name, {}).items():
            check_schema(inner, f"{where}.{name}.{key}", param)


def _check_type(schema: Mapping[str, Any], where: str, param: str) -> None:
    for kind in _elements(schema.get("type", [])):
        if kind not in _TYPES:
            raise InvalidRequest(f"{where}.type must be one of {', '.join(_TYPES)}, got {kind!r:.60}", param)


def _elements(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else [value]
