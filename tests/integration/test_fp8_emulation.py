"""Where FP8 loses its accuracy on SmolLM2, by part: float32 arithmetic with what E4M3 rounds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aotllm.builder.build import build
from aotllm.builder.options import BuildOptions
from aotllm.engines import open_engine
from tests.integration.fp8_emulation import emulate_fp8
from tests.integration.prose import compare, prose_chunks, token_losses
from tests.integration.test_quality import (
    CHUNK_TOKENS,
    exact_model,
    gpl3_chunks,
    log_softmax,
    losses,
    needs_gpl3,
    perplexity,
)


def first_or_last(name: str) -> bool:
    return name.startswith(("model.layers.0.", "model.layers.29."))


PARTS: dict[str, dict[str, Any]] = {
    "weights": {"weights": "max", "activations": False},
    "weights, searched": {"activations": False},
    "activations": {"weights": None},
    "both": {"weights": "max"},
    "both, searched": {},
    "both, not down": {"weights": "max", "keeps": lambda name: name.endswith("down_proj")},
    "both, not the first and the last layer": {"weights": "max", "keeps": first_or_last},
    "both, searched, not the first and the last layer": {"keeps": first_or_last},
}


@needs_gpl3
@pytest.mark.slow
@pytest.mark.timeout(1800)  # ten minutes where two cores have other work
def test_what_each_part_costs(smollm2_gguf: Path, tmp_path: Path) -> None:
    """Divergence in nats adds up; perplexities of one text vary by half a per cent around what it makes of them."""
    import torch

    build(smollm2_gguf, tmp_path / "engine", BuildOptions())
    chunks = gpl3_chunks(open_engine(tmp_path / "engine", verify=False))

    def logits(model: torch.nn.Module) -> list[np.ndarray]:
        with torch.no_grad():
            return [model(torch.tensor([chunk])).logits[0].numpy() for chunk in chunks]

    def cost(parts: list[np.ndarray]) -> float:
        return perplexity([losses(part, chunk) for part, chunk in zip(parts, chunks, strict=True)])

    exact = logits(exact_model(smollm2_gguf))
    wanted = [log_softmax(part[CHUNK_TOKENS // 2 :]) for part in exact]
    divergence = {}
    for name, options in PARTS.items():
        got = logits(emulate_fp8(exact_model(smollm2_gguf), **options))
        pairs = zip(wanted, (log_softmax(part[CHUNK_TOKENS // 2 :]) for part in got), strict=True)
        divergence[name] = float(np.mean([(np.exp(want) * (want - ours)).sum(-1).mean() for want, ours in pairs]))
        print(f"{name}: perplexity {cost(got) / cost(exact) - 1:+.2%}, divergence {divergence[name]:.4f}", flush=True)
    assert divergence["both"] == pytest.approx(divergence["weights"] + divergence["activations"], rel=0.15)
    assert divergence["both"] < 0.045
    assert divergence["both, not down"] < 0.85 * divergence["both"]
    assert divergence["both, not the first and the last layer"] < 0.85 * divergence["both"]
    assert divergence["weights, searched"] < 0.8 * divergence["weights"]
    assert divergence["both, searched"] < 0.9 * divergence["both"]
    assert (
        divergence["both, searched, not the first and the last layer"]
        < 0.9 * divergence["both, not the first and the last layer"]
    )


@pytest.mark.slow
@pytest.mark.timeout(1800)  # ten minutes where two cores have other work
def test_perplexity_over_more_text(smollm2_gguf: Path, tmp_path: Path) -> None:
    """Of what `--fp8 --quantize-exclude 0,-1` builds, over enough text that its scatter does not decide. It is not
    within the per cent that is wanted: 11 of these chunks had 1.9 ± 0.4 % more."""
    import torch

    build(smollm2_gguf, tmp_path / "engine", BuildOptions())
    chunks = prose_chunks(open_engine(tmp_path / "engine", verify=False))

    def all_losses(model: torch.nn.Module) -> np.ndarray:
        with torch.no_grad():
            return np.stack([token_losses(model(torch.tensor([c])).logits[0].numpy(), c) for c in chunks])

    exact = all_losses(exact_model(smollm2_gguf))
    changes = {}
    for name in ("both", "both, searched, not the first and the last layer"):
        changes[name] = compare(exact, all_losses(emulate_fp8(exact_model(smollm2_gguf), **PARTS[name])))
        print(f"{name}: perplexity {changes[name]}", flush=True)
    assert changes["both, searched, not the first and the last layer"].change < min(0.03, changes["both"].change)
