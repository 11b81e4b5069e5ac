"""The process group of `aotllm serve`: what each death means, drain, Ctrl-C, refusals at the start."""

from __future__ import annotations

import json
import os
import resource
import signal
import ssl
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest

from aotllm.engines import Engine
from aotllm.serving.process.supervisor import ENGINE_PROCESS, FRONT_END
from tests.integration.running_server import ROOT, RunningServer, running_server

LONG = {"prompt": "Once upon a time", "max_tokens": 1500, "ignore_eos": True, "temperature": 0, "stream": True}


@pytest.fixture(scope="module")
def engine(smollm2: Engine) -> Path:
    return smollm2.path


class Stream:
    """A streamed completion, read by a thread."""

    def __init__(self, server: RunningServer, body: dict[str, object] = LONG) -> None:
        self.begun = threading.Event()
        self.lines: list[str] = []
        self.fault: Exception | None = None
        self._thread = threading.Thread(target=self._read, args=(server.url, body), daemon=True)
        self._thread.start()
        assert self.begun.wait(60)

    def end(self) -> list[str]:
        self._thread.join(60)
        assert not self._thread.is_alive()
        return self.lines

    def _read(self, url: str, body: dict[str, object]) -> None:
        try:
            with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as response:
                for line in response.iter_lines():
                    if line:
                        self.lines.append(line)
                        self.begun.set()
        except httpx.TransportError as error:
            self.fault = error
        self.begun.set()


def test_a_front_end_that_dies_takes_its_own_connections_only(engine: Path):
    with running_server(engine, frontends=2, drain_timeout=1) as server:
        streams = [Stream(server, {**LONG, "max_tokens": 100}) for _ in range(12)]
        os.kill(server.children(FRONT_END)[0], signal.SIGKILL)
        ends = [stream.end()[-1] for stream in streams]
        faults = [stream.fault for stream in streams]
        # The kernel spreads connections, so either front end has had some.
        assert {end == "data: [DONE]" for end in ends} == {True, False}
        assert all((end == "data: [DONE]") == (fault is None) for end, fault in zip(ends, faults, strict=True))
        server.wait_for_status("/health", 200)
        while len(server.children(FRONT_END)) < 2:
            assert server.status("/health") in (0, 200)
        assert any("front end" in line and "signal 9" in line for line in server.log)
        assert server.stop() == 0


def test_an_engine_process_that_dies_ends_streams_with_an_error_and_the_server(engine: Path):
    with running_server(engine, frontends=2) as server:
        stream = Stream(server)
        (pid,) = server.children(ENGINE_PROCESS)
        os.kill(pid, signal.SIGKILL)
        *_, error, done = stream.end()
        assert json.loads(error.removeprefix("data: "))["error"]["code"] == 503
        assert done == "data: [DONE]"
        assert [server.status("/health") for _ in range(4)] == [503] * 4
        answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "a"}, timeout=60)
        assert (answer.status_code, answer.json()["error"]["type"]) == (503, "ServiceUnavailableError")
        assert server.wait() == 1
        assert "error: the engine process has died (signal 9)" in server.log[-1]


def test_streams_that_nobody_ends_do_not_delay_the_end_after_that(engine: Path):
    import tritonclient.grpc

    with running_server(engine, drain_timeout=3600) as server:
        client = tritonclient.grpc.InferenceServerClient(server.grpc)
        client.start_stream(lambda result, error: None)
        (pid,) = server.children(ENGINE_PROCESS)
        os.kill(pid, signal.SIGKILL)
        assert server.wait() == 1
        client.stop_stream(cancel_requests=True)


