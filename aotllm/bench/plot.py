"""The throughput-latency curve of a sweep, as self-contained SVG or HTML, or as PNG by matplotlib."""

from __future__ import annotations

import html
import importlib.util
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from aotllm.bench.latencies import LATENCY_NAMES
from aotllm.bench.result import BenchPoint
from aotllm.errors import AotllmError

PANELS = ("ttft", "tpot", "e2el")
_COLOURS = {"median": "#1f6fb2", "p99": "#c8553d"}
_PANEL_WIDTH, _PANEL_HEIGHT = 400, 330
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 20, 44, 56
_HEADER = 54


@dataclass(frozen=True)
class Curve:
    """One line: latency over throughput."""

    name: str
    """median | p99"""
    points: tuple[tuple[float, float, str], ...]
    """(output tokens/s, milliseconds, load)"""


def curves_of(points: Sequence[BenchPoint], metric: str) -> list[Curve]:
    """Median and 99th percentile in the order of the sweep; points at which nothing succeeded are left out."""
    shown = [point for point in points if point.measures.latencies[metric].count]
    values: dict[str, Callable[[BenchPoint], float]] = {
        "median": lambda point: point.measures.latencies[metric].median,
        "p99": lambda point: point.measures.latencies[metric].p99,
    }
    return [
        Curve(name, tuple((p.measures.output_throughput, value(p) * 1000, p.load) for p in shown))
        for name, value in values.items()
    ]


def write_plot(points: Sequence[BenchPoint], path: Path) -> None:
    """Write the file that the suffix names: .html, .svg or .png.

    Raises:
        ImportError: PNG without matplotlib; `check_plot` tells beforehand.
        OSError: the file cannot be written.
    """
    if path.suffix.lower() == ".png":
        _write_png(points, path)
        return
    svg = svg_of(points)
    path.write_text(_page(points, svg) if path.suffix.lower() == ".html" else svg, encoding="utf-8")


def check_plot(path: Path) -> None:
    """Before a long run: can such a file be written afterwards? Raises AotllmError."""
    if path.suffix.lower() == ".png" and importlib.util.find_spec("matplotlib") is None:
        raise AotllmError("--plot FILE.png needs matplotlib: pip install matplotlib, or take .svg or .html")


def title_of(points: Sequence[BenchPoint]) -> str:
    """Model and workload."""
    context = points[0].context
    return f"{context.model}, {context.workload}"


def svg_of(points: Sequence[BenchPoint]) -> str:
    """Three panels beside each other."""
    width, height = _PANEL_WIDTH * len(PANELS), _HEADER + _PANEL_HEIGHT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="system-ui, sans-serif" font-size="12" fill="#333">',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        f'<text x="{_LEFT}" y="26" font-size="16" font-weight="600">{html.escape(title_of(points))}</text>',
    ]
    for index, (name, colour) in enumerate(_COLOURS.items()):
        x = _LEFT + 80 * index
        parts.append(f'<line x1="{x}" y1="42" x2="{x + 22}" y2="42" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<text x="{x + 28}" y="46">{name}</text>')
    for index, metric in enumerate(PANELS):
        parts.append(f'<g transform="translate({index * _PANEL_WIDTH} {_HEADER})">')
        parts += _panel(LATENCY_NAMES[metric], curves_of(points, metric))
        parts.append("</g>")
    return "\n".join([*parts, "</svg>", ""])


