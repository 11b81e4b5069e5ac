#!/usr/bin/env python3
"""From nothing to the first token, and what an idle server costs.

    python scripts/bench_startup.py ENGINE [--repeats N] [--cold] [--only cli executor server] [--json]
                                    [--llama-server PATH --gguf FILE]

`cli`: `aotllm run` as a process, to the first byte of its answer. `executor`: `Executor(engine)` and a token in a
Python that has imported aotllm. `server`: `aotllm serve` as a process, to an answer of one token; then the memory of
its processes, idle and after 8 sequences of 2,048 tokens each, and the CPU time of 5 idle seconds. llama.cpp's server
is measured alike and in turns. `--cold` drops the files of the engine from the page cache before each start.
Milliseconds: median (min to max). Memory: MiB, `rss` summed over processes, `pss` with shared pages counted once.
Python finds its modules compiled, as where a package is installed: they are, before anything is measured.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SEQUENCES, LENGTH = 8, 2048
IDLE_SECONDS = 5.0
_EXECUTOR = """
import json, sys, time
from aotllm import Executor, Request, SamplingParams
import aotllm._runtime, aotllm.tokenization, aotllm.engines
start = time.perf_counter()
with Executor(sys.argv[1], max_batch_size=8) as executor:
    loaded = time.perf_counter()
    executor.generate([Request(prompt="Hello", sampling=SamplingParams(max_tokens=1, temperature=0))])
    print(json.dumps([loaded - start, time.perf_counter() - start]))
"""


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", type=Path)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--only", nargs="*", default=["cli", "executor", "server"])
    parser.add_argument("--no-idle", action="store_true", help="times only")
    parser.add_argument("--llama-server", type=Path)
    parser.add_argument("--gguf", type=Path)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()

    with tempfile.TemporaryDirectory() as compiled:
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        os.environ["PYTHONPYCACHEPREFIX"] = compiled
        measure(arguments)


def measure(arguments: argparse.Namespace) -> None:
    """Run everything in turns, and print it."""
    files = [*arguments.engine.iterdir(), *([arguments.gguf] if arguments.gguf else [])]
    runs: dict[str, Callable[[], dict[str, float]]] = {}
    if "cli" in arguments.only:
        runs["cli"] = lambda: {"first_token_ms": cli(our_run(arguments.engine))}
    if "executor" in arguments.only:
        runs["executor"] = lambda: executor(arguments.engine)
    if "server" in arguments.only:
        runs["server"] = lambda: server(ours(arguments.engine), not arguments.no_idle)
        if arguments.llama_server:
            command = llama(arguments.llama_server, arguments.gguf)
            runs["llama.cpp server"] = lambda: server(command, not arguments.no_idle)
    for run in runs.values():
        run()
    results: dict[str, list[dict[str, float]]] = {name: [] for name in runs}
    for _ in range(arguments.repeats):
        for name, run in runs.items():
            if arguments.cold:
                drop_from_cache(files)
            results[name].append(run())
    summary = {name: summarize(values) for name, values in results.items()}
    if arguments.json:
        print(json.dumps(summary))
        return
    for name, values in summary.items():
        for key, (median, low, high) in values.items():
            print(f"{name:18} {key:22} {median:9.1f} ({low:.1f} to {high:.1f})")


def our_run(engine: Path) -> list[str]:
    """The command that gives one token."""
    command = [sys.executable, "-m", "aotllm", "run", str(engine), "--raw", "-p", "Hello", "--max-tokens", "1"]
    return [*command, "--temperature", "0"]


def cli(command: list[str]) -> float:
    """Milliseconds from the start of the process to the first byte on its stdout."""
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=ROOT) as process:
        assert process.stdout is not None
        if not os.read(process.stdout.fileno(), 1):
            raise SystemExit(f"{' '.join(command)} gave no answer")
        milliseconds = 1e3 * (time.perf_counter() - start)
        process.stdout.read()
    return milliseconds


def executor(engine: Path) -> dict[str, float]:
    """Milliseconds in a process that has imported everything."""
    output = subprocess.run(
        [sys.executable, "-c", _EXECUTOR, str(engine)], stdout=subprocess.PIPE, cwd=ROOT, check=True
    ).stdout
    loaded, first = json.loads(output)
    return {"loaded_ms": 1e3 * loaded, "first_token_ms": 1e3 * first}


def ours(engine: Path) -> Callable[[int], list[str]]:
    """The command that serves ENGINE on a port."""
    flags = ["--grpc-port", "-1", "--metrics-port", "-1", "--max-batch-size", str(SEQUENCES), "--log-level", "error"]
    flags += ["--kv-cache-memory", f"{SEQUENCES * LENGTH}tokens"]
    return lambda port: [sys.executable, "-m", "aotllm", "serve", str(engine), "--http-port", str(port), *flags]


def llama(binary: Path, gguf: Path) -> Callable[[int], list[str]]:
    """The same of llama.cpp's server."""
    context = ["-c", str(SEQUENCES * LENGTH), "-np", str(SEQUENCES), "-t", str(len(os.sched_getaffinity(0)))]
    return lambda port: [str(binary), "-m", str(gguf), "--port", str(port), "-fa", "on", "--no-warmup", *context]


