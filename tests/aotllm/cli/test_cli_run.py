"""`aotllm run`: one answer, JSON, chat."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from aotllm import SamplingParams
from aotllm.manager import ManagerRequest
from tests.aotllm.byte_tokenizer import BOS, EOS
from tests.aotllm.cli.command_line import CommandLine, Outcome
from tests.aotllm.fake_manager import FakeEngine, FakeManager, says
from tests.aotllm.grammar_oracle import accepts


def prompt_text(manager: FakeManager, index: int = 0) -> str:
    return FakeEngine().tokenizer().decode(manager.submitted[index].prompt_token_ids, skip_special_tokens=False)


def test_the_answer_goes_to_stdout_and_the_figures_to_stderr(aotllm: CommandLine):
    manager = aotllm.use(FakeManager(says("Grüße 🌊")))
    outcome = aotllm("run", "engine", "-p", "hi")
    assert (outcome.code, outcome.out) == (0, "Grüße 🌊\n")
    assert re.fullmatch(
        r"load \S+ s · first token \S+ s · 13 tokens · \S+ tokens/s · 75% of the guesses right\n", outcome.err
    )
    assert prompt_text(manager) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert manager.shutdowns == [False]


def test_json_is_one_object(aotllm: CommandLine):
    aotllm.use(FakeManager(says("né"), num_cached_tokens=1))
    outcome = aotllm("run", "engine", "-p", "hi", "--raw", "--json", "--logprobs", 1)
    timings = outcome.json.pop("timings")
    assert outcome.code == 0
    assert outcome.json | {"timings": None} == {
        "text": "né",
        "token_ids": [*"né".encode(), EOS],
        "finish_reason": "stop",
        "stop_reason": None,
        "num_prompt_tokens": 3,
        "num_cached_tokens": 1,
        "logprobs": [{"token_id": t, "logprob": -0.5, "top": [[t, -0.5]]} for t in (*"né".encode(), EOS)],
        "timings": None,
    }
    assert set(timings) == {
        "load_seconds",
        "queue_seconds",
        "first_token_seconds",
        "total_seconds",
        "tokens_per_second",
        "draft_acceptance",
    }
    assert outcome.err == ""


def test_raw_skips_the_template(aotllm: CommandLine):
    manager = aotllm.use(FakeManager(says("ok")), FakeEngine(chat=False))
    assert aotllm("run", "engine", "--raw", "-p", "Once").code == 0
    assert manager.submitted[0].prompt_token_ids == (BOS, *b"Once")


def test_a_prompt_can_come_from_stdin(aotllm: CommandLine):
    manager = aotllm.use(FakeManager(says("ok")))
    assert aotllm("run", "engine", "--raw", "-p", "-", stdin="two\nlines").code == 0
    assert prompt_text(manager) == "<s>two\nlines"


def test_flags_override_the_engine_and_nothing_else_does(aotllm: CommandLine):
    manager = aotllm.use(FakeManager(says("ok")), FakeEngine({"temperature": 0.3, "top_k": 9}))
    flags = ["--max-tokens", 5, "--temperature", 0, "--seed", 4, "--stop", "a", "--stop", "b", "--ignore-eos"]
    assert aotllm("run", "engine", "-p", "hi", *flags).code == 0
    assert manager.submitted[0].sampling == SamplingParams(
        max_tokens=5, temperature=0, top_k=9, seed=4, stop=("a", "b"), ignore_eos=True
    )


def test_a_mapping_is_given_entry_by_entry(aotllm: CommandLine):
    manager = aotllm.use(FakeManager(says("ok")))
    flags = ["--logit-bias", "123=-5", "--logit-bias", "7=1.5", "--allowed-token-ids", 7, "--bad-words", "x"]
    assert aotllm("run", "engine", "-p", "hi", *flags).code == 0
    sampling = manager.submitted[0].sampling
    assert sampling.logit_bias == ((7, 1.5), (123, -5.0))
    assert (sampling.allowed_token_ids, sampling.bad_words) == ((7,), ("x",))


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--temperature", -1),
        ("--top-p", 2),
        ("--max-tokens", 0),
        ("--logit-bias", "7=101"),
        ("--logit-bias", "x=1"),
        ("--logit-bias", "=1"),
    ],
)
def test_a_value_out_of_range_is_wrong_usage(aotllm: CommandLine, flag: str, value: float):
    aotllm.use(FakeManager(says("ok")))
    outcome = aotllm("run", "engine", "-p", "hi", flag, value)
    assert (outcome.code, outcome.out) == (2, "")
    assert flag.removeprefix("--").replace("-", "_") in outcome.err


@pytest.mark.parametrize("value", ["7", "7=", "7=x", ""])
def test_an_entry_that_is_none_is_wrong_usage(aotllm: CommandLine, value: str):
    aotllm.use(FakeManager(says("ok")))
    outcome = aotllm("run", "engine", "-p", "hi", "--logit-bias", value)
    assert (outcome.code, outcome.out) == (2, "")
    assert "--logit-bias" in outcome.err


def test_a_prompt_that_does_not_fit_is_wrong_usage(aotllm: CommandLine):
    aotllm.use(FakeManager(says("ok"), max_seq_len=20))
    outcome = aotllm("run", "engine", "-p", "x" * 50)
    assert outcome.code == 2
    assert "maximum context length is 20" in outcome.err


def test_chat_keeps_the_history_and_obeys_commands(aotllm: CommandLine):
    answers = iter(["one", "two", "three"])
    manager = aotllm.use(FakeManager(lambda _: next(answers).encode()))
    stdin = "first\n\n/help\nsecond\n/clear\n/nope\nthird\n/exit\nnever\n"
    outcome = aotllm("run", "engine", "--system", "S", stdin=stdin)
    assert (outcome.code, outcome.out) == (0, "one\ntwo\nthree\n")
    assert "/clear" in outcome.err
    assert "unknown command /nope" in outcome.err

    def turn(role: str, text: str) -> str:
        return f"<|im_start|>{role}\n{text}<|im_end|>\n"

    opening, closing = turn("system", "S"), "<|im_start|>assistant\n"
    assert [prompt_text(manager, i) for i in range(3)] == [
        opening + turn("user", "first") + closing,
        opening + turn("user", "first") + turn("assistant", "one") + turn("user", "second") + closing,
        opening + turn("user", "third") + closing,
    ]


def test_chat_goes_on_after_a_turn_that_does_not_fit(aotllm: CommandLine):
    aotllm.use(FakeManager(says("ok"), max_seq_len=60))
    outcome = aotllm("run", "engine", stdin=f"{'x' * 99}\nhi\n")
    assert (outcome.code, outcome.out) == (0, "ok\n")
    assert outcome.err.startswith("error: This model's maximum context length is 60 tokens")


def test_ctrl_c_stops_the_answer_and_not_the_chat(aotllm: CommandLine, monkeypatch: pytest.MonkeyPatch):
    def answer(request: ManagerRequest) -> itertools.chain[int]:
        return itertools.chain(b"stop me", itertools.repeat(ord(".")))

    manager = aotllm.use(FakeManager(answer))
    printed = []

    def print_until_me(*values: object, **options: object) -> None:
        printed.append(values[0] if values else "\n")
        if "".join(map(str, printed)).endswith("stop me"):
            raise KeyboardInterrupt

    monkeypatch.setattr("aotllm.cli.chat.print", print_until_me, raising=False)
    outcome = aotllm("run", "engine", stdin="a\nb\n")
    assert outcome.code == 0
    assert "".join(map(str, printed)) == "stop me\nstop me\n"
    assert manager.cancelled == [1, 2]


def test_ctrl_c_ends_a_single_answer_with_130(aotllm: CommandLine, monkeypatch: pytest.MonkeyPatch):
    manager = aotllm.use(FakeManager(lambda _: itertools.repeat(ord("x"))))

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("aotllm.cli.run.print", interrupted, raising=False)
    outcome = aotllm("run", "engine", "-p", "hi")
    assert (outcome.code, outcome.err) == (130, "")
    assert not manager.running


@pytest.mark.parametrize(
    ("flags", "yes", "no"),
    [
        (["--json-schema", '{"type": "integer"}'], "42", '"a"'),
        (["--json-schema", "schema.json"], "null", "42"),
        (["--regex", "a+"], "aa", "b"),
        (["--choice", "yes", "--choice", "no"], "no", "maybe"),
        (["--grammar", 'root ::= "x" | "y"'], "y", "z"),
    ],
)
def test_the_answer_can_be_given_a_form(
    aotllm: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str], yes: str, no: str
):
    monkeypatch.chdir(tmp_path)
    Path("schema.json").write_text('{"type": "null"}')
    manager = aotllm.use(FakeManager(says("ok")))
    assert aotllm("run", "engine", "-p", "hi", *flags).code == 0
    constraint = manager.submitted[0].constraint
    assert (accepts(constraint, yes), accepts(constraint, no)) == (True, False)


@pytest.mark.parametrize(
    ("arguments", "says_why"),
    [
        (["-p", "hi", "--regex", "(?=a)"], "--regex does not compile"),
        (["-p", "hi", "--regex", "a", "--choice", "b"], "--regex and --choice needs exactly one"),
        (["-p", "hi", "--json-schema", "{"], "--json-schema is not JSON"),
        (["--regex", "a"], "needs a prompt"),
    ],
)
def test_a_bad_form_is_wrong_usage(aotllm: CommandLine, arguments: list[str], says_why: str):
    manager = aotllm.use(FakeManager(says("ok")))
    outcome = aotllm("run", "engine", *arguments)
    assert outcome.code == 2
    assert says_why in outcome.err
    assert manager.submitted == []


def test_several_answers(aotllm: CommandLine):
    def answer(request: ManagerRequest, index: int) -> bytes:
        return b"%d" % index

    manager = aotllm.use(FakeManager(nth_answer=answer))
    outcome = aotllm("run", "engine", "-p", "hi", "--n", 2)
    assert (outcome.code, outcome.out) == (0, "--- 1 of 2\n0\n--- 2 of 2\n1\n")
    assert manager.submitted[0].n == 2
    aotllm.use(FakeManager(nth_answer=answer))
    record = aotllm("run", "engine", "-p", "hi", "--n", 2, "--json").json
    assert [answer["text"] for answer in record["answers"]] == ["0", "1"]
    assert record["text"] == "0"


def test_beam_search(aotllm: CommandLine):
    def run(*flags: object) -> Outcome:
        aotllm.use(FakeManager(top=lambda text: [(ord("a"), -0.5), (ord("b"), -1.0), (EOS, -3.0)]))
        return aotllm("run", "engine", "-p", "hi", "--max-tokens", 2, "--beam-width", 2, *flags)

    assert run().out == "aa\n"
    assert run("--n", 2).out == "--- 1 of 2 · score -0.5000\naa\n--- 2 of 2 · score -0.7500\nab\n"
    assert run("--json").json["score"] == -0.5


@pytest.mark.parametrize("flags", [["--n", 2], ["--beam-width", 2], ["--best-of", 2]])
def test_a_chat_has_one_answer(aotllm: CommandLine, flags: list[object]):
    aotllm.use(FakeManager(says("ok")))
    outcome = aotllm("run", "engine", *flags, stdin="hi\n")
    assert (outcome.code, outcome.out) == (2, "")


@pytest.mark.parametrize("json", [False, True])
def test_a_time_out_is_5_and_keeps_what_there_is(aotllm: CommandLine, json: bool):
    def answer(_: object) -> Iterator[int]:
        yield ord("a")
        manager.time_out(len(manager.submitted))
        yield ord("b")

    manager = aotllm.use(FakeManager(answer))
    outcome = aotllm("run", "engine", "-p", "hi", "--timeout", 2.5, *(["--json"] if json else []))
    assert outcome.code == 5
    assert outcome.err.splitlines()[-1].startswith("error: the time was over")
    assert (outcome.json["text"] if json else outcome.out.strip()).startswith("a")
    assert manager.submitted[0].timeout == 2.5


def test_an_adapter(aotllm: CommandLine, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("aotllm.adapters.read_adapter", str)
    for arguments, stdin in [(["-p", "hi"], ""), ([], "hi\n")]:
        manager = aotllm.use(FakeManager(says("ok")))
        assert aotllm("run", "engine", "--lora", "poet=some/folder", *arguments, stdin=stdin).code == 0
        assert [request.adapter for request in manager.submitted] == [1]
        assert manager.adapters == {1: "some/folder"}


def test_verbose_tells_what_the_memory_buys(aotllm: CommandLine):
    aotllm.use(FakeManager(says("ok"), max_seq_len=64))
    lines = aotllm("run", "engine", "-p", "hi", "-v").err.splitlines()
    assert lines[:3] == [
        "KV cache: 320.0 KiB in blocks of 16 tokens hold 640 tokens, or 10 sequences of the full 64",
        "  attention  blocks  host blocks  bytes per block     in all",
        "  full           40            0          8.0 KiB  320.0 KiB",
    ]
