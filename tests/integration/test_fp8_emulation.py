"""Where FP8 loses its accuracy on SmolLM2, by part: float32 arithmetic with what E4M3 rounds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from aotllm.builder.build import build
from aotllm.builder.options import BuildOptions
from aotllm.engines import open_engine
from tests.integration.fp8_emulation import emulate_fp8
from tests.integration.test_quality import (
    CHUNK_TOKENS,
    exact_model,
    gpl3_chunks,
    log_softmax,
    losses,
    needs_gpl3,
    perplexity,
)

PARTS = {
    "weights": {"activations": False},
    "activations": {"weights": False},
    "both": {},
    "both, not down": {"keeps": lambda name: name.endswith("down_proj")},
    "both, not the first and the last layer": {
        "keeps": lambda name: name.startswith(("model.layers.0.", "model.layers.29."))
    },
}


@needs_gpl3
@pytest.mark.slow
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
        print(f"{name}: perplexity {cost(got) / cost(exact) - 1:+.2%}, divergence {divergence[name]:.4f}")
    assert divergence["both"] == pytest.approx(divergence["weights"] + divergence["activations"], rel=0.15)
    assert divergence["both"] < 0.045
    assert divergence["both, not down"] < 0.85 * divergence["both"]
    assert divergence["both, not the first and the last layer"] < 0.85 * divergence["both"]
