"""Turns, ratios and the table of the comparison with llama.cpp, without either side."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from bench_llama_cpp import CELLS, Cell, chosen_cells, measure, parse_arguments, table
from foreign_load import ForeignLoad, busy_seconds
from server_peers import proportional_kib


def test_cells_are_chosen_by_name_and_pattern():
    assert chosen_cells("all") == list(CELLS)
    assert chosen_cells("batch64, batch8,decode") == ["decode", "batch8", "batch64"]
    assert chosen_cells("decode@*,server?") == ["decode@1024", "decode@2048", "server1", "server8"]
    with pytest.raises(ValueError, match="there is no 'batch3'; there are prefill512"):
        chosen_cells("decode,batch3")


def test_ratios_are_above_one_where_ours_is_better():
    assert Cell("m", "decode", [100.0, 50.0], [150.0, 100.0]).ratios == [1.5, 2.0]
    assert Cell("m", "load", [0.3], [0.1]).ratios == pytest.approx([3.0])
    assert Cell("m", "memory", [400.0], [500.0]).ratios == [0.8]


def test_a_record_has_all_samples():
    record = json.loads(json.dumps(Cell("m", "decode", [100.0, 50.0, 60.0], [150.0, 100.0, 60.0], 0.25).record()))
    assert record["ratio"] == {"min": 1.0, "median": 1.5, "max": 2.0, "samples": [1.5, 2.0, 1.0]}
    assert (record["theirs"]["median"], record["unit"], record["others"]) == (60.0, "tok/s", 0.25)


def test_the_table():
    cells = [Cell("m", "decode", [1000.0, 50.0], [1500.0, 100.0]), Cell("m", "load", [0.3], [0.1])]
    assert table(cells).splitlines()[2:] == [
        "| m | decode | tok/s | 525 (50–1,000) | 800 (100–1,500) | 1.75 (1.50–2.00) |",
        "| m | load | s | 0.300 | 0.100 | 3.00 |",
    ]


class Sides:
    """A comparison whose figures are the number of the call."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def sides(self, name: str) -> tuple[Callable[[], float], Callable[[], float]]:
        def call(side: str) -> float:
            self.calls.append(f"{name} {side}")
            return float(len(self.calls))

        return (lambda: call("theirs")), (lambda: call("ours"))


def test_both_sides_run_in_turns_and_begin_in_turns():
    sides = Sides()
    seen: list[list[str]] = []
    cells: list[Cell] = []

    def on_pair(measured: list[Cell]) -> None:
        seen.append([cell.name for cell in measured])
        cells[:] = measured

    measure(sides, "m", ["decode", "load"], 2, 1e9, on_pair)  # type: ignore[arg-type]
    assert seen == [["decode"], ["decode", "load"], ["decode", "load"], ["decode", "load"]]
    assert sides.calls == [
        *("decode theirs", "decode ours", "load theirs", "load ours"),
        *("decode ours", "decode theirs", "load ours", "load theirs"),
    ]
    assert [(cell.name, cell.theirs, cell.ours) for cell in cells] == [
        ("decode", [1.0, 6.0], [2.0, 5.0]),
        ("load", [3.0, 8.0], [4.0, 7.0]),
    ]


def test_busy_seconds_count_all_but_idle_time():
    # user nice system idle iowait irq softirq steal guest guest_nice
    assert busy_seconds("cpu  100 20 30 9999 888 4 5 6 77 7\ncpu0 1 2\n", 10.0) == 16.5


class Loads(ForeignLoad):
    """Others used so many CPU-seconds by the time of each look."""

    def __init__(self, looks: list[float]) -> None:
        super().__init__(limit=0.1, attempts=3)
        self._looks = iter(looks)

    def _others(self) -> float:
        return next(self._looks)


def test_the_least_disturbed_attempt_counts():
    values = iter([1.0, 2.0, 3.0])
    value, load = Loads([0, 900, 900, 1000, 1000, 1500]).measure(lambda: next(values))
    assert value == 2.0
    assert load > 0.1
    assert Loads([5, 5]).measure(lambda: 7.0) == (7.0, 0.0)  # nobody else: once is enough


@pytest.mark.parametrize("arguments", [["--cells", "speed"], ["--repeats", "0"], ["--threads", "-1"]])
def test_wrong_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as caught:
        parse_arguments(arguments)
    assert caught.value.code == 2
    assert arguments[0] in capsys.readouterr().err


def test_proportional_memory_of_a_process():
    assert proportional_kib("55d0-7ffc ---p 00000000 [rollup]\nRss:  9000 kB\nPss:  1234 kB\nPss_Anon: 7 kB\n") == 1234
    assert proportional_kib("") == 0
