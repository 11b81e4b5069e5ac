"""Decode steps of up to 16 rows in FP8, whose products are chained and hand on codes in groups, against prefill, which
scales a row of activations: two codings of the same numbers, about as far from each other as each is from exact ones.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aotllm.engines import Engine
from tests.gpu.engines import Sequences, exact_logits, random_prompt, relative_error, row_errors, tiny_engine
from tests.integration.engines import build_engine

CODING = 0.2
"""Between the two, of a row; of many rows together see `assert_close`"""
SIZES = (1, 3, 8, 9, 16, 17)
"""Of batches: up to a tile of 8 rows, of 16, and one that is too large; some are padded"""
GROWING = (1, 3, 8, 9, 15, 16, 17, 20, 16, 9, 8, 2, 1)
STEPS = 3
"""Of each size: the second one makes the graph, the third one replays it"""
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in ("llama", "llama, biases", "llama, heads of 96, odd sizes", "qwen2", "qwen3")},
    "bf16 at the ends": ("llama", {"quantize_exclude": "0,-1"}),
    "an FP8 cache": ("llama", {"kv_cache_dtype": "fp8"}),
}


@pytest.fixture(scope="module", params=CASES)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    model, options = CASES[request.param]
    return tiny_engine(tmp_path_factory.mktemp("engines"), model, quantize="fp8", **options)[1]


def assert_close(got: np.ndarray, ordinary: np.ndarray, exact: np.ndarray) -> None:
    """Rows `[rows, vocab]`."""
    assert (row_errors(got, ordinary) <= CODING).all()
    if len(got) >= 8:
        usual = relative_error(ordinary, exact)
        print(f"{len(got)} rows: relative error {relative_error(got, exact):.4f}, of prefill {usual:.4f}")
        assert relative_error(got, exact) <= 1.25 * usual
        assert relative_error(got, ordinary) <= 1.5 * usual


@pytest.mark.parametrize("graphs", [False, True])
def test_decode_steps_are_prefill(engine: Engine, graphs: bool) -> None:
    count = max(SIZES)
    prompts = [random_prompt(100 + i, 3 + (13 * i) % 90) for i in range(count)]
    sequences = Sequences(engine, count + 1, graphs=graphs)
    ordinary = np.stack([sequences.logits(prompt, index=count)[-1] for prompt in prompts])
    exact = np.stack([exact_logits(engine, prompt)[-1] for prompt in prompts])
    for i, prompt in enumerate(prompts):
        sequences.logits(prompt[:-1], index=i)
    for size in SIZES:
        starts = [len(prompt) - 1 for prompt in prompts[:size]]
        for _ in range(STEPS):
            rows = sequences.step([prompt[-1:] for prompt in prompts[:size]], starts, range(size))
            assert_close(np.concatenate(rows), ordinary[:size], exact[:size])


def test_rows_depend_on_no_row_beside_them(engine: Engine) -> None:
    """Nor on what padding holds: to the bit, as long as they run in the same tile of rows."""
    prompts = [random_prompt(300 + i, 4 + 5 * i) for i in range(16)]
    sequences = Sequences(engine, len(prompts))
    for i, prompt in enumerate(prompts):
        sequences.logits(prompt[:-1], index=i)
    last, starts = [prompt[-1:] for prompt in prompts], [len(prompt) - 1 for prompt in prompts]
    for few, many in ((5, 8), (9, 16)):
        whole = sequences.step(last[:many], starts[:many], range(many))
        part = sequences.step(last[:few], starts[:few], range(few))
        for i, (one, other) in enumerate(zip(part, whole, strict=False)):
            assert np.array_equal(one, other), (few, i)


def test_stages_have_chains_of_their_own(tmp_path: Path) -> None:
    """Which end where a stage does."""
    _, one = tiny_engine(tmp_path, "llama", quantize="fp8")
    options = {"max_seq_len": 512, "target": "cuda", "max_num_tokens": 256}
    cut = build_engine(tmp_path / "model", tmp_path / "cut", quantize="fp8", pp=2, **options)
    prompts = [random_prompt(400 + i, 4 + 5 * i) for i in range(9)]
    last, starts = [prompt[-1:] for prompt in prompts], [len(prompt) - 1 for prompt in prompts]
    rows = []
    for engine in (one, cut):
        sequences = Sequences(engine, len(prompts))
        for i, prompt in enumerate(prompts):
            sequences.logits(prompt[:-1], index=i)
        rows.append(np.concatenate(sequences.step(last, starts, range(len(prompts)))))
    assert (row_errors(rows[1], rows[0]) <= CODING).all()


def greedy(engine: Engine, prompts: list[list[int]], graphs: bool) -> list[list[int]]:
    """Prompts and what follows: of each step the first sequences, those that are new to it with all of their prompt."""
    sequences = Sequences(engine, len(prompts), graphs=graphs)
    texts, cached = [list(prompt) for prompt in prompts], [0] * len(prompts)
    tables = [sequences.table(i) for i in range(len(prompts))]
    for size in GROWING:
        for _ in range(STEPS):
            tokens = [text[start:] for text, start in zip(texts[:size], cached, strict=False)]
            said = sequences.runner.next_tokens(tokens, cached[:size], tables[:size])
            for i, token in enumerate(said):
                cached[i] = len(texts[i])
                texts[i].append(token)
    return texts


def test_a_batch_that_grows_and_shrinks(engine: Engine) -> None:
    """Each token is, but for near ties, the one that prefill of all before it says; graphs change none."""
    prompts = [random_prompt(200 + i, 5 + (17 * i) % 40) for i in range(max(GROWING))]
    texts = greedy(engine, prompts, graphs=True)
    assert texts == greedy(engine, prompts, graphs=False)
    sequences = Sequences(engine)
    for prompt, text in zip(prompts, texts, strict=True):
        logits = sequences.logits(text[:-1])[len(prompt) - 1 :]
        said = np.take_along_axis(logits, np.array(text[len(prompt) :])[:, None], axis=-1)[:, 0]
        assert (logits.max(-1) - said <= CODING * np.abs(logits).max()).all()
