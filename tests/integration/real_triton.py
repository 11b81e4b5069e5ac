"""NVIDIA's own server binary for tests: taken from the package nvidia-pytriton, run on the CPU."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import time
import urllib.error
import urllib.request
import venv
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

import aotllm

PACKAGE = "nvidia-pytriton==0.7.0"
CACHE = Path(__file__).resolve().parents[2] / ".cache" / "triton"
_PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"


@dataclass(frozen=True)
class Triton:
    """A running server."""

    http_port: int
    grpc_port: int
    metrics_port: int
    log: Path
    process: subprocess.Popen[bytes]


def unpacked_server() -> Path:
    """The package's files, fetched once (55 MB). Nothing of it is installed."""
    folder = CACHE / PACKAGE.replace("==", "-")
    if folder.is_dir():
        return folder
    CACHE.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", str(CACHE), PACKAGE]
    subprocess.run(command, check=True, timeout=300)
    (wheel,) = CACHE.glob("nvidia_pytriton-*.whl")
    stage = folder.with_suffix(".partial")
    shutil.rmtree(stage, ignore_errors=True)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(stage)
    server = stage / "pytriton" / "tritonserver"
    backend = server / "backends" / "python"
    # The backend looks for the stub next to itself; the package has one for each version of Python that it knows.
    stub = server / "python_backend_stubs" / _PYTHON / "triton_python_backend_stub"
    if not stub.exists():
        pytest.skip(f"{PACKAGE} has no stub for Python {_PYTHON}")
    shutil.copy(stub, backend)
    for program in (server / "bin" / "tritonserver", backend / "triton_python_backend_stub"):
        program.chmod(0o755)
    wheel.unlink()
    stage.rename(folder)
    return folder


def environment() -> Path:
    """A Python environment like this one, but with numpy 1: this release's backend misreads arrays of numpy 2."""
    folder = CACHE / f"env-{_PYTHON}"
    if not (folder / "ready").exists():
        shutil.rmtree(folder, ignore_errors=True)
        venv.create(folder, symlinks=True)
        site = folder / "lib" / f"python{_PYTHON}" / "site-packages"
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(site), "numpy<2"]
        subprocess.run(command, check=True, timeout=300)
        (folder / "ready").touch()
    # What is not in it comes from here, with the .pth files of an editable install. The backend does not look at
    # PYTHONPATH.
    here = [
        str(Path(aotllm.__file__).resolve().parents[1]),
        f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})",
    ]
    (folder / "lib" / f"python{_PYTHON}" / "site-packages" / "here.pth").write_text("\n".join(here) + "\n")
    return folder


@contextmanager
def running(repository: Path, scratch: Path) -> Iterator[Triton]:
    """The server on a model repository, ready."""
    package = unpacked_server()
    server = package / "pytriton" / "tritonserver"
    libpython = Path(sysconfig.get_config_var("LIBDIR"), str(sysconfig.get_config_var("INSTSONAME")))
    if not libpython.name.endswith((".so", ".so.1.0")) or not libpython.exists():
        pytest.skip(f"this Python has no shared library, which the backend's stub needs ({libpython})")
    libraries = [package / "nvidia_pytriton.libs", libpython.parent, os.environ.get("LD_LIBRARY_PATH", "")]
    http_port, grpc_port, metrics_port = _free_ports(3)
    log = scratch / "triton.log"
    command = [
        server / "bin" / "tritonserver",
        f"--model-repository={repository}",
        f"--backend-directory={server / 'backends'}",
        f"--cache-directory={server / 'caches'}",
        "--http-address=127.0.0.1",
        f"--http-port={http_port}",
        "--grpc-address=127.0.0.1",
        f"--grpc-port={grpc_port}",
        "--metrics-address=127.0.0.1",
        f"--metrics-port={metrics_port}",
        "--disable-auto-complete-config",
        "--exit-timeout-secs=10",
    ]
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, "LD_LIBRARY_PATH": ":".join(filter(None, map(str, libraries)))},
            start_new_session=True,  # with the stubs, which are to end with it
        )
    try:
        _wait_until_ready(process, http_port, log)
        yield Triton(http_port, grpc_port, metrics_port, log, process)
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=60)
    finally:
        _kill_session(process)


def _kill_session(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _wait_until_ready(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/health/ready", timeout=5) as response:
                if response.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    pytest.fail(f"tritonserver is not ready:\n{log.read_text(errors='replace')[-4000:]}")


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [listener.getsockname()[1] for listener in sockets]
    for listener in sockets:
        listener.close()
    return ports
