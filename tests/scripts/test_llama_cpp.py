"""What llama.cpp's tools print, read back; and how they are called."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from llama_cpp import BatchedRow, BenchRow, LlamaCpp, LlamaCppError, parse_batched, parse_bench

# Samples in the form of build 11434, shortened.
BENCH_JSONL = """\
load_backend: loaded CPU backend
{"build_commit": "unknown", "backends": "CPU", "n_prompt": 512, "n_gen": 0, "n_depth": 0, "avg_ns": 606221395, \
"avg_ts": 844.713929, "stddev_ts": 15.27, "samples_ts": [ 855.511, 833.917 ]}
{"build_commit": "unknown", "backends": "CPU", "n_prompt": 0, "n_gen": 32, "n_depth": 1024, "avg_ts": 113.9, \
"stddev_ts": 3.3, "samples_ts": [ 116.2, 111.5 ]}
"""
BENCH_JSON = """\
[
  {
    "n_prompt": 512,
    "n_gen": 0,
    "n_depth": 0,
    "avg_ts": 844.713929,
    "samples_ts": [ 855.511, 833.917 ]
  },
  {
    "n_prompt": 0,
    "n_gen": 32,
    "n_depth": 1024,
    "avg_ts": 113.9,
    "samples_ts": [ 116.2, 111.5 ]
  }
]
"""
BENCH_MD = """\
| model            |       size |     params | backend    | threads |  fa |            test |                  t/s |
| ---------------- | ---------: | ---------: | ---------- | ------: | --: | --------------: | -------------------: |
| llama 256M Q4_0  |  85.77 MiB |   134.52 M | CPU        |       2 |   1 |           pp512 |       844.71 ± 15.27 |
| llama 256M Q4_0  |  85.77 MiB |   134.52 M | CPU        |       2 |   1 |    tg32 @ d1024 |        113.90 ± 3.30 |

build: unknown (0)
"""
BENCH_ROWS = [BenchRow(512, 0, 0, 844.713929), BenchRow(0, 32, 1024, 113.9)]

BATCHED_JSONL = """\
{"n_kv_max": 4096, "flash_attn": 1, "pp": 128, "tg": 16, "pl": 1, "n_kv": 144, "t_pp": 0.126583, \
"speed_pp": 1011.194275, "t_tg": 0.085226, "speed_tg": 187.736145, "t": 0.211809, "speed": 679.857788}
{"n_kv_max": 4096, "flash_attn": 1, "pp": 128, "tg": 16, "pl": 8, "n_kv": 1152, "t_pp": 0.988099, \
"speed_pp": 1036.333374, "t_tg": 0.331809, "speed_tg": 385.764069, "t": 1.319908, "speed": 872.788086}
"""
BATCHED_MD = """\

llama_batched_bench: n_kv_max = 4096, n_batch = 2048, flash_attn = 1, n_threads = 2, n_threads_batch = 2

|    PP |     TG |    B |   N_KV |   T_PP s | S_PP t/s |   T_TG s | S_TG t/s |      T s |    S t/s |
|-------|--------|------|--------|----------|----------|----------|----------|----------|----------|
|   128 |     16 |    1 |    144 |    0.127 |  1011.19 |    0.085 |   187.74 |    0.212 |   679.86 |
|   128 |     16 |    8 |   1152 |    0.988 |  1036.33 |    0.332 |   385.76 |    1.320 |   872.79 |

llama_perf_context_print:        load time =      72.10 ms
"""
BATCHED_ROWS = [BatchedRow(128, 16, 1, 1011.194275, 187.736145), BatchedRow(128, 16, 8, 1036.333374, 385.764069)]


@pytest.mark.parametrize("text", [BENCH_JSONL, BENCH_JSON, BENCH_MD])
def test_rows_of_llama_bench(text: str):
    rows = parse_bench(text)
    assert [(row.num_prompt, row.num_generated, row.depth) for row in rows] == [(512, 0, 0), (0, 32, 1024)]
    assert [row.tokens_per_second for row in rows] == pytest.approx([844.71, 113.90], abs=0.005)


@pytest.mark.parametrize("text", [BATCHED_JSONL, BATCHED_MD])
def test_rows_of_llama_batched_bench(text: str):
    rows = parse_batched(text)
    assert [(row.num_prompt, row.num_generated, row.batch) for row in rows] == [(128, 16, 1), (128, 16, 8)]
    assert [row.prefill_per_second for row in rows] == pytest.approx([1011.19, 1036.33], abs=0.005)
    assert [row.decode_per_second for row in rows] == pytest.approx([187.74, 385.76], abs=0.005)


@pytest.mark.parametrize("end", ["", "\n{\n", '\n{"n_prompt": 1}\n', "\nnot a row: [1, 2]\n", '\n{"n_prompt": 5, "n_g'])
def test_what_is_no_row_is_left_out(end: str):
    assert parse_bench(BENCH_JSONL + end) == BENCH_ROWS
    assert parse_batched(BATCHED_JSONL + end) == BATCHED_ROWS


@pytest.mark.parametrize("text", ["", "error: failed to load model 'x'\n", BENCH_MD.splitlines()[0], "[\n]", "{}"])
def test_output_without_rows_is_refused(text: str):
    for parse in (parse_bench, parse_batched):
        with pytest.raises(LlamaCppError, match="no row of results"):
            parse(text)


def fake_tool(folder: Path, name: str, script: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / name
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(file.stat().st_mode | stat.S_IXUSR)


def test_a_tool_is_found_and_called(tmp_path: Path):
    row = json.dumps({"n_prompt": 512, "n_gen": 0, "n_depth": 0, "avg_ts": 100.0})
    fake_tool(tmp_path / "build" / "bin", "llama-bench", f"echo \"$@\" > {tmp_path}/called\necho '{row}'")
    peer = LlamaCpp(tmp_path, threads=3)
    assert peer.bench(Path("m.gguf"), prompt=512) == 100.0
    called = (tmp_path / "called").read_text()
    assert "-m m.gguf -p 512 -n 0 -d 0 -r 1 -t 3 -fa on" in called
    with pytest.raises(LlamaCppError, match="no row for prompt 0, generate 128"):
        peer.bench(Path("m.gguf"), generate=128)
    with pytest.raises(LlamaCppError, match="has no llama-server: build that target"):
        peer.tool("llama-server")


def test_a_tool_that_fails_is_told_with_its_last_words(tmp_path: Path):
    fake_tool(tmp_path, "llama-bench", "exit 0")
    fake_tool(tmp_path, "llama-quantize", "echo 'unknown type Q9_9' >&2; exit 3")
    peer = LlamaCpp(tmp_path, threads=1)
    with pytest.raises(LlamaCppError, match="ended with 3: unknown type Q9_9"):
        peer.quantize(tmp_path / "a.gguf", tmp_path / "b.gguf", "Q9_9")
    assert not (tmp_path / "b.gguf").exists()


def test_a_folder_without_tools(tmp_path: Path):
    with pytest.raises(LlamaCppError, match="has no llama-bench"):
        LlamaCpp(tmp_path, threads=1)
