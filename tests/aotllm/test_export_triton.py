"""`aotllm export-triton`: what it writes, and what it leaves alone."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

from aotllm.export_triton.inputs import model_parameters
from aotllm.export_triton.model_config import model_config
from aotllm.export_triton.repository_writer import ExportOptions, export_repository
from aotllm.triton_tensors.models import CLASSIC_MODELS, EITHER
from tests.aotllm.cli.command_line import CommandLine
from tests.engines.samples import write_engine

text_format = pytest.importorskip("google.protobuf.text_format")
model_config_pb2 = pytest.importorskip("tritonclient.grpc.model_config_pb2")

MODELS = ["engine", *CLASSIC_MODELS]


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    write_engine(tmp_path / "engine")
    return tmp_path / "engine"


@pytest.fixture
def aotllm(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> CommandLine:
    return CommandLine(monkeypatch, capsys)


def config(folder: Path) -> Any:
    """As Triton itself reads it."""
    return text_format.Parse((folder / "config.pbtxt").read_text(), model_config_pb2.ModelConfig())


def parameters(folder: Path) -> dict[str, str]:
    return {key: value.string_value for key, value in config(folder).parameters.items()}


def test_the_repository_has_the_engine_and_its_aliases(aotllm: CommandLine, engine: Path, tmp_path: Path):
    outcome = aotllm("export-triton", engine, tmp_path / "repository", "--json")
    assert outcome.code == 0
    assert outcome.json == {
        "repository": str(tmp_path / "repository"),
        "models": MODELS,
        "max_batch_size": 4,
        "decoupled": True,
    }
    assert sorted(path.name for path in (tmp_path / "repository").iterdir()) == sorted(MODELS)
    assert (tmp_path / "repository" / "engine" / "1" / "engine" / "engine.json").is_file()


@pytest.mark.parametrize("name", MODELS)
def test_the_configuration_is_what_triton_reads(engine: Path, tmp_path: Path, name: str):
    export_repository(engine, tmp_path / "repository", ExportOptions(max_batch_size=3))
    found, model = config(tmp_path / "repository" / name), CLASSIC_MODELS.get(name, EITHER)
    assert (found.name, found.backend, found.max_batch_size) == (name, "python", 3)
    assert found.model_transaction_policy.decoupled
    data_type = model_config_pb2.DataType.Name
    assert [(t.name, data_type(t.data_type), tuple(t.dims), t.optional) for t in found.input] == [
        (field.name, field.datatype.config_name, field.dims, not field.required) for field in model.inputs.values()
    ]
    assert [(t.name, data_type(t.data_type), tuple(t.dims)) for t in found.output] == [
        (field.name, field.datatype.config_name, field.dims) for field in model.outputs.values()
    ]
    (group,) = found.instance_group
    assert group.count == 1


@pytest.mark.parametrize("name", MODELS)
def test_the_program_is_an_import(engine: Path, tmp_path: Path, name: str):
    export_repository(engine, tmp_path / "repository")
    tree = ast.parse((tmp_path / "repository" / name / "1" / "model.py").read_text())
    (imported,) = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    assert imported.names[0].asname == "TritonPythonModel"
    source = Path("aotllm", *imported.module.split(".")[1:]).with_suffix(".py")
    assert f"class {imported.names[0].name}:" in source.read_text()


def test_parameters_reach_the_model_that_needs_them(aotllm: CommandLine, engine: Path, tmp_path: Path):
    repository = tmp_path / "repository"
    flags = ("--num-threads", 2, "--kv-cache-memory", "1GiB", "--no-prefix-caching", "--exclude-input-in-output")
    assert aotllm("export-triton", engine, repository, "--execution-env", "/opt/env", *flags).code == 0
    found = parameters(repository / "engine")
    assert {key: found[key] for key in ("num_threads", "kv_cache_memory", "prefix_caching")} == {
        "num_threads": "2",
        "kv_cache_memory": "1GiB",
        "prefix_caching": "false",
    }
    assert found["exclude_input_in_output"] == "true"
    assert found["engine"] == "engine"
    assert parameters(repository / "ensemble")["target_model"] == "engine"
    assert {parameters(repository / name)["EXECUTION_ENV_PATH"] for name in MODELS} == {"/opt/env"}


@pytest.mark.parametrize(("how", "is_link"), [("copy", False), ("symlink", True)])
def test_the_engines_files_are_copied_or_linked(engine: Path, tmp_path: Path, how: Any, is_link: bool):
    export_repository(engine, tmp_path / "repository", ExportOptions(engine_files=how))
    placed = tmp_path / "repository" / "engine" / "1" / "engine"
    assert placed.is_symlink() == is_link
    assert {f.name: f.read_bytes() for f in placed.iterdir()} == {f.name: f.read_bytes() for f in engine.iterdir()}


def test_the_engine_may_stay_where_it_is(engine: Path, tmp_path: Path):
    export_repository(engine, tmp_path / "repository", ExportOptions(engine_files="path", name="m", aliases=()))
    assert parameters(tmp_path / "repository" / "m")["engine"] == str(engine)
    assert [p.name for p in (tmp_path / "repository" / "m" / "1").iterdir()] == ["model.py"]


def test_models_of_others_stay(engine: Path, tmp_path: Path):
    other = tmp_path / "repository" / "resnet"
    other.mkdir(parents=True)
    export_repository(engine, tmp_path / "repository")
    assert sorted(p.name for p in (tmp_path / "repository").iterdir()) == sorted([*MODELS, "resnet"])


def tree(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_nothing_is_replaced_unless_it_is_ours_and_forced(aotllm: CommandLine, engine: Path, tmp_path: Path):
    repository = tmp_path / "repository"
    assert aotllm("export-triton", engine, repository).code == 0
    before = tree(repository)
    refused = aotllm("export-triton", engine, repository, "--max-batch-size", 2)
    assert (refused.code, tree(repository)) == (1, before)
    assert "exists already" in refused.err
    assert aotllm("export-triton", engine, repository, "--max-batch-size", 2, "--force").code == 0
    assert config(repository / "ensemble").max_batch_size == 2
    (repository / "ensemble" / "config.pbtxt").write_text('name: "ensemble"')
    before = tree(repository)
    refused = aotllm("export-triton", engine, repository, "--force")
    assert (refused.code, tree(repository)) == (1, before)
    assert "is not a model that aotllm exported" in refused.err


def test_a_failure_leaves_nothing_behind(engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("shutil.copytree", full)
    with pytest.raises(Exception, match="No space left on device; nothing was changed"):
        export_repository(engine, tmp_path / "repository")
    assert [path.name for path in tmp_path.iterdir()] == ["engine"]


@pytest.mark.parametrize(
    ("flags", "message", "code"),
    [
        (("--name", "a/b"), "the model's name must be", 2),
        (("--name", "ensemble"), "two models would be named alike", 2),
        (("--alias", "gpt"), "alias must be one of", 2),
        (("--engine-files", "move"), "engine_files must be one of", 2),
        (("--cancellation-check-period-ms", "0"), "cancellation_check_period_ms must be", 2),
        (("--num-kv-blocks", "-1"), "num_kv_blocks must be", 2),
    ],
)
def test_wrong_usage(aotllm: CommandLine, engine: Path, tmp_path: Path, flags: Any, message: str, code: int):
    outcome = aotllm("export-triton", engine, tmp_path / "repository", *flags)
    assert (outcome.code, not (tmp_path / "repository").exists()) == (code, True)
    assert message in outcome.err


def test_a_damaged_engine_is_not_exported(aotllm: CommandLine, engine: Path, tmp_path: Path):
    rank = engine / "rank0.engine"
    rank.write_bytes(rank.read_bytes()[:-1] + b"!")
    outcome = aotllm("export-triton", engine, tmp_path / "repository")
    assert (outcome.code, (tmp_path / "repository").exists()) == (3, False)


@pytest.mark.parametrize("value", ["plain", 'a "quoted" \\ path', "zwei Wörter", "tab\there"])
def test_any_parameter_comes_back_as_it_was(value: str):
    text = model_config("m", EITHER, max_batch_size=1, decoupled=False, parameters={"key": value})
    found = text_format.Parse(text, model_config_pb2.ModelConfig())
    assert found.parameters["key"].string_value == value
    assert model_parameters('{"parameters": {"key": {"string_value": "v"}}}') == {"key": "v"}
