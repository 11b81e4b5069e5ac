"""Compiled grammars allow what they say, and nothing that was refused has an effect."""

from __future__ import annotations

import ctypes.util
import json
import random
import re
import subprocess
import sys
import threading
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aotllm import _runtime
from aotllm.errors import EngineIncompatible, Internal, InvalidRequest, Overloaded
from aotllm.grammars import Grammars, library_path
from tests.aotllm.byte_tokenizer import BOS, END, EOS, START, VOCAB_SIZE
from tests.aotllm.grammar_oracle import accepts, allowed, byte_grammars, form

GRAMMARS = byte_grammars()

TEXTS = [
    "",
    "a",
    "b",
    "ab",
    "aab",
    "ba",
    "abc",
    "5",
    "५",
    "42",
    "4-2",
    "é",
    "a\nb",
    "yes",
    "yes please",
    "no",
    " a ",
    "A",
]

REGEXES = [
    "a*b",
    "a|b|ab",
    r"\d+",
    r"\d-\d|\w",
    r"[\d-]+",
    "a.b",
    "(yes|no)( please)?",
    "é?",
    " a ",
    "(?i)a",
    "[^a]",
    "a{2}b",
]


@pytest.mark.parametrize("regex", REGEXES)
def test_regex_matches_what_python_matches(regex: str) -> None:
    start = GRAMMARS.compile(form(regex=regex))
    assert [text for text in TEXTS if accepts(start, text)] == [
        text for text in TEXTS if re.fullmatch(regex, text, re.ASCII if "\\" in regex else 0)
    ]


@pytest.mark.parametrize(
    "choice", [["yes", "no"], ["yes", "yes please"], ["a"], ['quoted "', "back\\slash", "new\nline"], ["é", "日本"]]
)
def test_choice_takes_its_elements(choice: list[str]) -> None:
    start = GRAMMARS.compile(form(choice=choice))
    texts = [*TEXTS, *choice, choice[0] + "x", choice[0][:-1]]
    assert {text for text in texts if accepts(start, text)} == set(choice)


@pytest.mark.parametrize(
    ("grammar", "yes", "no"),
    [
        ('start: "a" start "b" | ', ["", "ab", "aabb"], ["a", "aab", "ba"]),
        ('start: NUMBER ("+" NUMBER)*\nNUMBER: /[0-9]+/', ["1", "1+22"], ["", "1+", "+1"]),
        ('root ::= "a" root "b" | ""', ["", "ab", "aabb"], ["a", "aab"]),
        ('root ::= item+\nitem ::= [a-c] ","', ["a,", "a,c,"], ["", "a", "d,"]),
        ('root ::= "{"', ["{"], ["", "{{"]),
        ('?start: "a"', ["a"], ["b"]),
    ],
)
def test_lark_and_gbnf(grammar: str, yes: list[str], no: list[str]) -> None:
    start = GRAMMARS.compile(form(grammar=grammar))
    assert [text for text in [*yes, *no] if accepts(start, text)] == yes


@pytest.mark.parametrize(
    ("schema", "yes", "no"),
    [
        ({}, ["1", '"a"', "[null, {}]"], ["", "{", "01"]),
        (True, ["1"], [""]),
        ({"type": "integer", "maximum": 20000000000}, ["20000000000", "-5"], ["20000000001", "1.5"]),
        ({"type": "string", "pattern": r"^\d{2}$"}, ['"12"'], ['"1"', '"५५"']),
        (
            '{"type": "object", "properties": {"b": {"type": "null"}, "a": true}}',
            ['{"b":null,"a":1}', "{}"],
            ['{"b":1}'],
        ),
    ],
)
def test_json_schema(schema: Any, yes: list[str], no: list[str]) -> None:
    start = GRAMMARS.compile(form(json=schema))
    assert [text for text in [*yes, *no] if accepts(start, text)] == yes


