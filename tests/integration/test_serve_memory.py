"""What the processes of a server keep in memory: the weights once, and no KV blocks that no token has come to."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from aotllm.engines import Engine
from aotllm.serving.process.supervisor import ENGINE_PROCESS
from tests.integration.running_server import RunningServer, running_server

RANK_FILE = "rank0.engine"


@pytest.fixture(scope="module")
def server(smollm2: Engine) -> Iterator[RunningServer]:
    with running_server(smollm2.path, kv_cache_memory="16384tokens", max_batch_size=8, grpc_port=-1) as server:
        body = {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).status_code == 200
        yield server


def mappings_of(pid: int, name: str) -> list[str]:
    """Permissions of the mappings of a file."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return [line.split()[1] for line in lines if line.endswith(f"/{name}")]


def own_bytes(pid: int) -> int:
    """What a process keeps in memory besides files; what it shares with others, by its part."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    match = re.search(r"^Pss_Anon:\s+(\d+) kB", text, re.MULTILINE)
    assert match is not None
    return int(match[1]) << 10


def test_the_weights_are_mapped_once_and_copied_nowhere(server: RunningServer, smollm2: Engine):
    mapped = {pid: mappings_of(pid, RANK_FILE) for pid in (server.pid, *server.children())}
    (engine_process,) = server.children(ENGINE_PROCESS)
    assert {pid: permissions for pid, permissions in mapped.items() if permissions} == {engine_process: ["r--s"]}
    weights = (smollm2.path / RANK_FILE).stat().st_size
    assert sum(map(own_bytes, mapped)) < 0.8 * weights, "of all processes, a copy of the weights would show"


def test_kv_blocks_take_memory_when_tokens_come(server: RunningServer):
    (engine_process,) = server.children(ENGINE_PROCESS)
    before = own_bytes(engine_process)
    body = {"prompt": [7] * 1024, "max_tokens": 1, "ignore_eos": True}
    assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).status_code == 200
    grown = own_bytes(engine_process) - before
    of_all = 16384 * 23_760  # bytes of a token: 30 layers of 3 heads, K and V, 64 int16 and a scale each
    assert 0.04 * of_all < grown < 0.12 * of_all, "1,024 of 16,384 tokens"
