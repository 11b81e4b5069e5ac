"""What `quick_parse` makes of a command line is what typer makes of it, or nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import example, given, settings
from hypothesis import strategies as st

from aotllm.cli.flags import for_typer
from aotllm.cli.quick_parser import quick_parse
from aotllm.cli.run import run
from aotllm.cli.serve import serve

WORDS = [
    *("engine", "other", "-p", "--prompt", "hello", "", "-", "--", "-x", "--help", "-h", "--nonsense", "-5", "1e3"),
    *("--raw", "--no-raw", "--verify", "--no-verify", "-v", "--json", "--max-tokens", "7", "0.5", "seven", "1_000"),
    *("--temperature", "--temperature=0", "--max-tokens=3", "--stop", "--stop=a=b", "--logit-bias", "5=1.5", "5=x"),
    *("--lora", "a=b", "--num-threads", "--ignore-eos", "--no-ignore-eos", "--raw=1", "-pHi", "-p=Hi", "--beam-width"),
    *(
        "--http-port",
        "70000",
        "--http-port=0",
        "--frontends",
        "--api-key",
        "key",
        "--drain-timeout",
        "-1",
        "--grpc-port",
    ),
]
VERBS: dict[str, Callable[..., Any]] = {"run": run, "serve": serve}


def by_typer(verb: Callable[..., Any], words: list[str]) -> dict[str, Any] | None:
    """What typer calls the verb with; None where it does not."""
    calls: list[dict[str, Any]] = []
    stand_in = for_typer(verb)
    recorder = typer.Typer(add_completion=False)

    def record(**given: Any) -> None:
        calls.append(given)

    record.__signature__, record.__annotations__ = stand_in.__signature__, stand_in.__annotations__  # type: ignore
    recorder.command()(record)
    try:
        recorder(words, standalone_mode=False)
    except Exception:
        return None
    return calls[0] if calls else None


def plain(given: dict[str, Any] | None) -> dict[str, Any] | None:
    """Typer gives lists or tuples for repeated flags, or None where there is none, as its version will have it."""
    if given is None:
        return None
    lists = {name: list(value) if isinstance(value, tuple) else value for name, value in given.items()}
    return {name: value or None for name, value in lists.items() if value not in (None, [])}


@pytest.mark.parametrize("verb", VERBS)
@settings(deadline=None)
@given(words=st.lists(st.sampled_from(WORDS), max_size=7))
@example(words=["engine", "-p", "hello", "--max-tokens", "7", "--temperature=0", "--no-verify"])
@example(words=["engine", "--temperature", "-5"])
def test_it_agrees_with_typer(verb: str, words: list[str]):
    quick = quick_parse(VERBS[verb], words)
    if quick is not None:
        assert plain(quick) == plain(by_typer(VERBS[verb], words))


def test_what_people_type_needs_no_typer():
    words = ["engine", "-p", "Say hi.", "--max-tokens", "16", "--temperature=0", "--stop", "a", "--stop", "b", "--json"]
    given = quick_parse(run, [*words, "--logit-bias", "5=1.5", "--no-verify"])
    assert given is not None
    assert given["engine"] == Path("engine")
    assert (given["prompt"], given["max_tokens"], given["temperature"]) == ("Say hi.", 16, 0.0)
    assert (given["stop"], given["logit_bias"], given["verify"], given["json"]) == (
        ["a", "b"],
        [("5", 1.5)],
        False,
        True,
    )
    assert given["raw"] is False
    assert given["seed"] is None
    served = quick_parse(serve, ["one", "two", "--http-port", "0", "--grpc-port=-1", "--frontends", "2"])
    assert served is not None
    assert served["engines"] == [Path("one"), Path("two")]
    assert (served["http_port"], served["grpc_port"], served["frontends"]) == (0, -1, 2)


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["engine", "more"],
        ["engine", "--help"],
        ["engine", "--max-tokens"],
        ["engine", "--max-tokens", "many"],
        ["engine", "-p", "--raw"],
        ["engine", "--raw=yes"],
        ["engine", "--unknown", "1"],
        ["engine", "--logit-bias", "5=x"],
    ],
)
def test_the_rest_is_left_to_typer(words: list[str]):
    assert quick_parse(run, words) is None


def test_bounds_are_left_to_typer():
    assert quick_parse(serve, ["engine", "--http-port", "70000"]) is None
