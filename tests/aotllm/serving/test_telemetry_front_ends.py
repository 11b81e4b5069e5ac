"""Several front ends of one server, as processes: each of them exposes what all of them have counted."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from aotllm.serving.telemetry.request_metrics import RequestMetrics
from tests.aotllm.serving.prometheus_samples import Samples

FRONT_END = """
import asyncio, sys
import httpx
from aotllm import Executor
from aotllm.serving import app_of
from tests.aotllm.fake_manager import FakeEngine, FakeManager, says

async def main(requests):
    with Executor(FakeEngine(), manager_factory=lambda *_: FakeManager(says("four"))) as executor:
        transport = httpx.ASGITransport(app_of({"m": executor}, log_requests=False))
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            for _ in range(requests):
                await client.post("/v1/completions", json={"prompt": "a"})
            print((await client.get("/metrics")).text, flush=True)
            if sys.stdin.readline() == "again\\n":
                print("----", (await client.get("/metrics")).text, sep="\\n")

asyncio.run(main(int(sys.argv[1])))
"""


def front_end(folder: Path | None, requests: int) -> subprocess.Popen[str]:
    environment = {k: v for k, v in os.environ.items() if k != "PROMETHEUS_MULTIPROC_DIR"}
    if folder is not None:
        environment["PROMETHEUS_MULTIPROC_DIR"] = str(folder)
    return subprocess.Popen(
        [sys.executable, "-c", FRONT_END, str(requests)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
    )  # fmt: skip


def test_every_front_end_exposes_the_sum_of_all_of_them_dead_ones_too(tmp_path: Path):
    with front_end(tmp_path, 2) as first:
        assert first.stdout is not None
        for line in first.stdout:  # it has served its own
            if line.startswith("nv_inference_exec_count"):
                break
        died, _ = front_end(tmp_path, 3).communicate("", timeout=120)
        output, _ = first.communicate("again\n", timeout=120)
    later = output.split("----\n")[1]
    for text in (died, later):
        counts = Samples(text)
        assert counts("aotllm:request_success_total", finished_reason="stop", model_name="m", engine="0") == 5
        assert counts("aotllm:generation_tokens_total") == 5 * 5
        assert counts("aotllm:inter_token_latency_seconds_count") == 5 * 4
        assert counts("aotllm:time_to_first_token_seconds_bucket", le="+Inf") == 5
        assert counts("nv_inference_request_success", model="m") == 5
        # Figures of an engine are not summed over those who ask it, nor are those of the process that answers shown.
        assert counts("aotllm:engine_steps_total") == 3
        assert "process_resident_memory_bytes" not in counts.names


def test_one_process_needs_no_folder():
    text, _ = front_end(None, 2).communicate("", timeout=120)
    counts = Samples(text)
    assert counts("aotllm:request_success_total", finished_reason="stop") == 2
    assert counts("process_resident_memory_bytes") > 0


def test_a_folder_that_comes_too_late_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any):
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    RequestMetrics()
    assert "PROMETHEUS_MULTIPROC_DIR was set after" in caplog.text
