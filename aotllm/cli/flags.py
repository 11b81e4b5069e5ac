"""Command-line flags made from the schemas that declare the parameters."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
from collections.abc import Callable, Sequence
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from aotllm.cli.options import Argument, Option
from aotllm.parameters import ParameterSpec, parameters


def flag(name: str, kind: Any, default: Any, text: str) -> inspect.Parameter:
    """A keyword parameter that is given as `--name`. A mapping is given entry by entry, as KEY=VALUE."""
    dashed = name.replace("_", "-")
    option = Option((f"--{dashed}",), text)
    if kind is dict:
        kind = list[Any]
        option = Option((f"--{dashed}",), text, metavar="KEY=VALUE", parser=_key_and_value)
    elif kind is bool:
        # What is on unless told otherwise, and what may be either, needs a flag for off.
        option = Option((f"--{dashed}" if default is False else f"--{dashed}/--no-{dashed}",), text)
    annotation = kind if default is not None and default != () else kind | None
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None if default == () else default,
        annotation=Annotated[annotation, option],
    )


def schema_flags(cls: type, *, unset: bool = False, only: Sequence[str] | None = None) -> list[inspect.Parameter]:
    """Flags of a dataclass whose fields are `aotllm.parameters.parameter`.

    Args:
        cls: the dataclass.
        unset: let all default to None, so that "not given" can be told from a value.
        only: the fields that get a flag; None = all.
    """
    return [
        flag(name, _flag_type(spec), None if unset else default, spec.doc)
        for name, default, spec in parameters(cls)
        if only is None or name in only
    ]


def _flag_type(spec: ParameterSpec) -> Any:
    if spec.key is not None:
        return dict
    return list[spec.kind] if spec.many else spec.kind  # type: ignore[name-defined]


def _key_and_value(text: str) -> tuple[str, float]:
    key, _, value = text.partition("=")
    return key, float(value)  # a ValueError is wrong usage; the schema checks the rest


def dataclass_flags(cls: type) -> list[inspect.Parameter]:
    """Flags of a plain dataclass: the docstring under each field is its help text."""
    hints, docs = get_type_hints(cls), _field_docs(cls)
    flags = []
    for field in dataclasses.fields(cls):
        kinds = [kind for kind in get_args(hints[field.name]) if kind is not type(None)] or [hints[field.name]]
        flags.append(flag(field.name, kinds[0], field.default, docs.get(field.name, "")))
    return flags


def with_flags(flags: list[inspect.Parameter]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator for a verb that ends in `**options`: typer sees `flags` in their place."""

    def decorate(verb: Callable[..., Any]) -> Callable[..., Any]:
        return for_typer(with_options(flags)(verb))

    return decorate


def with_options(flags: list[inspect.Parameter]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator for a verb that ends in `**options` and declares all it takes as `Option` or `Argument`: `quick_parse`
    sees `flags` in their place, and so does typer after `for_typer`."""

    def decorate(verb: Callable[..., Any]) -> Callable[..., Any]:
        hints = get_type_hints(verb, include_extras=True)
        own = [
            p.replace(annotation=hints[p.name])
            for p in inspect.signature(verb).parameters.values()
            if p.kind is not inspect.Parameter.VAR_KEYWORD
        ]
        _take(verb, [*own, *flags])
        return verb

    return decorate


def for_typer(verb: Callable[..., Any]) -> Callable[..., Any]:
    """A verb whose `Option`s and `Argument`s have become typer's."""

    def run(*args: Any, **kwargs: Any) -> Any:
        return verb(*args, **kwargs)

    run.__name__, run.__doc__ = verb.__name__, verb.__doc__
    _take(run, [_for_typer(parameter) for parameter in inspect.signature(verb).parameters.values()])
    return run


def _for_typer(parameter: inspect.Parameter) -> inspect.Parameter:
    if get_origin(parameter.annotation) is not Annotated:
        return parameter
    kind, declaration = get_args(parameter.annotation)
    if not isinstance(declaration, (Option, Argument)):
        return parameter
    return parameter.replace(annotation=Annotated[kind, declaration.for_typer()])


def _take(verb: Callable[..., Any], parameters: list[inspect.Parameter]) -> None:
    verb.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    verb.__annotations__ = {p.name: p.annotation for p in parameters}


def _field_docs(cls: type) -> dict[str, str]:
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(body, ast.ClassDef)
    docs = {}
    for field, text in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
            docs[field.target.id] = " ".join(str(ast.literal_eval(text.value)).split())
    return docs
