"""Tool calls in the text of answers: what is found, what stays text, and that cuts do not matter."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aotllm.parameters import parameters
from aotllm.serving.openai.pieces import CallArguments, CallStart, Content, Piece
from aotllm.serving.openai.reasoning import MARKERS
from aotllm.serving.openai.tools.base import ToolParser
from aotllm.serving.openai.tools.choose import PARSERS, tool_parser_class
from aotllm.serving.openai.tools.named_call import NamedCallParser
from aotllm.serving.options import ServingOptions

NAMES = ("f", "get_weather")
Calls = list[tuple[str, str]]


def read(parser: ToolParser, texts: Iterable[str]) -> tuple[str, Calls]:
    """Content, and (name, arguments) of the calls, as a client puts them together."""
    content, calls = "", []
    pieces: list[Piece] = [piece for text in texts for piece in parser.push(text)]
    for piece in [*pieces, *parser.flush()]:
        if isinstance(piece, Content):
            content += piece.text
        elif isinstance(piece, CallStart):
            assert piece.index == len(calls)
            calls.append((piece.name, ""))
        else:
            assert isinstance(piece, CallArguments)
            assert piece.index == len(calls) - 1
            name, arguments = calls.pop()
            calls.append((name, arguments + piece.text))
    return content, calls


def whole(kind: str, text: str) -> tuple[str, Calls]:
    return read(PARSERS[kind](NAMES), [text])


F1 = ("f", '{"a": 1}')
WEATHER = ("get_weather", '{"city": "São <b>{\\"}"}')

WELL_FORMED: list[tuple[str, str, str, Calls]] = [
    ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', "", [F1]),
    ("hermes", 'Let me see.\n<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>', "Let me see.", [F1]),
    (
        "hermes",
        '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>\n<tool_call>\n'
        '{"name": "get_weather", "arguments": {"city": "São <b>{\\"}"}}\n</tool_call>',
        "",
        [F1, WEATHER],
    ),
    ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', "", [F1]),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}}</tool_call>', "", [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [F1]),
    ("hermes", '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>', "", [("unknown", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>\nDone.', "\nDone.", [F1]),
    ("hermes", '<tool_call>{"name":"f","arguments":{"a": 1}}\n{"name":"f"}</tool_call>', "", [F1, ("f", "{}")]),
    ("llama3_json", '{"name": "f", "parameters": {"a": 1}}', "", [F1]),
    ("llama3_json", '\n{"name": "f", "arguments": {"a": 1}}', "", [F1]),
    ("llama3_json", '<|python_tag|>{"name": "f", "parameters": {"a": 1}}', "", [F1]),
    ("llama3_json", '<|python_tag|>{"name": "g", "parameters": {}}', "", [("g", "{}")]),
    ("llama3_json", '{"type": "function", "name": "f", "parameters": {"a": 1}}', "", [F1]),
    (
        "llama3_json",
        '{"name": "f", "parameters": {"a": 1}}; {"name": "get_weather", "parameters": {"city": "São <b>{\\"}"}}',
        "",
        [F1, WEATHER],
    ),
    ("llama3_json", 'Well:<|python_tag|>{"name": "f", "parameters": {"a": 1}};', "Well:", [F1]),
    ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}]', "", [F1]),
    ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, {"name": "f"}]', "", [F1, ("f", "{}")]),
    ("mistral", 'Sure.[TOOL_CALLS]f{"a": 1}', "Sure.", [F1]),
    ("mistral", '[TOOL_CALLS]f{"a": 1}[TOOL_CALLS]get_weather{"city": "São <b>{\\"}"}', "", [F1, WEATHER]),
    ("mistral", '[TOOL_CALLS]f[CALL_ID]a1b2c3d4e[ARGS]{"a": 1}', "", [F1]),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"a": 1}', "", [F1]),
    ("json", '{"name": "f", "arguments": {"a": 1}}', "", [F1]),
    ("json", '[{"name": "f", "parameters": {"a": 1}}, {"name": "f", "parameters": {}}]', "", [F1, ("f", "{}")]),
    ("json", 'I call it:\n```json\n{"name": "f", "arguments": {"a": 1}}\n```\nDone.', "I call it:\nDone.", [F1]),
    ("json", '```\n[\n  {"name": "f", "arguments": {"a": 1}}\n]\n```', "", [F1]),
    ("json", '{"name": "f", "arguments": {"a": 1}}\n{"name": "f"}', "", [F1, ("f", "{}")]),
]


@pytest.mark.parametrize(("kind", "text", "content", "calls"), WELL_FORMED)
def test_calls(kind: str, text: str, content: str, calls: Calls):
    assert whole(kind, text) == (content, calls)
    for _, arguments in calls:
        json.loads(arguments)


JUST_TEXT: list[tuple[str, str]] = [
    *((kind, text) for kind in PARSERS for text in ("", " ", "Hello, {you}!\n", "a < b [1] `c`\n\n", "[", "<", "```")),
    ("hermes", "<tool_call>not JSON</tool_call>"),
    ("hermes", "<tool_call></tool_call>"),
    ("hermes", '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"nam'),
    ("hermes", '<tool_call>{"name": "f", "argum'),
    ("hermes", '<tool_call>{"arguments": {"a": 1}'),
    ("hermes", "<tool_ca"),
    ("hermes", '{"name": "f", "arguments": {}}'),
    ("llama3_json", 'The call is {"name": "f", "parameters": {}}'),
    ("llama3_json", '{"name": "unknown", "parameters": {}}'),
    ("llama3_json", '{"answer": 1, "name": "f"}'),
    ("llama3_json", '<|python_tag|>brave_search.call(query="x")'),
    ("mistral", "[TOOL_CALLS]"),
    ("mistral", "[TOOL_CALLS][]"),
    ("mistral", "[TOOL_CALLS]f and more"),
    ("mistral", "[TOOL_CALLS]f[CALL_ID]x"),
    ("json", '{"name": "unknown", "arguments": {}}'),
    ("json", '```json\n{"answer": 1}\n```\n'),
    ("json", '```python\nprint({"name": "f"})\n```'),
    ("json", '[1, 2]\n[link](x)\n{"a": {"name": "f"}}'),
]


@pytest.mark.parametrize(("kind", "text"), JUST_TEXT)
def test_what_is_no_call_is_content_to_the_letter(kind: str, text: str):
    assert whole(kind, text) == (text, [])


BROKEN_OFF: list[tuple[str, str, str, Calls]] = [
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": [1, "x', "", [("f", '{"a": [1, "x')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "x\\', "", [("f", '{"a": "x\\')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>', "", [F1]),  # a brace is missing
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_', "", [F1]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": {"b": 1}</tool_call>x', "x", [("f", '{"a": {"b": 1}')]),
    ("llama3_json", '{"name": "f", "parameters": {"a": 1}', "", [F1]),
    ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}', "", [F1]),
    ("mistral", '[TOOL_CALLS]f{"a": "\\', "", [("f", '{"a": "\\')]),
    ("json", '```json\n{"name": "f", "arguments": {"a": 1}}\n``', "", [F1]),
]


@pytest.mark.parametrize(("kind", "text", "content", "calls"), BROKEN_OFF)
def test_a_call_that_breaks_off_keeps_what_there_is(kind: str, text: str, content: str, calls: Calls):
    assert whole(kind, text) == (content, calls)


def test_arguments_come_while_they_are_written():
    parser = PARSERS["hermes"](NAMES)
    assert parser.push('Hm. <tool_call>{"name": "f", "arguments": ') == [Content("Hm.")]
    assert parser.push('{"a": ') == [CallStart(0, "f"), CallArguments(0, '{"a": ')]
    assert parser.push("[1,") == [CallArguments(0, "[1,")]
    assert parser.push("2]}}</tool_call>") == [CallArguments(0, "2]}")]


def test_plain_text_is_not_held_back():
    for kind in PARSERS:
        parser = PARSERS[kind](NAMES)
        assert parser.push("Hello") == [Content("Hello")]
        assert parser.push(" you") == [Content(" you")]


FRAGMENTS = [
    *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "<|python_tag|>", "```json\n", "```"),
    *('{"name": "f", ', '"arguments": ', '"parameters": ', '{"a": 1}', '{"name": "f", "parameters": {"a": "\\"}"}}'),
    *("{", "}", "[", "]", '"', "\\", ",", ":", ";", "\n", " ", "f", "get_weather", "é", "null", "1.5e3", "<", "text"),
]
SCRAPS = st.lists(st.sampled_from(FRAGMENTS), max_size=14).map("".join)
PREFIXES = st.builds(lambda case, at: case[1][: at % (len(case[1]) + 1)], st.sampled_from(WELL_FORMED), st.integers(0))
TEXTS = SCRAPS | PREFIXES | st.builds(lambda a, b: a + b, PREFIXES, SCRAPS) | st.text(max_size=20)


def pieces_of(text: str, cuts: Sequence[int]) -> list[str]:
    bounds = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[a:b] for a, b in itertools.pairwise(bounds)]


@settings(deadline=None, max_examples=1500)
@given(kind=st.sampled_from(sorted(PARSERS)), text=TEXTS, cuts=st.lists(st.integers(0), max_size=12))
def test_cuts_do_not_matter(kind: str, text: str, cuts: list[int]):
    expected = whole(kind, text)
    assert read(PARSERS[kind](NAMES), pieces_of(text, cuts)) == expected
    assert read(PARSERS[kind](NAMES), text) == expected  # by character


@settings(deadline=None, max_examples=1500)
@given(kind=st.sampled_from(sorted(PARSERS)), text=TEXTS)
def test_nothing_is_lost(kind: str, text: str):
    """What comes out is what went in, in order, without some of the markup of calls."""
    content, calls = whole(kind, text)
    if not calls:
        assert content == text
    letters = iter(text)
    assert all(char in letters for char in content)  # a subsequence
    for _, arguments in calls:
        assert arguments == "{}" or arguments in text or json.dumps(arguments)[1:-1] in text or "\\" in text


@settings(deadline=None, max_examples=60)
@given(
    kind=st.sampled_from(["hermes", "mistral"]),
    calls=st.lists(
        st.tuples(st.sampled_from(NAMES), st.dictionaries(st.text(), st.text() | st.integers())), min_size=1
    ),
    before=st.sampled_from(["", "Let me see. ", "{x} "]),
    ascii_only=st.booleans(),
)
def test_what_a_template_writes_is_read_back(kind: str, calls, before: str, ascii_only: bool):
    objects = [json.dumps({"name": name, "arguments": values}, ensure_ascii=ascii_only) for name, values in calls]
    if kind == "hermes":
        text = before + "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in objects)
    else:
        text = f"{before}[TOOL_CALLS][{', '.join(objects)}]"
    content, found = whole(kind, text)
    assert content == before.rstrip()
    assert [(name, json.loads(arguments)) for name, arguments in found] == calls


def test_a_named_call_is_all_of_the_text():
    assert read(NamedCallParser(["f"]), ['{"a"', ": 1}"]) == ("", [F1])
    assert read(NamedCallParser(["f"]), []) == ("", [])


TEMPLATES = [
    ("{{ tools }}[TOOL_CALLS]", "mistral"),
    ("{{ tools }}<tool_call>", "hermes"),
    ("{{ tools }}<|python_tag|>", "llama3_json"),
    ("{{ tools }}<|start_header_id|>", "llama3_json"),
    ("{%- if not tools is defined %}{% endif %}<tool_call>", "hermes"),
    ("{{ tools }}", "json"),
    ("{{ messages }} You have no tools. <tool_call> {{ x }}", "json"),
    ("{{ messages }}<|start_header_id|>", "json"),  # knows no tools: they are described in our own words
    (None, "json"),
]


@pytest.mark.parametrize(("template", "kind"), TEMPLATES)
def test_auto_goes_by_the_template(template: str | None, kind: str):
    assert tool_parser_class("auto", template) is PARSERS[kind]


def test_the_option_decides():
    specs = {name: spec for name, _, spec in parameters(ServingOptions)}
    assert set(specs["tool_call_parser"].choices or ()) == {"auto", "none", *PARSERS}
    assert set(specs["reasoning_parser"].choices or ()) == {"auto", "none", *MARKERS}
    assert tool_parser_class("hermes", "[TOOL_CALLS]") is PARSERS["hermes"]
    assert tool_parser_class("none", "[TOOL_CALLS]") is None
