"""`ServerPeers`: llama-server and `aotllm serve` under the same load, started for each measurement."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.client import HTTPConnection, HTTPException
from pathlib import Path

from llama_cpp import LlamaCpp, LlamaCppError

_PR_SET_PDEATHSIG = 1
"""Of linux/prctl.h"""

READY_SECONDS = 60.0
INPUT_LEN = 128
MEMORY_SLOTS, MEMORY_LENGTH = 8, 2048
WORDS = 896
"""Of a prompt that nearly fills a slot: `w7` is two tokens of most vocabularies"""
PREFIX_CLIENTS, PREFIX_WORDS, END_WORDS = 8, 512, 8
"""Of prompts that begin with the same 1,024 tokens"""


def seconds_of(command: Sequence[str]) -> float:
    """From the start of a process to its end. Raises CalledProcessError where it fails."""
    begin = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - begin


def proportional_kib(smaps: str) -> int:
    """`Pss` of a /proc/PID/smaps_rollup in KiB; 0 where it has none."""
    for line in smaps.splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1])
    return 0


def tree_of(pid: int) -> list[int]:
    """A process and all that descend from it."""
    found = [pid]
    for parent in found:
        for task in Path(f"/proc/{parent}/task").glob("*/children"):
            found += map(int, task.read_text().split())
    return found


class ServerPeers:
    """Both servers on one model.

    Args:
        peer: llama.cpp.
        model: its file.
        engine: our engine of that file.
        threads: of each server.
        requests: of a measurement of throughput, INPUT_LEN tokens each.
        output_len: tokens of each answer.
    """

    def __init__(self, peer: LlamaCpp, model: Path, engine: Path, threads: int, requests: int, output_len: int) -> None:
        self._peer, self._model, self._engine, self._threads = peer, model, engine, threads
        self._requests, self._output_len = requests, output_len

    def their_throughput(self, clients: int) -> float:
        """Output tokens per second of llama-server with a slot for each client."""
        with self._theirs(clients, self._context()) as server:
            return self._throughput(server, clients)

    def our_throughput(self, clients: int) -> float:
        """Output tokens per second of `aotllm serve` as it comes."""
        with self._ours([]) as server:
            return self._throughput(server, clients)

    def their_start(self) -> float:
        """Seconds from the start of the process to the end of a request for one token."""
        begin = time.perf_counter()
        with self._theirs(1, MEMORY_LENGTH) as server:
            server.complete("a", 1)
            return time.perf_counter() - begin

    def our_start(self) -> float:
        """As `their_start`."""
        begin = time.perf_counter()
        with self._ours([]) as server:
            server.complete("a", 1)
            return time.perf_counter() - begin

    def their_memory(self) -> float:
        """MiB when each of the slots has been filled."""
        with self._theirs(MEMORY_SLOTS, MEMORY_LENGTH) as server:
            return self._filled(server)

    def our_memory(self) -> float:
        """MiB with the same sequences in a KV cache of that size."""
        tokens = MEMORY_SLOTS * MEMORY_LENGTH
        with self._ours(["--max-batch-size", str(MEMORY_SLOTS), "--kv-cache-memory", f"{tokens}tokens"]) as server:
            return self._filled(server)

    def their_prefix(self) -> float:
        """Seconds until the last of the clients whose prompts begin alike has its first token."""
        with self._theirs(PREFIX_CLIENTS, MEMORY_LENGTH) as server:
            return self._first_tokens(server)

    def our_prefix(self) -> float:
        """As `their_prefix`."""
        with self._ours([]) as server:
            return self._first_tokens(server)

    def _context(self) -> int:
        """Tokens of a slot: prompts are exact in words, not in tokens."""
        return 2 * (INPUT_LEN + self._output_len)

    def _theirs(self, slots: int, context: int) -> Running:
        port = _free_port()
        return Running(self._peer.server_command(self._model, port=port, slots=slots, context=context), port)

    def _ours(self, options: Sequence[str]) -> Running:
        port = _free_port()
        command = [sys.executable, "-m", "aotllm", "serve", str(self._engine), "--http-port", str(port)]
        command += ["--grpc-port", "-1", "--metrics-port", "-1", "--num-threads", str(self._threads), *options]
        return Running(command, port)

    def _throughput(self, server: Running, clients: int) -> float:
        command = [sys.executable, "-m", "aotllm", "bench", "serve", "--url", server.url, "--backend", "openai"]
        command += ["--profile", "random", "--input-len", str(INPUT_LEN), "--output-len", str(self._output_len)]
        command += ["--concurrency", str(clients), "--num-prompts", str(self._requests), "--warmups", str(clients)]
        command += ["--tokenizer", str(self._engine), "--no-detailed", "--json", "-"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise LlamaCppError(f"aotllm bench serve of {server.name} failed: {done.stderr.strip()[-300:]}")
        result = json.loads(done.stdout)
        if result["failed"]:
            raise LlamaCppError(f"{result['failed']} requests to {server.name} failed: {result['error_counts']}")
        return float(result["output_throughput"])

    def _filled(self, server: Running) -> float:
        server.complete_all([_words(number, WORDS) for number in range(MEMORY_SLOTS)], 16)
        return server.mebibytes()

    def _first_tokens(self, server: Running) -> float:
        server.complete("a", 1)  # both are loaded and warm
        prefix = _words(PREFIX_CLIENTS, PREFIX_WORDS)
        prompts = [f"{prefix} {_words(number, END_WORDS)}" for number in range(PREFIX_CLIENTS)]
        begin = time.perf_counter()
        server.complete_all(prompts, 1)
        return time.perf_counter() - begin


def _words(seed: int, count: int) -> str:
    """A text that differs by `seed` from its first words on."""
    return " ".join(f"w{(seed * 7919 + index) % 10}" for index in range(count))


class Running:
    """A server process within a `with`; it answers when the block begins."""

    def __init__(self, command: Sequence[str], port: int) -> None:
        self._command, self._port = list(command), port
        self.name = Path(command[0]).name if "aotllm" not in command else "aotllm serve"
        self.url = f"http://127.0.0.1:{port}"

    def __enter__(self) -> Running:
        # A session of its own: the end reaches all its processes, also where this one is killed.
        self._process = subprocess.Popen(
            self._command,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=_end_with_parent,
        )
        deadline = time.monotonic() + READY_SECONDS
        while not self._ready():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.__exit__()
                raise LlamaCppError(f"{' '.join(self._command)} does not serve")
            time.sleep(0.002)
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(20)
        with suppress(ProcessLookupError):  # all have ended
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def complete(self, prompt: str, max_tokens: int) -> None:
        """One completion, to its end. Raises LlamaCppError where it is refused."""
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        status, answer = self._ask("POST", "/v1/completions", json.dumps(body))
        if status != 200:
            raise LlamaCppError(f"{self.name} answers {status}: {answer[:300]!r}")

    def complete_all(self, prompts: Sequence[str], max_tokens: int) -> None:
        """Completions of all prompts at the same time, to the end of the last one."""
        with ThreadPoolExecutor(len(prompts)) as clients:
            list(clients.map(lambda prompt: self.complete(prompt, max_tokens), prompts))

    def mebibytes(self) -> float:
        """Of all its processes; pages that several share count once."""
        files = [Path(f"/proc/{pid}/smaps_rollup") for pid in tree_of(self._process.pid)]
        return sum(proportional_kib(file.read_text()) for file in files) / 1024

    def _ready(self) -> bool:
        try:
            return self._ask("GET", "/health", None)[0] == 200
        except (OSError, HTTPException):
            return False

    def _ask(self, method: str, path: str, body: str | None) -> tuple[int, bytes]:
        connection = HTTPConnection("127.0.0.1", self._port, timeout=600)
        try:
            connection.request(method, path, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()


def _end_with_parent() -> None:
    """In the child: the kernel sends it SIGTERM when this process ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