def test_json_object() -> None:
    start = GRAMMARS.compile(form(json_object=True))
    assert accepts(start, '{"a": [1, {"b": null}]}')
    assert not accepts(start, "[1]")
    assert not accepts(start, '{"a": 1} ')


def test_white_space_ends() -> None:
    start = GRAMMARS.compile(form(json={"type": "array"}))
    assert accepts(start, "[" + " " * 40 + "]")
    assert not accepts(start, "[" + " " * 41 + "]")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"json": False}, "does not compile"),
        ({"json": {"type": 5}}, "does not compile"),
        ({"json": {"not": {}}}, "does not compile"),
        ({"json": {"$ref": "#"}}, "cannot go on"),
        ({"json": {"$ref": "http://example.com/x"}}, "does not compile"),
        ({"json": {"type": "integer", "maximum": 10**400}}, "does not compile"),
        ({"json": {"type": "integer", "minimum": 5, "maximum": 4}}, "does not compile"),
        ({"json": {"type": "number", "multipleOf": 1e-300}}, "does not compile"),
        ({"json": '{"items":' * 200 + "{}" + "}" * 200}, "does not compile"),
        ({"regex": "(?=a)b"}, "look-ahead"),
        ({"regex": r"(a)\1"}, "backreferences"),
        ({"regex": "(" * 10_000}, "does not compile"),
        ({"regex": "[^"}, "does not compile"),
        ({"grammar": "start: start"}, "cannot go on"),
        ({"grammar": "start: missing"}, "does not compile"),
        ({"grammar": "start: <|im_end|>"}, "does not compile"),
        ({"grammar": "start: " + "(" * 10_000 + '"a"' + ")" * 10_000}, "does not compile"),
        ({"grammar": 'start: A\nA: A "b"'}, "does not compile"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_bad_ones_are_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        GRAMMARS.compile(form(**given))
    assert refused.value.param == f"structured_outputs.{next(iter(given))}"
    assert says in refused.value.message
    assert len(refused.value.message) < 600


CHAINS = {
    "Lark rules": lambda n: {"grammar": "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(n)) + f'r{n}: "a"'},
    "Lark terminals": lambda n: {
        "grammar": "start: A0\n" + "".join(f'A{i}: "x" A{i + 1}\n' for i in range(n)) + f'A{n}: "a"'
    },
    "references": lambda n: {
        "json": {
            "$defs": {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(n)} | {f"d{n}": {"type": "null"}},
            "$ref": "#/$defs/d0",
        }
    },
    "properties": lambda n: {
        "json": {
            "$defs": {
                f"d{i}": {"properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}, "required": ["a"]} for i in range(n)
            }
            | {f"d{n}": {}},
            "$ref": "#/$defs/d0",
        }
    },
}
"""Recursion as deep as a grammar's length allows; these overflow an ordinary stack"""


@pytest.mark.parametrize("chain", CHAINS)
def test_recursion_does_not_crash(chain: str) -> None:
    code = f"""
import threading
from aotllm.errors import InvalidRequest
from tests.aotllm.grammar_oracle import allowed, byte_grammars, form
from tests.aotllm.test_grammars import CHAINS
grammars = byte_grammars()
for size in (100, 12_000):
    try:
        state = grammars.compile(form(**CHAINS[{chain!r}](size))).clone()
        for _ in range(3):
            if not state.finished:
                state.accept(allowed(state)[0])
    except InvalidRequest as error:
        assert size > 100, error
print("alive")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout) == (0, "alive\n"), done.stderr[-2000:]


def test_a_slow_one_is_given_up_and_too_many_of_them_are_refused() -> None:
    tokens = [bytes([i]) for i in range(128)]
    compiler = _runtime.GrammarCompiler(str(library_path()), tokens, [0], 128, max_compile_seconds=1e-4)
    slow = json.dumps({"type": "integer", "multipleOf": 200_003})
    for _ in range(4):
        with pytest.raises(InvalidRequest, match="takes more than") as refused:
            compiler.compile("json_schema", slow, "guided_json")
        assert refused.value.param == "guided_json"
    with pytest.raises(Overloaded, match="try again later"):
        compiler.compile("json_schema", slow, "guided_json")


@pytest.mark.parametrize(
    "given",
    [
        {"json": {}},
        {"regex": "(?s).*"},
        {"grammar": "start: /(?s).*/"},
        {"grammar": f"start: <[{BOS}]> | <[{START}-{END}]> | /a/"},
        {"grammar": "start: /a/ | <[*]>"},
    ],
    ids=str,
)
def test_control_tokens_are_never_allowed(given: dict[str, Any]) -> None:
    state = GRAMMARS.compile(form(**given)).clone()
    tokens = set(allowed(state))
    assert tokens
    assert not tokens & {BOS, START, END}


def test_a_grammar_of_control_tokens_only_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="no token that it would allow"):
        GRAMMARS.compile(form(grammar=f"start: <[{BOS}]>"))


def test_the_end() -> None:
    state = GRAMMARS.compile(form(regex="ab?")).clone()
    assert EOS not in allowed(state)
    state.accept(ord("a"))
    assert allowed(state) == [ord("b"), EOS]
    assert not state.finished
    clone = state.clone()
    state.accept(ord("b"))
    assert state.finished
    clone.accept(EOS)
    assert clone.finished


def test_a_token_that_is_not_allowed_is_a_fault() -> None:
    state = GRAMMARS.compile(form(regex="ab")).clone()
    with pytest.raises(Internal, match="does not allow token 98"):
        state.accept(ord("b"))


def test_a_grammar_that_grows_too_large_while_it_is_followed_is_the_requests_fault() -> None:
    state = GRAMMARS.compile(form(regex="a{1000000}")).clone()
    with pytest.raises(InvalidRequest, match="too large to go on.*simplify it|cannot go on"):
        for _ in range(1000):
            state.accept(allowed(state)[0])


def merged_grammars() -> tuple[_runtime.GrammarCompiler, list[bytes]]:
    """Over a vocabulary of bytes and of longer tokens, some of them across what forced text ends with."""
    longer = [
        '{"',
        '":',
        '": ',
        "na",
        "me",
        "name",
        '"name',
        '",',
        '", "',
        "ag",
        "age",
        "true",
        "tr",
        "order",
        "orderId",
    ]
    tokens = [bytes([i]) for i in range(256)] + [text.encode() for text in longer] + [b""]
    return _runtime.GrammarCompiler(str(library_path()), tokens, [len(tokens) - 1], len(tokens)), tokens


PERSON = {
    "x-guidance": {"whitespace_flexible": False},
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "active": {"const": True},
        "order": {"enum": ["orderId", "orderName"]},
    },
    "required": ["name", "age", "active", "order"],
    "additionalProperties": False,
}


def walk(seed: int, limits: list[int]) -> tuple[bytes, int]:
    """Text of a random walk over allowed tokens, taking forced ones by `limits` in turn; and how many were forced."""
    compiler, tokens = merged_grammars()
    state = compiler.compile("json_schema", json.dumps(PERSON), "p").clone()
    rng = random.Random(seed)
    text, forced, step = b"", 0, 0
    while not state.finished:
        jump = state.take_forced(limits[step % len(limits)])
        step += 1
        forced += len(jump)
        text += b"".join(tokens[token] for token in jump)
        if state.finished:
            break
        token = rng.choice(allowed(state, len(tokens)))
        state.accept(token)
        text += tokens[token]
    return text, forced


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), limits=st.lists(st.integers(0, 9), min_size=1, max_size=4))
def test_random_walks_end_in_a_valid_instance(seed: int, limits: list[int]) -> None:
    text, forced = walk(seed, limits)
    # Bytes that end in the middle of a character are nothing that JSON allows, so this decodes.
    jsonschema.validate(json.loads(text), PERSON)
    assert forced <= sum(limits) * 400
    assert not any(limits) or forced > 0


def test_forced_tokens_are_those_of_the_masks() -> None:
    """Taking them is what drawing them one by one is."""
    compiler, tokens = merged_grammars()
    start = compiler.compile("json_schema", json.dumps(PERSON), "p")
    jumped, drawn = start.clone(), start.clone()
    forced = jumped.take_forced(100)
    assert b"".join(tokens[token] for token in forced) == b'{"name":'
    assert tokens[forced[0]] == b'{"'
    for token in forced:
        assert allowed(drawn, len(tokens)) == [token]
        drawn.accept(token)
    assert allowed(drawn, len(tokens)) == allowed(jumped, len(tokens))


def test_a_grammar_is_compiled_once() -> None:
    grammars = byte_grammars()
    first = grammars.compile(form(regex="abc"))
    assert grammars.compile(form(regex="abc")) is first
    assert grammars.compile(form(regex="abd")) is not first


def test_the_oldest_is_forgotten() -> None:
    grammars = Grammars(*_byte_arguments(), capacity=2)
    kept = [grammars.compile(form(regex=regex)) for regex in ("a", "b", "a", "c")]
    assert grammars.compile(form(regex="a")) is kept[0]
    assert grammars.compile(form(regex="b")) is not kept[1]


def test_threads_share_a_compiler() -> None:
    results: dict[str, bool] = {}

    def compile_and_use(index: int) -> None:
        text = "x" * (index % 7 + 1)
        results[str(index)] = accepts(GRAMMARS.compile(form(choice=[text, "other"])), text)

    threads = [threading.Thread(target=compile_and_use, args=(i,)) for i in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert list(results.values()) == [True] * 24


@pytest.mark.parametrize("path", ["/nowhere/_lib.so", ctypes.util.find_library("c") or "libc.so.6"])
def test_another_library_is_refused(path: str) -> None:
    with pytest.raises(EngineIncompatible, match=r"llguidance>=1\.8,<2.*pip install"):
        _runtime.GrammarCompiler(path, [b"a"], [], 1)


@pytest.mark.parametrize(
    ("tokens", "eos", "size", "param"),
    [([b"a", b"b"], [], 1, "vocab_size"), ([], [], 0, "vocab_size"), ([b"a"], [1], 1, "eos_token_ids")],
)
def test_a_vocabulary_that_contradicts_itself(tokens: list[bytes], eos: list[int], size: int, param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        _runtime.GrammarCompiler(str(library_path()), tokens, eos, size)
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("kind", "text", "says"),
    [
        ("regex", "a" * (1 << 20) + "a", "at most 1048576"),
        ("regex", "a\0b", "NUL"),
        ("yacc", "a", "json_schema, regex"),
    ],
)
def test_the_runtime_has_limits_of_its_own(kind: str, text: str, says: str) -> None:
    compiler = _runtime.GrammarCompiler(str(library_path()), [b"a"], [], 1)
    with pytest.raises(InvalidRequest, match=says):
        compiler.compile(kind, text, "p")


def test_without_end_tokens_an_answer_ends_by_itself() -> None:
    compiler = _runtime.GrammarCompiler(str(library_path()), [bytes([i]) for i in range(256)], [], 300)
    state = compiler.compile("regex", "ab", "p").clone()
    for byte in b"ab":
        assert allowed(state, 300) == [byte]
        state.accept(byte)
    assert state.finished


def _byte_arguments() -> tuple[Any, list[int], int]:
    from tests.aotllm.byte_tokenizer import byte_tokenizer

    return byte_tokenizer(), [EOS], VOCAB_SIZE


def test_hidden_whitespace_tokens_aside_markup_is_no_text() -> None:
    vocabulary = _byte_arguments()[0].byte_vocabulary
    assert [i for i in range(VOCAB_SIZE + 2) if not vocabulary.is_text(i)] == [*range(256, VOCAB_SIZE), 260, 261]
