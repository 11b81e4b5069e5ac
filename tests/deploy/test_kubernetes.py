"""The manifests are valid, agree with each other, and name what the server really has."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from aotllm import Executor
from aotllm.cli import make_app
from aotllm.serving import app_of
from tests.aotllm.fake_manager import FakeManager

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deploy" / "kubernetes"
FILES = sorted(path for path in FOLDER.glob("*.yaml") if path.name != "prometheus-adapter-values.yaml")
VERSIONS = ("1.29.0", "1.37.0")
CUSTOM = {"Kustomization", "ServiceMonitor"}
"""Kinds that Kubernetes itself does not have"""


def documents(path: Path) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


def the(kind: str, name: str = "aotllm") -> dict[str, Any]:
    (found,) = [d for path in FILES for d in documents(path) if d["kind"] == kind and d["metadata"]["name"] == name]
    return found


@pytest.fixture(scope="module")
def pod() -> dict[str, Any]:
    return the("Deployment")["spec"]["template"]


@pytest.fixture(scope="module")
def container(pod: dict[str, Any]) -> dict[str, Any]:
    (container,) = pod["spec"]["containers"]
    return container


@pytest.fixture(scope="module")
def flags(container: dict[str, Any]) -> dict[str, str]:
    return dict(argument.split("=", 1) for argument in container["args"] if argument.startswith("--"))


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_manifests_fit_the_schemas_of_kubernetes(path: Path, version: str):
    validate = pytest.importorskip("kubernetes_validate", reason="needs the package kubernetes-validate").validate
    for document in documents(path):
        if document["kind"] not in CUSTOM:
            validate(document, version, strict=True)


def test_the_validation_can_fail():
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    broken = the("Service")
    broken["spec"]["ports"][0]["prot"] = 1
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, VERSIONS[-1], strict=True)


def test_every_manifest_is_in_the_kustomization_if_only_as_a_comment():
    text = (FOLDER / "kustomization.yaml").read_text()
    listed = re.findall(r"^  (?:# )?- (\S+\.yaml)$", text, re.MULTILINE)
    assert sorted([*listed, "kustomization.yaml"]) == [path.name for path in FILES]


def test_everything_is_in_one_namespace_and_goes_by_one_label():
    namespace = the("Namespace")["metadata"]["name"]
    for document in (d for path in FILES for d in documents(path)):
        if document["kind"] not in ("Namespace", "Kustomization"):
            assert document["metadata"]["namespace"] == namespace
    labels = the("Deployment")["spec"]["template"]["metadata"]["labels"]
    assert the("Deployment")["spec"]["selector"]["matchLabels"] == labels
    assert the("Service")["spec"]["selector"] == labels
    assert the("Service", "aotllm-headless")["spec"]["selector"] == labels
    assert the("PodDisruptionBudget")["spec"]["selector"]["matchLabels"] == labels
    assert the("NetworkPolicy")["spec"]["podSelector"]["matchLabels"] == labels
    assert (
        the("ServiceMonitor")["spec"]["selector"]["matchLabels"].items() <= the("Service")["metadata"]["labels"].items()
    )
    assert the("HorizontalPodAutoscaler")["spec"]["scaleTargetRef"]["name"] == the("Deployment")["metadata"]["name"]


def test_ports_are_those_that_the_server_is_told(container: dict[str, Any], flags: dict[str, str]):
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {name: int(flags[f"--{name}-port"]) for name in ("http", "grpc", "metrics")}
    service = {port["targetPort"]: port["port"] for port in the("Service")["spec"]["ports"]}
    assert service == ports
    allowed = [port["port"] for rule in the("NetworkPolicy")["spec"]["ingress"] for port in rule["ports"]]
    assert sorted(allowed) == sorted(ports)
    (endpoint,) = the("ServiceMonitor")["spec"]["endpoints"]
    assert endpoint["port"] in {port["name"] for port in the("Service")["spec"]["ports"]}


def test_flags_are_those_of_the_command_line(flags: dict[str, str]):
    known = options_of("serve")
    if "--grpc-port" not in known:
        pytest.skip("this server has no gRPC yet")
    assert set(flags) <= known


def options_of(verb: str) -> set[str]:
    import typer.main

    command = typer.main.get_command(make_app()).commands[verb]  # type: ignore[attr-defined]
    return {option for parameter in command.params for option in parameter.opts}


def test_the_pod_outlives_the_draining(pod: dict[str, Any], container: dict[str, Any], flags: dict[str, str]):
    (sleep,) = re.findall(r"sleep\((\d+)\)", " ".join(container["lifecycle"]["preStop"]["exec"]["command"]))
    margin = 5
    assert pod["spec"]["terminationGracePeriodSeconds"] >= int(sleep) + float(flags["--drain-timeout"]) + margin


def test_threads_are_as_many_as_cpus(container: dict[str, Any], flags: dict[str, str]):
    assert (
        flags["--num-threads"] == container["resources"]["limits"]["cpu"] == container["resources"]["requests"]["cpu"]
    )


def test_the_container_is_locked_down(pod: dict[str, Any], container: dict[str, Any]):
    assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    volumes = {volume["name"] for volume in pod["spec"]["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes
    writable = {mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")}
    assert writable == {"/tmp", "/dev/shm"}


def test_the_engine_is_on_the_claimed_volume(pod: dict[str, Any], container: dict[str, Any]):
    (engines,) = [volume for volume in pod["spec"]["volumes"] if "persistentVolumeClaim" in volume]
    claim = engines["persistentVolumeClaim"]["claimName"]
    assert the("PersistentVolumeClaim", claim)
    (mount,) = [mount for mount in container["volumeMounts"] if mount["name"] == engines["name"]]
    verb, engine = container["args"][:2]
    assert verb == "serve"
    assert Path(engine).is_relative_to(mount["mountPath"])


def test_probes_ask_what_the_server_answers(container: dict[str, Any], start: Callable[..., Executor]):
    app = app_of({"engine": start(FakeManager())})
    if asyncio.run(status(app, "/v2")) == 404:
        pytest.skip("this server has no KServe routes yet")
    paths = {container[probe]["httpGet"]["path"] for probe in ("startupProbe", "readinessProbe", "livenessProbe")}
    assert {asyncio.run(status(app, path)) for path in paths} == {200}
    assert {container[probe]["httpGet"]["port"] for probe in ("startupProbe", "readinessProbe", "livenessProbe")} == {
        "http"
    }


async def status(app: Any, path: str) -> int:
    return (await get(app, path)).status_code


async def get(app: Any, path: str) -> Any:
    import httpx

    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        return await client.get(path)


def test_the_autoscaler_asks_for_a_metric_that_the_adapter_makes_of_one_of_the_servers(start: Callable[..., Executor]):
    (metric,) = the("HorizontalPodAutoscaler")["spec"]["metrics"]
    (rule,) = yaml.safe_load((FOLDER / "prometheus-adapter-values.yaml").read_text())["rules"]["custom"]
    assert metric["pods"]["metric"]["name"] == rule["name"]["as"]
    (series,) = re.findall(r'__name__="([^"]+)"', rule["seriesQuery"])
    assert re.fullmatch(rule["name"]["matches"], series)
    app = app_of({"engine": start(_Busy())})
    (endpoint,) = the("ServiceMonitor")["spec"]["endpoints"]
    response = asyncio.run(get(app, endpoint["path"]))
    if response.status_code == 404:
        pytest.skip("this server has no metrics yet")
    assert re.findall(rf"^{re.escape(series)}\{{.*\}} (\S+)$", response.text, re.MULTILINE) == ["7.0"]


class _Busy(FakeManager):
    def stats(self) -> SimpleNamespace:
        return SimpleNamespace(**{**vars(super().stats()), "queued": 7})


def test_the_image_runs_as_the_user_and_on_the_ports_of_the_pod(pod: dict[str, Any], container: dict[str, Any]):
    dockerfile = (ROOT / "deploy" / "Dockerfile").read_text()
    user = pod["spec"]["securityContext"]
    assert f"USER {user['runAsUser']}:{user['runAsGroup']}" in dockerfile
    assert f"EXPOSE {' '.join(str(port['containerPort']) for port in container['ports'])}" in dockerfile
