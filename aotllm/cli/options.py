"""`Option` and `Argument`: what a verb takes, declared without typer, whose import alone takes 40 ms."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Option:
    """A flag with a value, or of a bool `--name` and `--no-name`. Used in `Annotated`, as typer's own."""

    names: tuple[str, ...]
    """As typer takes them: `-p`, `--prompt`; `--verify/--no-verify`"""
    help: str
    metavar: str | None = None
    low: int | None = None
    high: int | None = None
    hidden: bool = False
    parser: Callable[[str], Any] | None = None
    """Makes a value of a text; raises ValueError"""

    def for_typer(self) -> Any:
        """The same for typer."""
        import typer

        return typer.Option(
            *self.names,
            help=self.help,
            metavar=self.metavar,
            min=self.low,
            max=self.high,
            hidden=self.hidden,
            parser=self.parser,
        )


@dataclass(frozen=True)
class Argument:
    """A word without a flag."""

    help: str
    metavar: str

    def for_typer(self) -> Any:
        """The same for typer."""
        import typer

        return typer.Argument(help=self.help, metavar=self.metavar)
