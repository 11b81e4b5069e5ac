"""`StructuredOutputs`: what form the answer to a request has to have."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from aotllm.errors import InvalidRequest

MAX_GRAMMAR_BYTES = 1 << 20
MAX_CHOICES = 10_000

JsonSchema = Mapping[str, Any] | bool

_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,40}"
"""Between the tokens of a JSON text. Bounded, since small models love to go on with newlines for ever; 40 indents ten
levels deep by four"""


class Grammar(NamedTuple):
    """A grammar in the compiler's terms."""

    kind: Literal["json_schema", "regex", "lark"]
    text: str
    param: str
    """Field of the request that it came in, for errors"""


@dataclass(frozen=True)
class StructuredOutputs:
    """A form for the answer: exactly one of the fields is given. The answer ends where its form is complete.

    Raises:
        InvalidRequest: none or several are given, or one that can be seen to be wrong before it is compiled.
    """

    json: JsonSchema | str | None = None
    """A JSON schema (draft 2020-12), as an object or as text: the answer is a JSON value that it describes, with its
    properties in the schema's order. Keywords that are not supported are refused, never ignored"""
    json_object: bool = False
    """The answer is a JSON object, whatever is in it"""
    regex: str | None = None
    """The answer matches it from start to end. Rust's syntax, without look-around and backreferences; \\d, \\w and \\s
    are ASCII"""
    choice: Sequence[str] | None = None
    """The answer is one of these"""
    grammar: str | None = None
    """A context-free grammar: Lark in llguidance's dialect (with a rule `start:`), or llama.cpp's GBNF (`root ::=`)"""
    param: str = "structured_outputs"
    """Field of the request that it came in, for errors"""

    def __post_init__(self) -> None:
        if not isinstance(self.json_object, bool):
            raise self._refuse("json_object", f"must be a boolean, got {self.json_object!r:.60}")
        given = [name for name in _FIELDS if getattr(self, name) is not None and getattr(self, name) is not False]
        # false is a schema, though one that nothing meets.
        given = ["json", *given] if self.json is False else given
        if len(given) != 1:
            got = " and ".join(given) or "none"
            raise InvalidRequest(f"{self.param} needs exactly one of {', '.join(_FIELDS)}, got {got}", self.param)
        for name in ("regex", "grammar"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise self._refuse(name, f"must be a string that is not empty, got {value!r:.60}")
        if self.choice is not None:
            self._check_choice(self.choice)

    def to_grammar(self) -> Grammar:
        """The grammar to compile.

        Raises:
            InvalidRequest: it is too large, is no JSON, or cannot be translated.
        """
        if self.json is not None:
            return self._grammar("json", "json_schema", self._schema_text(self.json))
        if self.json_object:
            return self._grammar("json_object", "json_schema", self._schema_text({"type": "object"}))
        if self.regex is not None:
            return self._grammar("regex", "regex", _with_ascii_classes(self.regex))
        if self.choice is not None:
            # JSON's string escapes are Lark's, too.
            return self._grammar("choice", "lark", "start: " + " | ".join(json.dumps(text) for text in self.choice))
        assert self.grammar is not None
        self._check_size("grammar", self.grammar)
        return self._grammar("grammar", "lark", self._lark(self.grammar))

    def _check_choice(self, choice: Any) -> None:
        if isinstance(choice, str) or not isinstance(choice, Sequence) or not choice:
            raise self._refuse("choice", f"must be a list of at least one string, got {choice!r:.60}")
        if len(choice) > MAX_CHOICES:
            raise self._refuse("choice", f"has {len(choice)} elements; at most {MAX_CHOICES} are allowed")
        for text in choice:
            if not isinstance(text, str) or not text:
                raise self._refuse("choice", f"must hold strings that are not empty, got {text!r:.60}")

    def _schema_text(self, schema: JsonSchema | str) -> str:
        if isinstance(schema, str):
            self._check_size("json", schema)
        elif not isinstance(schema, (Mapping, bool)):
            raise self._refuse("json", f"must be a JSON schema (an object or a boolean), got {schema!r:.60}")
        try:
            value = json.loads(schema) if isinstance(schema, str) else schema
            if value is True:
                value = {}
            if isinstance(value, Mapping):
                spacing = {"whitespace_pattern": _WHITESPACE}
                value = {"x-guidance": spacing, **value}
            return json.dumps(value, allow_nan=False, ensure_ascii=False)
        except RecursionError:
            raise self._refuse("json", "is nested too deeply; at most 128 levels are allowed") from None
        except (ValueError, TypeError) as error:
            raise self._refuse("json", f"is not JSON: {error}") from None

    def _lark(self, text: str) -> str:
        if re.search(r"(?m)^\s*(%llguidance\b|\??start(\.\w+)?\s*(\[[^\]\n]*\]\s*)?:(?!:=))", text):
            return text
        if "::=" not in text:
            raise self._refuse(
                "grammar", "has no start: a Lark grammar has a rule `start: ...`, a GBNF grammar `root ::= ...`"
            )
        from llguidance.gbnf_to_lark import gbnf_to_lark

        try:
            return str(gbnf_to_lark(text))
        except RecursionError:
            raise self._refuse("grammar", "is nested too deeply") from None
        except Exception as error:  # whatever that parser throws at a bad grammar
            raise self._refuse("grammar", f"cannot be read as GBNF: {error!s:.300}") from None

    def _grammar(self, field: str, kind: Literal["json_schema", "regex", "lark"], text: str) -> Grammar:
        self._check_size(field, text)
        return Grammar(kind, text, self._param(field))

    def _check_size(self, field: str, text: str) -> None:
        try:
            size = len(text.encode())
        except UnicodeEncodeError:
            raise self._refuse(field, "holds half of a surrogate pair; send complete characters") from None
        if size > MAX_GRAMMAR_BYTES:
            raise self._refuse(field, f"is {size} bytes long; at most {MAX_GRAMMAR_BYTES} are allowed")
        if "\0" in text:
            raise self._refuse(field, "holds a NUL character; escape it")

    def _param(self, field: str) -> str:
        return f"{self.param}.{field}" if self.param == "structured_outputs" else self.param

    def _refuse(self, field: str, why: str) -> InvalidRequest:
        param = self._param(field)
        return InvalidRequest(f"{param} {why}", param)


_FIELDS = ("json", "json_object", "regex", "choice", "grammar")

_ASCII_CLASSES = {"d": "[0-9]", "w": "[0-9A-Za-z_]", "s": r"[\t\n\x0B\x0C\r\x20]"}


def _with_ascii_classes(regex: str) -> str:
    """`regex` with \\d, \\w and \\s spelled out. The library would take them to mean all of Unicode, as nobody does who
    asks for a telephone number; patterns inside JSON schemas are ASCII there, too. Classes nest, so this also holds
    inside of brackets."""
    return re.sub(r"\\(.)", lambda escape: _ASCII_CLASSES.get(escape[1], escape[0]), regex, flags=re.DOTALL)
