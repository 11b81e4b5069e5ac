"""Results as JSON, as tables and as curves."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from rich.console import Console

from aotllm.bench.arrivals import Arrivals, RampUp
from aotllm.bench.plot import check_plot, curves_of, svg_of, ticks, write_plot
from aotllm.bench.report import print_point, print_sweep, remarks
from aotllm.bench.result import BenchPoint
from aotllm.errors import AotllmError
from tests.aotllm.bench.points import CONTEXT, FAILED, point, record

_KEYS = """
date endpoint_type backend model_id tokenizer_id num_prompts request_rate burstiness max_concurrency duration completed
failed total_input_tokens total_output_tokens request_throughput request_goodput output_throughput
total_token_throughput max_output_tokens_per_s max_concurrent_requests input_lens output_lens ttfts itls
generated_texts errors
mean_ttft_ms median_ttft_ms std_ttft_ms p50_ttft_ms p99.9_ttft_ms mean_tpot_ms median_tpot_ms std_tpot_ms p50_tpot_ms
p99.9_tpot_ms mean_itl_ms median_itl_ms std_itl_ms p50_itl_ms p99.9_itl_ms mean_e2el_ms median_e2el_ms std_e2el_ms
p50_e2el_ms p99.9_e2el_ms
"""


def test_the_keys_are_those_of_vllm():
    assert set(_KEYS.split()) <= set(point().json())


def test_values():
    value = json.loads(json.dumps(point().json(), allow_nan=False))
    expected = {
        "date": "20260102-030405",
        "num_prompts": 3,
        "completed": 2,
        "failed": 1,
        "error_counts": {"http_503": 1},
        "request_rate": "inf",
        "burstiness": 1.0,
        "max_concurrency": 2,
        "total_input_tokens": 10,
        "total_output_tokens": 4,
        "request_throughput": 1.0,
        "request_goodput": 0.5,
        "output_throughput": 2.0,
        "total_token_throughput": 7.0,
        "prefix_hit_rate": 0.2,
        "input_lens": [5, 4, 5],
        "output_lens": [3, 0, 1],
        "wanted_output_lens": [3, 0, 1],
        "start_times": [0.0, 0.5, 1.0],
        "ttfts": pytest.approx([0.5, 0.0, 0.25]),
        "generated_texts": ["xxx", "", "x"],
        "errors": ["", "HTTP 503: full", ""],
        "mean_ttft_ms": pytest.approx(375.0),
        "mean_tpot_ms": pytest.approx(100.0),
        "mean_e2el_ms": pytest.approx((700 + 250) / 2),
    }
    assert {key: value[key] for key in expected} == expected
    assert [len(gaps) for gaps in value["itls"]] == [2, 0, 0]


def test_details_and_latencies_can_be_left_out():
    value = point(context=replace(CONTEXT, detailed=False, metrics=["ttft"])).json()
    assert not {"itls", "generated_texts", "errors", "mean_itl_ms"} & set(value)
    assert "mean_ttft_ms" in value


@pytest.mark.parametrize(
    ("made", "load"),
    [
        (point(), "concurrency 2"),
        (point(None), "rate inf"),
        (point(None, arrivals=Arrivals(2.5)), "rate 2.5"),
        (point(8, arrivals=Arrivals(2.0)), "rate 2, concurrency 8"),
        (point(None, arrivals=Arrivals(math.inf, 1.0, RampUp(1.0, 4.0))), "rate 1 … 4"),
    ],
)
def test_what_tells_points_apart(made: BenchPoint, load: str):
    assert made.load == load


def printed(*args: Any, print_: Any = print_point) -> str:
    console = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    print_(*args, console)
    return console.export_text()


def test_a_table_of_one_point():
    text = printed(point())
    assert re.search(r"requests +2 completed, 1 failed", text)
    assert re.search(r"output throughput +2\.0 tokens/s", text)
    assert re.search(r"request goodput +0\.50 requests/s", text)
    assert re.search(r"prefix hit rate +20\.0%", text)
    assert re.search(r"mean +median +std +p50 +p99\.9", text)
    assert re.search(r"TTFT \(time to first token\) +375\.00 +375\.00 +125\.00 +375\.00", text)
    assert "m<1> at http://host" in text
    assert "failed, http_503: 1, such as: HTTP 503: full" in text


def test_a_table_of_a_sweep():
    text = printed([point(1), point(4)], print_=print_sweep)
    assert re.search(r"concurrency 1 +1 +1\.00 +0\.50 +2\.0 +375\.0", text)
    assert "concurrency 4" in text


def late() -> BenchPoint:
    slow = record(10.5, 0.1)
    slow.due = 10.0
    return point(None, [slow])


def uncounted() -> BenchPoint:
    silent = record(10.0, 0.1)
    silent.prompt_tokens = silent.output_tokens = None
    return point(records=[silent])


@pytest.mark.parametrize(
    ("made", "remark"),
    [
        (point(skipped=4), "4 turns were not asked"),
        (point(interrupted=True), "interrupted: these are the requests that had ended"),
        (point(), "wanted and measured: input 4.0 and 5.0, output 2.0 and 2.0 (prompts counted)"),
        (late(), "is too slow for this load: one request in a hundred was sent more than 500 ms late"),
        (uncounted(), "each chunk was counted as one"),
        (uncounted(), "input tokens are those wanted"),
    ],
)
def test_remarks(made: BenchPoint, remark: str):
    assert remark in "\n".join(remarks(made))


def test_a_point_at_which_all_failed_can_be_shown():
    assert "0 completed, 1 failed" in printed(point(records=[FAILED]))


# Curves --------------------------------------------------------------------------------------------------------------

SWEEP = [
    point(1, [record(10.0, 0.1)]),
    point(4, [record(10.0, 0.2), record(10.0, 0.4)]),
    point(8, [FAILED]),
]


def test_a_curve_is_latency_over_throughput():
    median, p99 = curves_of(SWEEP, "ttft")
    assert median.points == (
        (pytest.approx(1.5), pytest.approx(100.0), "concurrency 1"),
        (pytest.approx(3.0), pytest.approx(300.0), "concurrency 4"),
    )
    assert p99.points[1][1] == pytest.approx(200 + 200 * 0.99)


@pytest.mark.parametrize(
    ("largest", "expected"),
    [
        (4.0, [0, 1, 2, 3, 4]),
        (4.1, [0, 2, 4, 6]),
        (97.0, [0, 25, 50, 75, 100]),
        (0.031, [0, 0.01, 0.02, 0.03, 0.04]),
        (100.0, [0, 25, 50, 75, 100]),
        (1900.0, [0, 500, 1000, 1500, 2000]),
        (0.0, [0, 1]),
    ],
)
def test_ticks_are_round(largest: float, expected: list[float]):
    assert ticks(largest) == pytest.approx(expected)


SVG = "{http://www.w3.org/2000/svg}"


def test_the_points_stand_where_the_axes_say():
    root = ElementTree.fromstring(svg_of(SWEEP))
    panels = root.findall(f"{SVG}g")
    assert len(panels) == 3
    circles = panels[0].findall(f"{SVG}circle")
    texts = {text.text: text for text in panels[0].findall(f"{SVG}text")}
    assert len(circles) == 4
    # The point at 100 ms lies on the grid line of that tick.
    assert float(circles[0].get("cy", 0)) == pytest.approx(float(texts["100"].get("y", 0)) - 4, abs=0.2)
    assert float(circles[1].get("cx", 0)) == pytest.approx(float(texts["3"].get("x", 0)), abs=0.2)
    assert circles[1].findtext(f"{SVG}title") == "concurrency 4: median 300.0 ms at 3.0 tokens/s"
    assert {"c=1", "c=4"} <= set(texts)


def test_nothing_to_draw_is_said():
    assert "no request has succeeded" in svg_of([point(8, [FAILED])])


@pytest.mark.parametrize("suffix", [".html", ".svg"])
def test_files_are_self_contained(tmp_path: Path, suffix: str):
    path = tmp_path / f"curve{suffix}"
    write_plot(SWEEP, path)
    text = path.read_text()
    assert "m&lt;1&gt;" in text
    assert "m<1>" not in text
    assert not re.findall(r"(?:src|href)=", text)
    assert set(re.findall(r"https?://[^\"'<;\s]+", text)) <= {"http://www.w3.org/2000/svg", "http://host,"}


def test_png_by_matplotlib(tmp_path: Path):
    pytest.importorskip("matplotlib")
    write_plot(SWEEP, tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("name", "refused"), [("c.png", True), ("c.PNG", True), ("c.svg", False), ("c.html", False)])
def test_png_without_matplotlib_says_what_to_do_before_the_run(
    name: str, refused: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("importlib.util.find_spec", lambda module: None)
    if not refused:
        check_plot(Path(name))
        return
    with pytest.raises(AotllmError, match="needs matplotlib"):
        check_plot(Path(name))