def server(command: Callable[[int], list[str]], idle: bool) -> dict[str, float]:
    """Milliseconds from the start of the process to the first byte of an answer; what it takes when idle."""
    port = free_port()
    start = time.perf_counter()
    with running(command(port)) as process:
        first_answer(process, port)
        result = {"first_token_ms": 1e3 * (time.perf_counter() - start)}
        if idle:
            result |= {f"{kind}_idle_mib": value for kind, value in memory(process.pid).items()}
            before = cpu_seconds(process.pid)
            time.sleep(IDLE_SECONDS)
            result["idle_cpu_ms_per_s"] = 1e3 * (cpu_seconds(process.pid) - before) / IDLE_SECONDS
            fill(port)
            result |= {f"{kind}_filled_mib": value for kind, value in memory(process.pid).items()}
    return result


@contextmanager
def running(command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """A server as a process, ended at the end."""
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=ROOT, start_new_session=True
    ) as process:
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(30)


def first_answer(process: subprocess.Popen[bytes], port: int) -> None:
    """Ask until there is an answer."""
    while process.poll() is None:
        try:
            if ask(port, "Hello", 1):
                return
        except OSError:
            pass
        time.sleep(0.002)
    raise SystemExit(f"the server ended with exit code {process.returncode}")


def fill(port: int) -> None:
    """Eight sequences at a time, each nearly as long as its context, none alike."""
    prompts = [" ".join(f"{word * (index + 3) % 977}" for word in range(LENGTH // 4)) for index in range(SEQUENCES)]
    threads = [threading.Thread(target=ask, args=(port, prompt, LENGTH // 8)) for prompt in prompts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def ask(port: int, prompt: str, tokens: int) -> bool:
    """Whether the server gave a whole answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        answer.read()
        return answer.status == 200
    except http.client.HTTPException:
        return False
    finally:
        connection.close()


def tree(pid: int) -> list[int]:
    """A process and those below it."""
    children = [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]
    return [pid, *(below for child in children for below in tree(child))]


def memory(pid: int) -> dict[str, float]:
    """MiB of a tree of processes."""
    total = {"rss": 0.0, "pss": 0.0}
    for process in tree(pid):
        text = Path(f"/proc/{process}/smaps_rollup").read_text()
        for kind in total:
            match = re.search(rf"^{kind.capitalize()}:\s+(\d+) kB", text, re.MULTILINE)
            assert match is not None
            total[kind] += int(match[1]) / 1024
    return total


def cpu_seconds(pid: int) -> float:
    """User and system time of a tree of processes."""
    ticks = 0
    for process in tree(pid):
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def drop_from_cache(files: list[Path]) -> None:
    """Let the kernel forget what it has read of files."""
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def summarize(results: list[dict[str, float]]) -> dict[str, tuple[float, float, float]]:
    """Median, smallest and largest of each figure."""
    figures = {key: [result[key] for result in results] for key in results[0]}
    return {key: (statistics.median(values), min(values), max(values)) for key, values in figures.items()}


if __name__ == "__main__":
    main()