def test_a_supervisor_that_dies_takes_all_along(engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    server = RunningServer(engine, frontends=2)
    pids = server.children()
    assert len(pids) == 3
    server.stop(signal.SIGKILL)
    server.wait_for_status("/health", 0)
    for pid in pids:
        while Path(f"/proc/{pid}/cmdline").exists() and Path(f"/proc/{pid}/cmdline").read_bytes():
            pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("frontends", [0, 1, 2])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_lets_requests_finish(engine: Path, frontends: int, number: signal.Signals, code: int):
    with running_server(engine, frontends=frontends) as server:
        stream = Stream(server, {**LONG, "max_tokens": 100})
        assert server.stop(number) == code
        assert stream.end()[-1] == "data: [DONE]"
        assert sum('"text":' in line for line in stream.lines) > 1
        assert '"finish_reason":"length"' in stream.lines[-2]


@pytest.mark.parametrize("frontends", [0, 2])
def test_after_the_drain_timeout_requests_are_cancelled(engine: Path, frontends: int):
    with running_server(engine, frontends=frontends, drain_timeout=0) as server:
        stream = Stream(server)
        assert server.stop() == 0
        *_, error, done = stream.end()
        assert json.loads(error.removeprefix("data: "))["error"]["code"] == 503
        assert done == "data: [DONE]"


def test_the_second_interrupt_does_not_wait(engine: Path):
    with running_server(engine, drain_timeout=600) as server:
        stream = Stream(server)
        os.kill(server.pid, signal.SIGINT)
        server.wait_for_status("/health", 0)
        assert server.stop(signal.SIGINT) == 130
        stream.end()


def refusal(*arguments: object) -> tuple[int, str]:
    """Exit code and standard error of a server that does not start."""
    ran = subprocess.run(
        [sys.executable, "-m", "aotllm", "serve", *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=60,
    )
    return ran.returncode, ran.stderr


def test_what_cannot_start_says_why(engine: Path, tmp_path: Path):
    free = ["--http-port", 0, "--grpc-port", 0, "--metrics-port", 0]
    code, message = refusal(tmp_path / "none", *free)
    assert code == 3
    assert message.startswith("error: ")
    assert str(tmp_path / "none") in message
    code, message = refusal(engine, *free, "--max-batch-size", 100000)
    assert code == 2
    assert "max_batch_size" in message
    with running_server(engine) as server:
        for flag, taken in (("--http-port", server.url), ("--grpc-port", server.grpc)):
            port = taken.rpartition(":")[2]
            code, message = refusal(engine, *free, flag, port)
            assert (code, message) == (
                1,
                f"error: cannot listen on 127.0.0.1:{port}: Address already in use; choose another {flag}\n",
            )


def test_a_folder_too_long_for_a_socket(engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path / ("a" * 60) / ("b" * 60)
    folder.mkdir(parents=True)
    monkeypatch.setenv("TMPDIR", str(folder))
    code, message = refusal(engine, "--http-port", 0, "--grpc-port", 0, "--metrics-port", 0)
    assert code == 1
    assert message.startswith(f"error: the folder for temporary files, {folder}, is too long")
    assert "set TMPDIR to a shorter one" in message
    assert list(folder.iterdir()) == []


def test_as_many_open_files_as_the_system_allows(engine: Path):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        with running_server(engine) as server:
            for pid in (server.pid, *server.children()):
                assert resource.prlimit(pid, resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1, signed by itself, and its key."""
    folder = tmp_path_factory.mktemp("tls")
    key, chain = folder / "key.pem", folder / "chain.pem"
    options = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost", "-newkey", "rsa:2048"]
    subprocess.run(
        ["openssl", "req", "-x509", "-nodes", "-days", "1", "-keyout", key, "-out", chain, *options],
        check=True,
        capture_output=True,
    )
    return chain, key


def test_tls_for_all_protocols(engine: Path, certificate: tuple[Path, Path]):
    import grpc
    import tritonclient.grpc

    chain, key = certificate
    with running_server(engine, ssl_certfile=chain, ssl_keyfile=key) as server:
        assert server.url.startswith("https://")
        for url in (f"{server.url}/health", server.metrics):
            assert httpx.get(url, verify=ssl.create_default_context(cafile=chain), timeout=60).status_code == 200
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{server.url}/health", timeout=60)  # signed by nobody that is trusted
        credentials = grpc.ssl_channel_credentials(chain.read_bytes())
        client = tritonclient.grpc.InferenceServerClient(server.grpc, ssl=True, creds=credentials)
        assert client.is_server_ready()
    code, message = refusal(engine, "--http-port", 0, "--ssl-certfile", chain)
    assert (code, message) == (2, "error: ssl_certfile and ssl_keyfile are given together\n")
