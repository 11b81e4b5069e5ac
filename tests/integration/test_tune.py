"""A tuned engine of target cpu is the same engine: same tokens, digests that are right, and it says what it uses."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import pytest

from aotllm import Executor, Request, SamplingParams, _runtime
from aotllm.engines import Engine, open_engine
from aotllm.engines.bundle import TACTICS_FILE
from aotllm.errors import EngineError
from aotllm.tuning import store_tactics, tune

PROMPTS = ("Name three seas.", "The keeper of the lighthouse wrote down what he saw: " * 8)
THREADS = 2


def answers(folder: Path) -> list[tuple[int, ...]]:
    """Tokens of a greedy and a drawn answer to each prompt, all at a time."""
    requests = [
        Request(prompt=prompt, sampling=SamplingParams(max_tokens=8, temperature=temperature, seed=1, ignore_eos=True))
        for prompt in PROMPTS
        for temperature in (0.0, 1.0)
    ]
    with Executor(folder, num_threads=THREADS) as executor:
        return [tuple(output.token_ids) for output in executor.generate(requests)]


def test_a_tuned_engine_gives_the_same_tokens(
    smollm2: Engine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "engine"
    shutil.copytree(smollm2.path, folder)
    expected = answers(folder)
    tuning = tune(folder, num_threads=THREADS, seconds=3.0)
    assert tuning.device is not None
    assert tuning.device.endswith(f", {_runtime.cpu_isa()}")
    assert tuning.threads == THREADS
    rows = [step.max_rows for step in tuning.steps]
    assert rows == sorted(set(rows))

    open_engine(folder, verify=True)
    with caplog.at_level(logging.INFO):
        assert answers(folder) == expected
    assert f"{folder / TACTICS_FILE}: its tactics are used" in caplog.messages

    # Forced, whatever the clock said: fewer threads, rows of their own, other tiles, and the kernels of AVX2.
    record = json.loads((folder / TACTICS_FILE).read_text())
    forced = {
        **record,
        "own_rows": 1,
        "steps": [
            {"max_rows": rows, "threads": threads, "seconds": 0, "default_seconds": 0}
            for rows, threads in ((1, 1), (512, 2))
        ],
        "linears": [
            {
                "format": "q4_1",
                "n": 960,
                "k": 576,
                "tactics": [{"max_rows": 512, "kernel": "avx2.7x3", "seconds": 0}],
            }
        ],
    }
    store_tactics(open_engine(folder), json.dumps(forced))
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        assert answers(folder) == expected
    assert not caplog.messages


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"device": "a CPU, avx2"}, "tuned on a CPU, avx2, this is "),
        ({"threads": THREADS + 1}, f"tuned for {THREADS + 1} threads, the engine runs on {THREADS}"),
        (
            {"linears": [{"format": "q4_1", "n": 16, "k": 32, "tactics": []}]},
            "made for another engine: this one has no matrix 16x32 q4_1",
        ),
    ],
)
def test_tactics_from_elsewhere_are_left_aside(change: dict[str, object], message: str, smollm2: Engine) -> None:
    here = _runtime.tune_cpu(str(smollm2.rank_file()), THREADS, 1e-6)  # no time to find anything
    text = json.dumps({"version": 1, **here, **change})
    runner = _runtime.CpuRunner(str(smollm2.rank_file()), 1, THREADS, text)
    assert message in runner.tactics_note
    assert "the defaults are used: run 'aotllm tune' here" in runner.tactics_note


def test_damaged_tactics_are_refused(smollm2: Engine) -> None:
    with pytest.raises(EngineError, match=r"tactics\.json.*run 'aotllm tune' again"):
        _runtime.CpuRunner(str(smollm2.rank_file()), 1, THREADS, '{"version": 1}')
