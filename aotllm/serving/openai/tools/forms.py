"""The forms of answers that hold tool calls, as grammars that any model can be held to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from aotllm.errors import InvalidRequest
from aotllm.serving.openai.tools.definitions import Function, ToolUse
from aotllm.structured_outputs import StructuredOutputs

_COMPOSED = ("$ref", "allOf", "anyOf", "oneOf", "if", "patternProperties", "unevaluatedProperties")


def tool_form(use: ToolUse, answer: StructuredOutputs | None) -> StructuredOutputs | None:
    """What the answer is to look like; None = the model writes freely, and a parser looks for calls.

    * A named function: the JSON object of its arguments.
    * `required`: an array of `{"name": …, "parameters": …}`.
    * `auto` with a form for the text: either that, or such an object.

    Args:
        use: the functions, and whether one has to be called.
        answer: the form of answers that are no calls. Where a call is required there are none.

    Raises:
        InvalidRequest: a schema cannot be met, or the answer has a form that cannot be told from calls.
    """
    functions = use.callable_functions
    if use.mode == "named":
        return StructuredOutputs(json=arguments_schema(functions[0]), param="tools")
    if use.mode == "required":
        start = 'start: "[" call (", " call)* "]"' if use.parallel else 'start: "[" call "]"'
        return _grammar([start, *_call_rules(functions)])
    if answer is None:
        return None
    grammar = answer.to_grammar()
    if grammar.kind != "json_schema":
        raise InvalidRequest(
            f"{answer.param} goes with tools only where it asks for JSON; leave one of them out, or set tool_choice to "
            "none",
            answer.param,
        )
    start = 'start: answer | call ("\\n" call)*' if use.parallel else "start: answer | call"
    return _grammar([start, f"answer: %json {grammar.text}", *_call_rules(functions)])


def arguments_schema(function: Function) -> Mapping[str, Any]:
    """Schema of a function's arguments. Where it does not say whether there may be other ones than those it lists,
    there are none: no function takes arguments that it does not know."""
    schema = {"type": "object", **function.parameters}
    if not any(name in schema for name in _COMPOSED):
        schema.setdefault("additionalProperties", False)
    return schema


def _call_rules(functions: Sequence[Function]) -> list[str]:
    rules = ["call: " + " | ".join(f"call_{index}" for index in range(len(functions)))]
    for index, function in enumerate(functions):
        schema = StructuredOutputs(json=_call_schema(function), param="tools").to_grammar().text
        rules.append(f"call_{index}: %json {schema}")
    return rules


def _call_schema(function: Function) -> Mapping[str, Any]:
    parameters = _moved(arguments_schema(function), "#/properties/parameters")
    parameters.pop("$id", None)  # references are to be relative to the whole
    return {
        "type": "object",
        "properties": {"name": {"const": function.name}, "parameters": parameters},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


def _moved(schema: Any, root: str) -> Any:
    """A schema whose references still hold when it stands at `root` of another one."""
    if isinstance(schema, Mapping):
        moved = {key: _moved(value, root) for key, value in schema.items()}
        reference = moved.get("$ref")
        if isinstance(reference, str) and reference.startswith("#"):
            moved["$ref"] = root + reference[1:]
        return moved
    return [_moved(value, root) for value in schema] if isinstance(schema, list) else schema


def _grammar(rules: Sequence[str]) -> StructuredOutputs:
    return StructuredOutputs(grammar="\n".join(rules) + "\n", param="tools")
