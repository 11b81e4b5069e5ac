"""`quick_parse`: command lines that are plainly right, without typer.

Typer makes good messages and help, and takes 0.15 s to import and set up, half of what `aotllm run` may take to its
first token. So a verb whose flags are `Option`s is parsed here first; whatever is not plainly right, `--help` included,
goes to typer, which has the last word.
"""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args, get_origin

from aotllm.cli.options import Argument, Option

_INT = re.compile(r"-?[0-9]{1,15}")
_FLOAT = re.compile(r"-?[0-9]{1,15}(\.[0-9]{1,15})?(e-?[0-9]{1,2})?")


class _NotPlain(Exception):
    """For typer to say what is wrong, or to do."""


def quick_parse(verb: Callable[..., Any], words: Sequence[str]) -> dict[str, Any] | None:
    """The arguments with which typer would call a verb; None where typer has to look.

    Args:
        verb: a function of `flags.with_options`.
        words: those after the verb's name.
    """
    try:
        return _Parser(inspect.signature(verb).parameters.values()).parse(words)
    except (_NotPlain, ValueError):
        return None


class _Parser:
    def __init__(self, declared: Any) -> None:
        self._kinds: dict[str, Any] = {}
        self._flags: dict[str, tuple[str, Option, bool]] = {}
        self._arguments: list[str] = []
        self._defaults: dict[str, Any] = {}
        for parameter in declared:
            kind, declaration = get_args(parameter.annotation)
            self._kinds[parameter.name] = _without_none(kind)
            if parameter.default is not inspect.Parameter.empty:
                self._defaults[parameter.name] = parameter.default
            if isinstance(declaration, Argument):
                self._arguments.append(parameter.name)
                continue
            for name in declaration.names:
                on, _, off = name.partition("/")
                self._flags[on] = (parameter.name, declaration, True)
                if off:
                    self._flags[off] = (parameter.name, declaration, False)

    def parse(self, words: Sequence[str]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        free: list[str] = []
        rest = iter(words)
        for word in rest:
            if not word.startswith("-"):
                free.append(word)
                continue
            flag, equals, text = word.partition("=")
            if flag not in self._flags or (equals and not flag.startswith("--")):
                raise _NotPlain
            name, option, on = self._flags[flag]
            if self._kinds[name] is bool:
                if equals:
                    raise _NotPlain
                values[name] = on
                continue
            if not equals:
                text = next(rest, "-?")
                if text.startswith("-") and text != "-" and not _FLOAT.fullmatch(text):
                    raise _NotPlain  # most likely a flag, where the value was forgotten
            self._add(values, name, option, text)
        self._take(values, free)
        return {**self._defaults, **values}

    def _add(self, values: dict[str, Any], name: str, option: Option, text: str) -> None:
        kind = self._kinds[name]
        many = get_origin(kind) is list
        value = option.parser(text) if option.parser else _value(get_args(kind)[0] if many else kind, text)
        if (option.low is not None and value < option.low) or (option.high is not None and value > option.high):
            raise _NotPlain
        if many:
            values.setdefault(name, []).append(value)
        else:
            values[name] = value

    def _take(self, values: dict[str, Any], free: list[str]) -> None:
        for name in self._arguments:
            kind = self._kinds[name]
            if not free:
                raise _NotPlain
            if get_origin(kind) is list:
                values[name] = [_value(get_args(kind)[0], word) for word in free]
                free = []
            else:
                values[name] = _value(kind, free.pop(0))
        if free:
            raise _NotPlain


def _without_none(kind: Any) -> Any:
    if get_origin(kind) is types.UnionType:
        (kind,) = (each for each in get_args(kind) if each is not types.NoneType)
    return kind


def _value(kind: Any, text: str) -> Any:
    if kind is str:
        return text
    if kind is Path:
        return Path(text)
    if kind is int and _INT.fullmatch(text):
        return int(text)
    if kind is float and _FLOAT.fullmatch(text):
        return float(text)
    raise _NotPlain
