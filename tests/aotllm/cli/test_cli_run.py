"""`aotllm run`: one answer, JSON, chat."""

from __future__ import annotations

import itertools
import re

import pytest

from aotllm import SamplingParams
from aotllm.manager import ManagerRequest
from tests.aotllm.byte_tokenizer import BOS, EOS
from tests.aotllm.cli.command_line import CommandLine
from tests.aotllm.fake_manager import FakeEngine, FakeManager, says


def prompt_text(manager: FakeManager, index: int = 0) -> str:
    return FakeEngine().tokenizer().decode(manager.submitted[index].prompt_token_ids, skip_special_tokens=False)


def test_the_answer_goes_to_stdout_and_the_figures_to_stderr(aotllm: CommandLine):
    manager = aotllm.use(FakeManager(says("Grüße 🌊")))
    outcome = aotllm("run", "engine", "-p", "hi")
    assert (outcome.code, outcome.out) == (0, "Grüße 🌊\n")
    assert re.fullmatch(r"load \S+ s · first token \S+ s · 13 tokens · \S+ tokens/s\n", outcome.err)
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
    assert set(timings) == {"load_seconds", "first_token_seconds", "total_seconds", "tokens_per_second"}
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


@pytest.mark.parametrize(("flag", "value"), [("--temperature", -1), ("--top-p", 2), ("--max-tokens", 0)])
def test_a_value_out_of_range_is_wrong_usage(aotllm: CommandLine, flag: str, value: float):
    aotllm.use(FakeManager(says("ok")))
    outcome = aotllm("run", "engine", "-p", "hi", flag, value)
    assert (outcome.code, outcome.out) == (2, "")
    assert flag.removeprefix("--").replace("-", "_") in outcome.err


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
