"""`--quantize` of a real model from exact values: what it costs, measured and told."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aotllm.builder import build as build_module
from aotllm.builder.checkpoints import open_checkpoint
from aotllm.builder.checkpoints.base import Checkpoint, TensorInfo, TokenizerAssets
from aotllm.builder.options import BuildOptions
from aotllm.cli import main
from aotllm.engines import Engine, open_engine
from aotllm.errors import InvalidRequest
from aotllm.perplexity import QuantizationCost, measure_perplexity, quantization_cost
from tests.integration.engines import build_engine, prompt_logits, save_tiny_model
from tests.integration.test_quality import GPL3, needs_gpl3

CONTEXT = {"max_seq_len": 512, "max_num_tokens": 512}


class FloatCheckpoint(Checkpoint):
    """The values of another one as float32: the nearest to an unquantized model that a quantized file can give."""

    def __init__(self, inner: Checkpoint) -> None:
        self._inner = inner
        self.path, self.config = inner.path, inner.config

    def tensors(self) -> dict[str, TensorInfo]:
        return {n: TensorInfo(n, t.shape, "f32", 4 * math.prod(t.shape)) for n, t in self._inner.tensors().items()}

    def read(self, name: str) -> Any:
        return self._inner.read(name)

    def read_stored(self, name: str) -> Any:
        return self._inner.read(name)

    def tokenizer(self) -> TokenizerAssets:
        return self._inner.tokenizer()


@pytest.fixture
def as_floats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_module, "open_checkpoint", lambda path: FloatCheckpoint(open_checkpoint(path)))


def cost(model: Path, folder: Path, text: str, **options: Any) -> QuantizationCost:
    chosen = BuildOptions(**CONTEXT, **options)
    build_module.build(model, folder / "engine", chosen)
    figures = quantization_cost(model, folder / "engine", chosen, text)
    assert [file.name for file in folder.iterdir()] == ["engine"], "the engine to compare with is gone"
    print(options, figures, f"{figures.change:+.2%}")
    return figures


@needs_gpl3
@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "most"),
    [
        ({"quantize": "int8"}, 0.005),
        ({"quantize": "int4", "quantize_group": 64}, 0.15),
    ],
)
def test_what_quantization_costs(
    options: dict[str, Any], most: float, smollm2_gguf: Path, tmp_path: Path, as_floats: None
) -> None:
    figures = cost(smollm2_gguf, tmp_path, GPL3.read_bytes()[:12_000].decode(), **options)
    assert figures.quantized.scored_tokens == figures.unquantized.scored_tokens >= 1024
    assert figures.unquantized.perplexity == pytest.approx(18, rel=0.15)
    assert abs(figures.change) <= most


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama whose matrices have multiples of 32 columns, and whose tokens are characters."""
    from tokenizers import Regex, Tokenizer
    from tokenizers.pre_tokenizers import Split

    folder = tmp_path_factory.mktemp("tiny") / "model"
    sizes = {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
    }
    save_tiny_model(folder, "LlamaForCausalLM", sizes, dtype="bf16")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.pre_tokenizer = Split(Regex("."), "isolated")
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def scored(engine: Engine, chunk: list[int]) -> np.ndarray:
    """Losses of the second half, from the logits of one step."""
    logits = prompt_logits(engine, chunk).astype(np.float64)
    scores = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    half = len(chunk) // 2
    losses: np.ndarray = -scores[np.arange(half - 1, len(chunk) - 1), chunk[half:]]
    return losses


@pytest.mark.parametrize("length", [32, 33, 100, 128, 300])
def test_perplexity_is_that_of_the_second_halves(length: int, tiny: Path, tmp_path: Path) -> None:
    """A prompt in one step and the measure in pieces agree to the last bit of each logit."""
    engine = build_engine(tiny, tmp_path / "engine", max_num_tokens=64, max_batch_size=4)
    text = "".join(chr(34 + (7 * i * i + i) % 90) for i in range(length))
    figures = measure_perplexity(engine, text)
    ids = list(engine.tokenizer().encode(text))
    size = min(length, 128)
    chunks = [ids[i : i + size] for i in range(0, length - size + 1, size)]
    expected = np.concatenate([scored(engine, chunk) for chunk in chunks])
    assert figures.perplexity == pytest.approx(float(np.exp(expected.mean())), rel=1e-9)
    assert (figures.scored_tokens, figures.chunk_tokens) == (len(expected), size)


def test_texts_that_are_too_short_are_refused(tiny: Path, tmp_path: Path) -> None:
    engine = build_engine(tiny, tmp_path / "engine")
    with pytest.raises(InvalidRequest, match="the text has 31 tokens, expected at least 32"):
        measure_perplexity(engine, "a" * 31)


def test_the_command_line_reports_the_cost(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text").write_text("".join(chr(34 + (5 * i * i) % 90) for i in range(200)))
    engine = tmp_path / "engine"
    arguments = ["build", str(tiny), "-o", str(engine), "--quantize", "int4", "--quantize-group", "64"]
    assert main([*arguments, "--report-perplexity", str(tmp_path / "text"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["manifest"]["precision"]["quantization"] == {"method": "int4", "group": 64, "symmetric": False}
    figures = report["perplexity"]
    assert figures["change"] == pytest.approx(figures["perplexity"] / figures["unquantized"] - 1)
    assert figures["perplexity"] == measure_perplexity(open_engine(engine), (tmp_path / "text").read_text()).perplexity
    assert figures["change"] != 0
    assert sorted(file.name for file in tmp_path.iterdir()) == ["engine", "text"]
