"""`ToolUse`: which functions a request lets the model call, and whether it has to."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from aotllm.errors import InvalidRequest
from aotllm.serving.openai.tools.schema_check import check_depth, check_schema

MAX_TOOLS = 1024

_NAME = re.compile(r"[\w.:/-]{1,256}")
_CHOICES = "none, auto, required"

Json = Mapping[str, Any]


@dataclass(frozen=True)
class Function:
    """A function that the model may call."""

    name: str
    description: str
    parameters: Json
    """JSON schema of its arguments, an object"""

    def tool(self) -> dict[str, Any]:
        """As chat templates take it."""
        described = {"description": self.description} if self.description else {}
        return {"type": "function", "function": {"name": self.name, **described, "parameters": self.parameters}}


@dataclass(frozen=True)
class ToolUse:
    """The functions of a request that asks for calls. A request with `tool_choice` none has no `ToolUse`."""

    functions: tuple[Function, ...]
    """What the model is told of"""
    mode: Literal["auto", "required", "named"] = "auto"
    allowed: tuple[str, ...] = ()
    """Names that it may call: all, unless `tool_choice` says otherwise; exactly one where it is named"""
    parallel: bool = True
    """Several calls in one answer"""

    @property
    def callable_functions(self) -> tuple[Function, ...]:
        """Those of the functions that may be called."""
        return tuple(function for function in self.functions if function.name in self.allowed)


def tool_use(tools: Any, tool_choice: Any, parallel: bool | None) -> ToolUse | None:
    """What the fields of a request body mean; None = no calls.

    Raises:
        InvalidRequest: malformed or contradictory; names the field.
    """
    if tools is None:
        if tool_choice not in (None, "none"):
            raise InvalidRequest(
                f"tool_choice={tool_choice!r:.60} needs tools to choose from; send tools", "tool_choice"
            )
        return None
    functions = _functions(tools)
    names = tuple(function.name for function in functions)
    choice = "auto" if tool_choice is None else tool_choice
    if choice == "none":
        return None
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        choice, names = _allowed_tools(choice.get("allowed_tools"), names)
    several = parallel is not False
    if choice in ("auto", "required"):
        return ToolUse(functions, "required" if choice == "required" else "auto", names, several)
    name = _chosen_name(choice)
    if name not in names:
        raise InvalidRequest(
            f"tool_choice names {name!r:.80}, which is not among tools: {_listed(names)}", "tool_choice"
        )
    return ToolUse(functions, "named", (name,), several)


def _functions(tools: Any) -> tuple[Function, ...]:
    if not isinstance(tools, Sequence) or isinstance(tools, str) or not 1 <= len(tools) <= MAX_TOOLS:
        raise InvalidRequest(
            f"tools must be a list of 1 to {MAX_TOOLS} tools, got {tools!r:.60}; leave it out where there are none",
            "tools",
        )
    check_depth(tools, "tools", "tools")
    functions: dict[str, Function] = {}
    for index, tool in enumerate(tools):
        function = _function(tool, f"tools[{index}]")
        if function.name in functions:
            raise InvalidRequest(f"tools[{index}]: there are two functions {function.name!r}; rename one", "tools")
        functions[function.name] = function
    return tuple(functions.values())


def _function(tool: Any, where: str) -> Function:
    kind = tool.get("type", "function") if isinstance(tool, Mapping) else None
    described = tool.get("function") if kind == "function" else None
    if not isinstance(described, Mapping):
        raise InvalidRequest(
            f'{where} must be {{"type": "function", "function": {{"name": ..., "parameters": ...}}}}, got {tool!r:.80}',
            "tools",
        )
    name, description = described.get("name"), described.get("description")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidRequest(
            f"{where}.function.name must be 1 to 256 letters, digits and _ - . : /, got {name!r:.80}", "tools"
        )
    if description is not None and not isinstance(description, str):
        raise InvalidRequest(f"{where}.function.description must be a string, got {description!r:.60}", "tools")
    parameters = described.get("parameters")
    if parameters is None:  # of the API: a function without parameters
        parameters = {"type": "object", "properties": {}}
    check_schema(parameters, f"{where}.function.parameters", "tools")
    if not isinstance(parameters, Mapping) or parameters.get("type", "object") != "object":
        raise InvalidRequest(
            f"{where}.function.parameters must be a schema of an object, got {parameters!r:.80}", "tools"
        )
    return Function(name, description or "", parameters)


def _allowed_tools(allowed: Any, names: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
    """Mode and names of `{"mode": "auto", "tools": [{"type": "function", "function": {"name": …}}]}`."""
    mode = allowed.get("mode", "auto") if isinstance(allowed, Mapping) else None
    listed = allowed.get("tools") if isinstance(allowed, Mapping) else None
    if mode not in ("auto", "required") or not isinstance(listed, Sequence) or not listed:
        raise InvalidRequest(
            "tool_choice.allowed_tools needs a mode, auto or required, and a list of tools", "tool_choice"
        )
    chosen = [_chosen_name(tool) for tool in listed]
    unknown = [name for name in chosen if name not in names]
    if unknown:
        raise InvalidRequest(
            f"tool_choice allows {unknown[0]!r:.80}, which is not among tools: {_listed(names)}", "tool_choice"
        )
    return mode, tuple(name for name in names if name in chosen)


def _chosen_name(choice: Any) -> str:
    described = choice.get("function") if isinstance(choice, Mapping) and choice.get("type") == "function" else None
    name = described.get("name") if isinstance(described, Mapping) else None
    if not isinstance(name, str):
        raise InvalidRequest(
            f'tool_choice must be one of {_CHOICES}, or {{"type": "function", "function": {{"name": ...}}}}; '
            f"got {choice!r:.80}",
            "tool_choice",
        )
    return name


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:10])
    return shown if len(names) <= 10 else f"{shown}, …"
