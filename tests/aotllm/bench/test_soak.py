"""Windows and drifts of a long run, and the server's memory."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from aotllm.bench.http_client import HttpClient
from aotllm.bench.record import RequestFailed, RequestRecord
from aotllm.bench.server_memory import ServerMemory
from aotllm.bench.soak import SoakMonitor, SoakWindow, drift_lines, drifts_of
from tests.aotllm.bench.socket_server import SocketServer, http
from tests.aotllm.bench.virtual_time import clock, run_virtual


def record(sent: float, ttft: float, tokens: int = 3, gap: float = 0.5) -> RequestRecord:
    made = RequestRecord(sent=sent)
    for index in range(tokens):
        made.chunk(sent + ttft + index * gap, "x")
    made.finished = made.ended = made.chunk_times[-1]
    made.usage(5, tokens, None)
    return made


FAILED = RequestRecord(sent=0.0, ended=1.0, error=RequestFailed("timeout", "why"))


def test_a_window_is_of_the_requests_that_ended_in_it():
    window = SoakWindow.of([record(0, 1.0), record(0, 3.0), FAILED], 60.0, 120.0, 2**20)
    assert window == SoakWindow(
        end=120.0,
        completed=2,
        failed=1,
        output_throughput=pytest.approx(6 / 60),
        median_ttft=pytest.approx(2.0),
        p99_ttft=pytest.approx(1.0 + 2.0 * 0.99),
        median_tpot=pytest.approx(0.5),
        median_e2el=pytest.approx(3.0),
        memory=2**20,
    )
    assert "2.0 min      2 done     1 failed" in window.line()
    assert "memory 1.0 MiB" in window.line()


def test_a_window_in_which_nothing_ended():
    window = SoakWindow.of([], 0.0, 60.0, None)
    assert (window.completed, window.median_ttft, window.output_throughput) == (0, None, 0.0)
    assert "TTFT - (p99 -)" in window.line()


def windows(memories: list[int | None]) -> list[SoakWindow]:
    empty = SoakWindow.of([], 0.0, 60.0, None)
    return [replace(empty, end=60.0 * (i + 1), memory=memory) for i, memory in enumerate(memories)]


def test_a_drift_is_the_line_through_the_windows_but_the_first():
    drift = drifts_of(windows([5, 100, 110, 120, 130]))["memory"]
    assert (drift.first, drift.last) == (pytest.approx(100), pytest.approx(130))
    assert drift.per_hour == pytest.approx(600)
    assert drift.relative == pytest.approx(0.3)


def test_what_goes_up_and_down_does_not_drift():
    drift = drifts_of(windows([0, 100, 200, 200, 100]))["memory"]
    assert drift.per_hour == pytest.approx(0.0, abs=1e-9)


def test_a_figure_that_is_missing_has_no_drift():
    assert "memory" not in drifts_of(windows([None, 1, None, 2, None]))
    assert "median_ttft" not in drifts_of(windows([1, 2, 3, 4]))
    assert drift_lines(windows([1, 2])) == ["too short for a drift: three minutes are needed"]


def test_a_drift_for_people():
    lines = drift_lines(windows([0, 2**20, 2 * 2**20, 3 * 2**20]))
    assert "memory: 1.00 → 3.00 MiB (+200.0%; +60.00 per hour)" in lines


def test_the_monitor_closes_a_window_a_minute():
    told: list[str] = []
    memory = iter([10, 20, 30])

    async def read() -> int:
        return next(memory)

    async def work(seconds: float) -> SoakMonitor:
        monitor = SoakMonitor(read, told.append, clock)
        task = asyncio.ensure_future(monitor.run())
        for at in (10.0, 50.0, 70.0):
            asyncio.get_running_loop().call_later(at, monitor.add, record(0.0, 1.0))
        await asyncio.sleep(seconds)
        task.cancel()
        await asyncio.wait({task})
        return monitor

    monitor = run_virtual(work(155.0))  # the last window has 35 of its 60 seconds
    assert [(w.end, w.completed, w.memory) for w in monitor.windows] == [
        (pytest.approx(60), 2, 10),
        (pytest.approx(120), 1, 20),
        (pytest.approx(155), 0, 30),
    ]
    assert len(told) == 3
    assert [window["memory"] for window in monitor.json()["windows"]] == [10, 20, 30]
    memory = iter([10, 20, 30])
    assert len(run_virtual(work(140.0)).windows) == 2  # one of 20 seconds says too little


def process(proc: Path, pid: int, kilobytes: int, children: str = "") -> None:
    task = proc / f"{pid}/task/{pid}"
    task.mkdir(parents=True)
    (proc / f"{pid}/status").write_text(f"Name:\tx\nVmSize:\t 9 kB\nVmRSS:\t   {kilobytes} kB\n")
    (task / "children").write_text(children)


def test_the_memory_of_a_process_and_its_children(tmp_path: Path):
    process(tmp_path, 1, 100, "2 3 ")
    process(tmp_path, 2, 10, "4 ")
    process(tmp_path, 4, 1)
    # 3 has ended meanwhile
    assert asyncio.run(ServerMemory(1, proc=tmp_path).read()) == 111 * 1024
    assert asyncio.run(ServerMemory(9, proc=tmp_path).read()) is None


@pytest.mark.parametrize(
    ("page", "bytes_"),
    [
        (b"# HELP process_resident_memory_bytes x\nprocess_resident_memory_bytes 1.5e+06\nother 3\n", 1_500_000),
        (b'process_resident_memory_bytes{pid="1"} 10\nprocess_resident_memory_bytes{pid="2"} 5.0\n', 15),
        (b"other 3\n", None),
    ],
)
def test_the_memory_that_a_metrics_page_tells(page: bytes, bytes_: int | None):
    server = SocketServer(lambda request: http(page))

    async def read(port: int) -> int | None:
        return await ServerMemory(None, (HttpClient(f"http://127.0.0.1:{port}"), "/metrics")).read()

    assert server.run(read) == bytes_
    assert server.requests[0].line == "GET /metrics HTTP/1.1"


def test_no_memory_where_nobody_tells():
    assert asyncio.run(ServerMemory(None).read()) is None
    assert asyncio.run(ServerMemory(None, (HttpClient("http://127.0.0.1:1"), "/metrics")).read()) is None
