"""The dashboard in deploy/grafana asks for nothing that the server does not expose."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.aotllm.fake_manager import says
from tests.aotllm.serving.http_client import Ask
from tests.aotllm.serving.test_telemetry_metrics import EngineManager

DASHBOARD = Path(__file__).parents[3] / "deploy" / "grafana" / "aotllm.json"
METRIC = re.compile(r"aotllm:[a-z0-9_]+")
BY = re.compile(r"by \(([^)]*)\)")
SELECTORS = re.compile(r"(aotllm:[a-z0-9_]+)\{([^}]*)\}")


def load() -> dict[str, Any]:
    dashboard: dict[str, Any] = json.loads(DASHBOARD.read_text())
    return dashboard


def panels() -> list[dict[str, Any]]:
    return [panel for panel in load()["panels"] if panel["type"] != "row"]


def queries() -> list[tuple[str, str, str]]:
    """(panel, PromQL, legend)"""
    return [(p["title"], t["expr"], t["legendFormat"]) for p in panels() for t in p["targets"]]


@pytest.fixture
def labels(ask: Ask) -> dict[str, set[str]]:
    """What is exposed after a few requests: sample name -> its labels."""
    client = ask(EngineManager(says("ok"), num_cached_tokens=1))
    client.post("/v1/completions", {"prompt": "a"})
    client.post("/v1/completions", {"prompt": "a", "n": 2, "stream": True, "max_tokens": 1})
    client.post("/v1/completions", {"prompt": [10**6]})
    bare = re.sub(r"^#.*\n", "", client.get("/metrics").text, flags=re.MULTILINE)
    return {s.name: set(s.labels) for family in text_string_to_metric_families(bare) for s in family.samples}


def test_every_metric_of_the_dashboard_is_exposed(labels: dict[str, set[str]]):
    asked = {name: title for title, query, _ in queries() for name in METRIC.findall(query)}
    assert len(asked) > 20
    assert {name: title for name, title in asked.items() if name not in labels} == {}
    variable = load()["templating"]["list"][1]["query"]["query"]
    assert set(METRIC.findall(variable)) <= labels.keys()


def test_every_label_of_the_dashboard_is_there(labels: dict[str, set[str]]):
    for title, query, legend in queries():
        for name, selector in SELECTORS.findall(query):
            used = set(re.findall(r"(\w+)\s*[=!]~?\s*\"", selector))
            assert used <= labels[name], (title, name)
        grouped = {label.strip() for found in BY.findall(query) for label in found.split(",")}
        anywhere = set().union(*(labels[name] for name in METRIC.findall(query)))
        assert grouped <= anywhere, title
        shown = set(re.findall(r"\{\{(\w+)\}\}", legend))
        assert shown <= (grouped or anywhere), f"{title}: the legend shows what the query does not keep"


@pytest.mark.parametrize(("title", "query"), [(title, query) for title, query, _ in queries()])
def test_queries_are_sound(title: str, query: str):
    assert query.count("(") == query.count(")")
    assert query.count("{") == query.count("}")
    for name, rest in re.findall(r"(aotllm:[a-z0-9_]+)(\{[^}]*\}(?:\[[^\]]*\])?|\[[^\]]*\])?", query):
        counter = name.endswith(("_total", "_bucket", "_sum", "_count"))
        assert counter == rest.endswith("[$__rate_interval]"), f"{title}: a rate of counters, and of nothing else"


def test_panels_do_not_overlap():
    taken: dict[tuple[int, int], str] = {}
    for panel in load()["panels"]:
        where = panel["gridPos"]
        assert where["x"] + where["w"] <= 24
        for x in range(where["x"], where["x"] + where["w"]):
            for y in range(where["y"], where["y"] + where["h"]):
                assert (x, y) not in taken, f"{panel['title']} lies on {taken.get((x, y))}"
                taken[x, y] = panel["title"]


def test_ids_differ_and_the_data_source_is_chosen_by_who_imports():
    dashboard = load()
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)
    assert {panel["datasource"]["uid"] for panel in panels()} == {"${datasource}"}
    assert "id" not in dashboard
