"""What the verbs of `aotllm bench` share: options, progress, and where results go."""

from __future__ import annotations

import json as json_module
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from aotllm.cli.console import print_json
from aotllm.errors import InvalidRequest
from aotllm.parameters import parameters

T = TypeVar("T")


class HasJson(Protocol):
    """A point of a result."""

    def json(self) -> dict[str, Any]:
        """One object."""


def check_outputs(json: str | None, plot: str | None) -> None:
    """Before an hour of measuring: can its result be written?"""
    for name, file in (("--json", json), ("--plot", plot)):
        if file not in (None, "-") and not Path(str(file)).absolute().parent.is_dir():
            raise InvalidRequest(f"{name} {file}: there is no such folder", name.strip("-"))
    if plot is not None:
        from aotllm.bench.plot import check_plot

        check_plot(Path(plot))


def options_of(cls: type[T], options: dict[str, Any]) -> T:
    """The options of one class; those that were not given keep their defaults."""
    return cls(**{name: options[name] for name, _, _ in parameters(cls) if options.get(name) is not None})


class Progress:
    """A line on a terminal, rewritten once a second at most: the client shares its core with nobody for nothing."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._next = clock, 0.0
        self._shown = sys.stderr.isatty()

    def __call__(self, ended: int, of: int | None) -> None:
        """So many requests have ended."""
        if self._shown and (now := self._clock()) >= self._next:
            self._next = now + 1.0
            print(f"\r{ended}{f' of {of}' if of else ''} requests", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Take the line away."""
        if self._shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def write_json(points: Sequence[HasJson], where: str) -> None:
    """An object, or for a sweep a list of them; where: a file, or - for stdout."""
    value = points[0].json() if len(points) == 1 else [point.json() for point in points]
    if where == "-":
        print_json(value)
        return
    with open(where, "w", encoding="utf-8") as file:
        json_module.dump(value, file, ensure_ascii=False)
        file.write("\n")
