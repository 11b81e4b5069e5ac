"""The forms of an answer that a request body can ask for, as `StructuredOutputs`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, Field

from aotllm.errors import InvalidRequest
from aotllm.structured_outputs import StructuredOutputs

_GUIDED = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}
_KINDS = ("json", "json_object", "regex", "choice", "grammar")


class StructuredFields(BaseModel):
    """The fields of both endpoints: OpenAI's `response_format`, vLLM's `structured_outputs` and older `guided_*`."""

    # Any: StructuredOutputs checks them, so that all entrances give the same messages.
    response_format: Any = Field(None, description="text, json_object, or json_schema with its schema.")
    structured_outputs: Any = Field(None, description="One of json, json_object, regex, choice and grammar.")
    guided_json: Any = Field(None, description="A JSON schema.")
    guided_regex: Any = Field(None, description="A regular expression.")
    guided_choice: Any = Field(None, description="A list of answers to choose from.")
    guided_grammar: Any = Field(None, description="A Lark or GBNF grammar.")

    def form(self) -> StructuredOutputs | None:
        """What the answer is to look like; None = free text.

        Raises:
            InvalidRequest: unknown or contradictory; names the field.
        """
        forms = {
            "response_format": _response_format(self.response_format),
            "structured_outputs": _structured_outputs(self.structured_outputs),
        }
        for name, kind in _GUIDED.items():
            value = getattr(self, name)
            forms[name] = None if value is None else StructuredOutputs(**{kind: value}, param=name)
        given = {name: form for name, form in forms.items() if form is not None}
        if len(given) > 1:
            raise InvalidRequest(f"{' and '.join(given)} contradict each other; give one of them", list(given)[1])
        return next(iter(given.values()), None)


def _response_format(value: Any) -> StructuredOutputs | None:
    if value is None:
        return None
    kind = value.get("type") if isinstance(value, Mapping) else value
    if kind == "text":
        return None
    if kind == "json_object":
        schema = value.get("schema")
        form = {"json_object": True} if schema is None else {"json": schema}
        return StructuredOutputs(**form, param="response_format")
    if kind == "json_schema":
        described = value.get("json_schema")
        schema = described.get("schema") if isinstance(described, Mapping) else None
        if schema is None:
            raise InvalidRequest(
                'response_format needs a schema: {"type": "json_schema", "json_schema": {"name": ..., "schema": ...}}',
                "response_format",
            )
        return StructuredOutputs(json=schema, param="response_format")
    raise InvalidRequest(
        f"response_format.type must be text, json_object or json_schema, got {kind!r:.60}", "response_format"
    )


def _structured_outputs(value: Any) -> StructuredOutputs | None:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise InvalidRequest(f"structured_outputs must be an object, got {value!r:.60}", "structured_outputs")
    for name, option in value.items():
        if name not in _KINDS and option is not None and option is not False:
            raise InvalidRequest(
                f"structured_outputs.{name} is not supported; supported are {', '.join(_KINDS)}",
                f"structured_outputs.{name}",
            )
    return StructuredOutputs(**{name: value[name] for name in _KINDS if value.get(name) is not None})
