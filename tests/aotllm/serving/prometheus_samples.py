"""What /metrics says, by name and labels."""

from __future__ import annotations

import re

from prometheus_client.parser import text_string_to_metric_families

from tests.aotllm.serving.http_client import Client


class Samples:
    """The samples of a text in Prometheus' format."""

    def __init__(self, text: str) -> None:
        self.types = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))
        # Without types the parser of the client library leaves names as they are.
        bare = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE)
        self._samples = [sample for family in text_string_to_metric_families(bare) for sample in family.samples]
        self.names = {sample.name for sample in self._samples}

    def __call__(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that have these labels."""
        found = [s.value for s in self._samples if s.name == name and labels.items() <= s.labels.items()]
        assert found, f"no {name} {labels}"
        return sum(found)


def metrics_of(client: Client) -> Samples:
    response = client.get("/metrics")
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    return Samples(response.text)
