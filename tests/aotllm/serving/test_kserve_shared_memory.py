"""Tensors in POSIX shared memory, over both protocols; regions that vanish or shrink."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

from aotllm.errors import AotllmError, InvalidRequest
from aotllm.serving.kserve.errors import RegionExists, RegionNotFound
from aotllm.serving.kserve.shared_memory import SystemSharedMemory
from aotllm.serving.shared_table import LocalTable
from aotllm.triton_tensors.tensors import bytes_element
from tests.aotllm.byte_tokenizer import EOS
from tests.aotllm.fake_manager import FakeManager, echoes, says
from tests.aotllm.serving.kserve_server import KserveServer, Serve
from tests.aotllm.serving.kserve_tensors import prompt, tensors

PROTOCOLS = pytest.mark.parametrize("library", [tritonclient.grpc, tritonclient.http], ids=["grpc", "http"])


def connect(library: ModuleType, server: KserveServer) -> Any:
    return library.InferenceServerClient(server.grpc if library is tritonclient.grpc else server.http)


@pytest.fixture
def memory() -> Iterator[SharedMemory]:
    """4096 bytes."""
    block = SharedMemory(create=True, size=4096)
    yield block
    block.close()
    try:
        block.unlink()
    except FileNotFoundError:
        return  # the test has removed it


@PROTOCOLS
def test_tensors_go_both_ways(kserve: Serve, memory: SharedMemory, library: ModuleType):
    client = connect(library, kserve(FakeManager(echoes)))
    client.register_system_shared_memory("in", memory.name, 1024, offset=0)
    client.register_system_shared_memory("out", f"/{memory.name}", 1024, offset=1024)
    memory.buf[8:20] = np.array([1, 2, 3], np.int32).tobytes()
    ids = library.InferInput("input_ids", [1, 3], "INT32")
    ids.set_shared_memory("in", 12, offset=8)
    output = library.InferRequestedOutput("output_ids")
    output.set_shared_memory("out", 100, offset=16)
    lengths = library.InferRequestedOutput("sequence_length")
    rest = tensors(library, input_lengths=3, request_output_len=9, exclude_input_in_output=True)
    result = client.infer("tensorrt_llm", [rest[0], ids, *rest[1:]], outputs=[output, lengths])
    assert result.as_numpy("sequence_length").tolist() == [[4]]
    told = result.get_output("output_ids")
    shape, parameters = (told["shape"], told["parameters"]) if isinstance(told, dict) else (told.shape, told.parameters)
    assert list(shape) == [1, 1, 4]
    size = parameters["shared_memory_byte_size"]
    assert (size if isinstance(size, int) else size.int64_param) == 16
    start = 1024 + 16
    assert np.frombuffer(memory.buf[start : start + 16], np.int32).tolist() == [1, 2, 3, EOS]


@PROTOCOLS
def test_text_goes_both_ways(kserve: Serve, memory: SharedMemory, library: ModuleType):
    client = connect(library, kserve(FakeManager(says("Grüße"))))
    client.register_system_shared_memory("r", memory.name, 4096)
    given = bytes_element("hi ")
    memory.buf[: len(given)] = given
    text = library.InferInput("text_input", [1, 1], "BYTES")
    text.set_shared_memory("r", len(given))
    output = library.InferRequestedOutput("text_output")
    output.set_shared_memory("r", 100, offset=100)
    client.infer("m", [text, *tensors(library, max_tokens=9)], outputs=[output])
    expected = bytes_element("hi Grüße")
    assert bytes(memory.buf[100 : 100 + len(expected)]) == expected


@PROTOCOLS
def test_the_utility_of_the_client(kserve: Serve, library: ModuleType):
    shm = pytest.importorskip("tritonclient.utils.shared_memory", reason="old clients need pkg_resources")
    client = connect(library, kserve(FakeManager(echoes)))
    region = shm.create_shared_memory_region("ids", "/aotllm_test_ids", 64)
    try:
        shm.set_shared_memory_region(region, [np.array([[1, 2]], np.int32)])
        client.register_system_shared_memory("ids", "/aotllm_test_ids", 64)
        ids = library.InferInput("input_ids", [1, 2], "INT32")
        ids.set_shared_memory("ids", 8)
        output = library.InferRequestedOutput("output_ids")
        output.set_shared_memory("ids", 32, offset=16)
        rest = tensors(library, input_lengths=2, request_output_len=2)
        client.infer("tensorrt_llm", [ids, *rest], outputs=[output])
        assert shm.get_contents_as_numpy(region, np.int32, [1, 1, 4], offset=16).tolist() == [[[1, 2, 1, 2]]]
    finally:
        shm.destroy_shared_memory_region(region)


@PROTOCOLS
def test_the_table_of_regions(kserve: Serve, memory: SharedMemory, library: ModuleType):
    server = kserve(FakeManager())
    client = connect(library, server)
    client.register_system_shared_memory("a", memory.name, 100, offset=8)
    with pytest.raises(InferenceServerException, match="'a' is registered already"):
        client.register_system_shared_memory("a", memory.name, 100)
    client.register_system_shared_memory("b", memory.name, 4096)
    # Whichever protocol: it is the same table.
    other = connect(tritonclient.http if library is tritonclient.grpc else tritonclient.grpc, server)
    assert _regions(other) == {"a": (memory.name, 8, 100), "b": (memory.name, 0, 4096)}
    assert _regions(client, "a") == {"a": (memory.name, 8, 100)}
    client.unregister_system_shared_memory("a")
    client.unregister_system_shared_memory("never registered")
    assert list(_regions(other)) == ["b"]
    with pytest.raises(InferenceServerException, match="no region 'a'"):
        client.get_system_shared_memory_status("a")
    client.unregister_system_shared_memory()
    assert _regions(other) == {}


def _regions(client: Any, name: str = "") -> dict[str, tuple[str, int, int]]:
    status = client.get_system_shared_memory_status(name)
    if isinstance(status, list):
        return {r["name"]: (r["key"], r["offset"], r["byte_size"]) for r in status}
    return {r.name: (r.key, r.offset, r.byte_size) for r in status.regions.values()}


@PROTOCOLS
@pytest.mark.parametrize("how", ["removed", "cut short"])
def test_a_region_that_goes_is_an_error_and_no_crash(
    kserve: Serve, memory: SharedMemory, library: ModuleType, how: str
):
    client = connect(library, kserve(FakeManager(says("sea"))))
    client.register_system_shared_memory("r", memory.name, 4096)
    if how == "removed":
        memory.unlink()
    else:
        os.truncate(Path("/dev/shm") / memory.name, 10)
    text = library.InferInput("text_input", [1, 1], "BYTES")
    text.set_shared_memory("r", 8)
    with pytest.raises(InferenceServerException, match="cannot open shared memory|is smaller than registered"):
        client.infer("m", [text, *tensors(library, max_tokens=9)])
    output = library.InferRequestedOutput("text_output")
    output.set_shared_memory("r", 100)
    with pytest.raises(InferenceServerException, match="cannot open shared memory|is smaller than registered"):
        client.infer("m", prompt(library), outputs=[output])
    assert client.infer("m", prompt(library)).as_numpy("text_output")[0] in (b"hisea", "hisea")


@PROTOCOLS
@pytest.mark.parametrize(
    ("size", "offset", "message"),
    [
        (4096, 1, "lie outside of the region"),
        (2**62, 0, "lie outside of the region"),
        (8, 2**62, "lie outside of the region"),
        (3, 0, "has 4 bytes, got 3|do not fit in 3 bytes"),
    ],
)
def test_an_input_lies_within_its_region(
    kserve: Serve, memory: SharedMemory, library: ModuleType, size: int, offset: int, message: str
):
    client = connect(library, kserve(FakeManager()))
    client.register_system_shared_memory("r", memory.name, 4096)
    text = library.InferInput("text_input", [1, 1], "BYTES")
    text.set_shared_memory("r", size, offset=offset)
    with pytest.raises(InferenceServerException, match=message):
        client.infer("m", [text, *tensors(library, max_tokens=9)])


@PROTOCOLS
def test_an_output_that_does_not_fit(kserve: Serve, memory: SharedMemory, library: ModuleType):
    client = connect(library, kserve(FakeManager(says("sea"))))
    client.register_system_shared_memory("r", memory.name, 4096)
    for size, name, message in ((5, "r", "has 9 bytes, but shared_memory_byte_size allows 5"), (9, "x", "no region")):
        output = library.InferRequestedOutput("text_output")
        output.set_shared_memory(name, size)
        with pytest.raises(InferenceServerException, match=message):
            client.infer("m", prompt(library), outputs=[output])
    assert bytes(memory.buf[:16]) == bytes(16)


def register(regions: SystemSharedMemory, *given: Any) -> None:
    asyncio.run(regions.register(*given))


@pytest.mark.parametrize(
    "key",
    ["", "/", "..", "/..", ".", "../etc/passwd", "/../etc/passwd", "a/b", "//a", "/a\0b", "x" * 256, "\ud800", None, 7],
)
def test_a_key_is_one_name_below_the_folder_of_shared_memory(key: Any):
    with pytest.raises(InvalidRequest, match=r"the key of a region|cannot open"):
        register(SystemSharedMemory(LocalTable()), "r", key, 0, 8)


def test_links_folders_and_pipes_are_no_shared_memory(tmp_path: Path):
    secret = tmp_path / "secret"
    secret.write_bytes(bytes(64))
    folder = Path("/dev/shm")
    names = [folder / f"aotllm_test_{kind}_{os.getpid()}" for kind in ("link", "folder", "pipe")]
    names[0].symlink_to(secret)
    names[1].mkdir()
    os.mkfifo(names[2])
    try:
        for path in names:
            with pytest.raises(InvalidRequest):
                register(SystemSharedMemory(LocalTable()), "r", path.name, 0, 8)
    finally:
        names[0].unlink()
        names[1].rmdir()
        names[2].unlink()


@pytest.mark.parametrize(
    ("offset", "size"),
    [(0, 0), (-1, 8), (0, -1), (0, 4097), (4096, 1), (2**63, 8), (0, 2**63), (2**62, 2**62), (0, True), ("0", 8)],
)
def test_a_region_lies_within_its_memory(memory: SharedMemory, offset: Any, size: Any):
    with pytest.raises(InvalidRequest):
        register(SystemSharedMemory(LocalTable()), "r", memory.name, offset, size)


def test_errors_of_the_table(memory: SharedMemory):
    regions = SystemSharedMemory(LocalTable())
    with pytest.raises(InvalidRequest, match="1 to 1024 characters"):
        register(regions, "", memory.name, 0, 8)
    register(regions, "r", memory.name, 0, 8)
    with pytest.raises(RegionExists):
        register(regions, "r", memory.name, 0, 8)
    for call in (lambda: regions.read("x", 0, 1), lambda: regions.write("x", 0, b"a"), lambda: regions.regions("x")):
        with pytest.raises(RegionNotFound):
            call()
    for offset, size in ((-1, 4), (0, -1), (0, 9), (8, 1)):
        with pytest.raises(AotllmError):
            regions.read("r", offset, size)


def test_no_files_stay_open(memory: SharedMemory):
    regions = SystemSharedMemory(LocalTable())
    register(regions, "r", memory.name, 0, 4096)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        regions.write("r", 8, b"sea")
        assert regions.read("r", 8, 3) == b"sea"
        with pytest.raises(InvalidRequest):
            regions.read("r", 4096, 1)
    assert len(os.listdir("/proc/self/fd")) == before