def _panel(title: str, curves: Sequence[Curve]) -> list[str]:
    right, bottom = _PANEL_WIDTH - _RIGHT, _PANEL_HEIGHT - _BOTTOM
    parts = [f'<text x="{_LEFT}" y="{_TOP - 16}" font-weight="600">{title} [ms]</text>']
    shown = [point for curve in curves for point in curve.points]
    if not shown:
        return [*parts, f'<text x="{_LEFT}" y="{_TOP + 20}">no request has succeeded</text>']
    x_ticks, y_ticks = ticks(max(p[0] for p in shown)), ticks(max(p[1] for p in shown))

    def x_of(value: float) -> float:
        return _LEFT + (right - _LEFT) * value / x_ticks[-1]

    def y_of(value: float) -> float:
        return bottom - (bottom - _TOP) * value / y_ticks[-1]

    for tick in y_ticks:
        y = y_of(tick)
        parts.append(f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}" stroke="#e4e4e4"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for tick in x_ticks:
        parts.append(f'<text x="{x_of(tick):.1f}" y="{bottom + 18}" text-anchor="middle">{tick:g}</text>')
    parts.append(f'<line x1="{_LEFT}" y1="{bottom}" x2="{right}" y2="{bottom}" stroke="#888"/>')
    middle = (_LEFT + right) / 2
    parts.append(f'<text x="{middle}" y="{bottom + 40}" text-anchor="middle">output throughput [tokens/s]</text>')
    for curve in curves:
        colour = _COLOURS[curve.name]
        places = [(x_of(x), y_of(y)) for x, y, _ in curve.points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for (x, y), (throughput, latency, load) in zip(places, curve.points, strict=True):
            tip = html.escape(f"{load}: {curve.name} {latency:.1f} ms at {throughput:.1f} tokens/s")
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"><title>{tip}</title></circle>')
    return parts + _labels(curves[-1], x_of, y_of)


def _labels(curve: Curve, x_of: Callable[[float], float], y_of: Callable[[float], float]) -> list[str]:
    """The load beside the points of the upper curve; one that would lie on another label is left out."""
    parts: list[str] = []
    taken: list[tuple[float, float]] = []
    for throughput, latency, load in curve.points:
        x, y = x_of(throughput), y_of(latency) - 9
        if any(abs(x - other_x) < 26 and abs(y - other_y) < 12 for other_x, other_y in taken):
            continue
        taken.append((x, y))
        halo = 'paint-order="stroke" stroke="#fff" stroke-width="3"'  # where a line passes behind it
        place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="middle" font-size="10"'
        parts.append(f"<text {place} {halo}>{short_load(load)}</text>")
    return parts


def short_load(load: str) -> str:
    """`concurrency 8` → `c=8`."""
    return html.escape(load.replace("concurrency ", "c=").replace("rate ", "r="))


def ticks(largest: float) -> list[float]:
    """About five round values from 0 to the first at or above `largest`."""
    if largest <= 0:
        return [0.0, 1.0]
    raw = largest / 4
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * (1 - 1e-9))
    return [step * index for index in range(math.ceil(largest / step * (1 - 1e-9)) + 1)]


def _page(points: Sequence[BenchPoint], svg: str) -> str:
    headings = ["load", "requests/s", "output tokens/s", "failed"]
    headings += [f"{metric.upper()} {name} [ms]" for metric in PANELS for name in _COLOURS]
    rows = []
    for point in points:
        measures = point.measures
        cells = [point.load, f"{measures.request_throughput:.2f}", f"{measures.output_throughput:.1f}", measures.failed]
        for metric in PANELS:
            distribution = measures.latencies[metric]
            cells += [f"{distribution.median * 1000:.1f}", f"{distribution.p99 * 1000:.1f}"]
        rows.append("<tr>" + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in cells) + "</tr>")
    head = "".join(f"<th>{heading}</th>" for heading in headings)
    context = points[0].context
    about = f"{context.backend} at {context.url}, {points[0].date:%Y-%m-%d %H:%M}; prompts {context.lengths_by}"
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title_of(points))}</title>
<style>
body {{ font: 14px system-ui, sans-serif; color: #333; margin: 24px; }}
svg {{ max-width: 100%; height: auto; }}
table {{ border-collapse: collapse; margin-top: 16px; }}
th, td {{ padding: 4px 12px; border-bottom: 1px solid #ddd; text-align: right; }}
th:first-child, td:first-child {{ text-align: left; white-space: nowrap; }}
</style></head><body>
{svg}<p>{html.escape(about)}</p>
<table><thead><tr>{head}</tr></thead><tbody>
{chr(10).join(rows)}
</tbody></table>
</body></html>
"""


def _write_png(points: Sequence[BenchPoint], path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4 * len(PANELS), 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title_of(points))
    for axes, metric in zip(figure.subplots(1, len(PANELS)), PANELS, strict=True):
        for curve in curves_of(points, metric):
            x, y = [p[0] for p in curve.points], [p[1] for p in curve.points]
            axes.plot(x, y, marker="o", color=_COLOURS[curve.name], label=curve.name)
        for throughput, latency, load in curve.points:
            text = short_load(load)
            axes.annotate(text, (throughput, latency), (0, 6), textcoords="offset points", ha="center", fontsize=8)
        axes.set_title(f"{LATENCY_NAMES[metric]} [ms]", fontsize=10)
        axes.set_xlabel("output throughput [tokens/s]")
        axes.margins(0.08, 0.12)  # room for the labels
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=120)
