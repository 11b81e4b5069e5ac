"""Real quantized models: perplexity, divergence from exact arithmetic, greedy continuations.

The gate that counts is the divergence from the same weights in exact (float32) arithmetic, by transformers, over the
positions that the perplexity scores too: the second half of each chunk.
Perplexities and continuations of another engine are compared within the tolerance that its own attention paths need.
"""

from __future__ import annotations

import copy
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aotllm.builder.checkpoints import open_checkpoint
from aotllm.engines import Engine
from tests.integration.engines import build_engine, greedy, prompt_logits

GPL3 = Path("/usr/share/common-licenses/GPL-3")
CHUNK_TOKENS = 512
REFERENCES = json.loads((Path(__file__).parents[1] / "data" / "greedy_reference.json").read_text())["runs"]
NEAR_TIE = 0.3
"""Margin of the reference's two best tokens, in nats, below which another token is no fault"""

needs_gpl3 = pytest.mark.skipif(not GPL3.exists(), reason=f"needs the text {GPL3} (Debian)")


def gpl3_chunks(engine: Engine) -> list[list[int]]:
    """The first 20,000 bytes of the GPL-3 in chunks of 512 tokens; BOS, where the model has one, replaces the first."""
    tokenizer = engine.tokenizer()
    text = GPL3.read_bytes()[:20_000].decode()
    ids = tokenizer.encode(text, add_special_tokens=False)
    chunks = [ids[i : i + CHUNK_TOKENS] for i in range(0, len(ids) - CHUNK_TOKENS + 1, CHUNK_TOKENS)][:8]
    with_special = tokenizer.encode("a", add_special_tokens=True)
    if len(with_special) > len(tokenizer.encode("a", add_special_tokens=False)):
        chunks = [[with_special[0], *chunk[1:]] for chunk in chunks]
    return chunks


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def losses(logits: np.ndarray, chunk: list[int]) -> np.ndarray:
    """Negative log-likelihood of the tokens of a chunk's second half."""
    scores = log_softmax(logits[CHUNK_TOKENS // 2 - 1 : -1])
    scored: np.ndarray = -scores[np.arange(len(scores)), chunk[CHUNK_TOKENS // 2 :]]
    return scored


def perplexity(parts: list[np.ndarray]) -> float:
    """Of all losses."""
    return float(np.exp(np.concatenate(parts).mean()))


def exact_model(gguf: Path) -> Any:
    """The checkpoint's dequantized weights in transformers, float32."""
    import torch
    import transformers

    with open_checkpoint(gguf) as checkpoint:
        c = checkpoint.config
        model = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=c.vocab_size,
                hidden_size=c.hidden_size,
                intermediate_size=c.intermediate_size,
                num_hidden_layers=c.num_layers,
                num_attention_heads=c.num_heads,
                num_key_value_heads=c.num_kv_heads,
                head_dim=c.head_dim,
                rms_norm_eps=c.rms_norm_eps,
                max_position_embeddings=c.max_position_embeddings,
                tie_word_embeddings=True,
                rope_parameters={"rope_type": "default", "rope_theta": c.rope.theta},
            )
        )
        state = {name: torch.from_numpy(checkpoint.read(name).copy()) for name in checkpoint.tensors()}
        missing = model.load_state_dict(state, strict=False).missing_keys
        assert set(missing) <= {"lm_head.weight"}
        model.tie_weights()
    return model.eval()


@dataclass(frozen=True)
class Divergence:
    """From exact arithmetic, over all scored positions."""

    mean: float
    """KL divergence in nats"""
    max: float
    same_top: float
    """Share of positions with the same most likely token"""


@dataclass(frozen=True)
class Quality:
    divergence: Divergence
    perplexity: float


def measure(model: Any, engines: dict[str, Engine]) -> dict[str, Quality]:
    """Of engines with one tokenizer against `model`, chunk by chunk: exact arithmetic takes longest, and runs once."""
    import torch

    figures: dict[str, list[tuple[np.ndarray, np.ndarray, np.ndarray]]] = {name: [] for name in engines}
    for chunk in gpl3_chunks(next(iter(engines.values()))):
        with torch.no_grad():
            exact = log_softmax(model(torch.tensor([chunk])).logits[0, CHUNK_TOKENS // 2 :].numpy())
        for name, engine in engines.items():
            logits = prompt_logits(engine, chunk)
            ours = log_softmax(logits[CHUNK_TOKENS // 2 :])
            divergence, same = (np.exp(exact) * (exact - ours)).sum(-1), exact.argmax(-1) == ours.argmax(-1)
            figures[name].append((divergence, same, losses(logits, chunk)))
    qualities = {}
    for name, parts in figures.items():
        divergence, same = (np.concatenate([part[i] for part in parts]) for i in (0, 1))
        got = Divergence(float(divergence.mean()), float(divergence.max()), float(same.mean()))
        qualities[name] = Quality(got, perplexity([part[2] for part in parts]))
    return qualities


def save_as_bf16(model: Any, folder: Path, tokenizer: Path) -> None:
    """Saves `model` with its weights rounded to bf16, and rounds them in place: it is their exact arithmetic then."""
    import torch

    stored = copy.deepcopy(model).to(torch.bfloat16)
    stored.save_pretrained(folder)
    with torch.no_grad():  # parameters only: RoPE's frequencies stay float32
        for parameter, rounded in zip(model.parameters(), stored.parameters(), strict=True):
            parameter.copy_(rounded)
    shutil.copy(tokenizer, folder)


@pytest.fixture(scope="module")
def qualities(
    smollm2_gguf: Path,
    smollm2: Engine,
    smollm2_bf16_cache: Engine,
    smollm2_int8: Engine,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Quality]:
    model = exact_model(smollm2_gguf)
    found = measure(model, {"smollm2": smollm2, "smollm2_bf16_cache": smollm2_bf16_cache, "smollm2_int8": smollm2_int8})
    folder = tmp_path_factory.mktemp("smollm2_bf16")
    save_as_bf16(model, folder / "model", smollm2.path / "tokenizer.json")
    bf16 = build_engine(folder / "model", folder / "engine", max_seq_len=2048)
    return found | measure(model, {"smollm2_bf16": bf16})


@needs_gpl3
@pytest.mark.parametrize(
    ("engine_name", "allowed"),
    [
        ("smollm2", Divergence(mean=0.003, max=0.03, same_top=0.964)),
        ("smollm2_bf16_cache", Divergence(mean=0.003, max=0.03, same_top=0.96)),
        ("smollm2_int8", Divergence(mean=0.005, max=0.12, same_top=0.95)),
        ("smollm2_bf16", Divergence(mean=0.0002, max=0.005, same_top=0.99)),
    ],
)
def test_smollm2_stays_close_to_exact_arithmetic(
    engine_name: str, allowed: Divergence, qualities: dict[str, Quality]
) -> None:
    got = qualities[engine_name].divergence
    print(got)
    assert got.mean <= allowed.mean
    assert got.max <= allowed.max
    assert got.same_top >= allowed.same_top


@needs_gpl3
@pytest.mark.parametrize("engine_name", ["smollm2", "smollm2_bf16_cache", "smollm2_int8", "smollm2_bf16"])
def test_smollm2_perplexity(engine_name: str, qualities: dict[str, Quality]) -> None:
    """18.344 is the perplexity of the same weights in exact arithmetic."""
    got = qualities[engine_name].perplexity
    print(f"perplexity {got:.3f}")
    assert got == pytest.approx(18.344, rel=0.01)


@needs_gpl3
@pytest.mark.slow
def test_gemma3_perplexity(gemma3: Engine) -> None:
    """15.003 and 14.974 are the reference's two attention paths."""
    got = perplexity([losses(prompt_logits(gemma3, chunk), chunk) for chunk in gpl3_chunks(gemma3)])
    print(f"perplexity {got:.3f}")
    assert got == pytest.approx(14.99, rel=0.01)


def exact_run(run: str) -> str:
    """Of the same file in exact arithmetic, where there is one."""
    return next((name for name in REFERENCES if name.startswith(f"{run.split(',')[0]}, weights exact")), run)


def check_continuations(engine: Engine, run: str) -> None:
    """Token by token until one differs: at a near tie, where exact arithmetic says so, too, or because the text ends,
    which that of a reference never does."""
    for case, exact in zip(REFERENCES[run], REFERENCES[exact_run(run)], strict=True):
        tokenizer = engine.tokenizer()
        assert tokenizer.encode(case["prompt"]) == case["prompt_ids"]
        got = greedy(engine, case["prompt_ids"], len(case["ids"]))
        for i, (ours, theirs, margin) in enumerate(zip(got, case["ids"], case["margins"], strict=True)):
            if ours == theirs:
                continue
            agrees = case["prompt"] == exact["prompt"] and got[: i + 1] == exact["ids"][: i + 1]
            if not agrees and ours not in engine.manifest.eos_token_ids:
                assert margin < NEAR_TIE, f"{case['prompt']!r}: token {i} is {ours}, not {theirs} (margin {margin})"
            break


@pytest.mark.parametrize("run", [name for name in REFERENCES if name.startswith("SmolLM2")])
def test_smollm2_greedy_continuations(smollm2: Engine, run: str) -> None:
    check_continuations(smollm2, run)


@pytest.mark.slow
def test_gemma3_greedy_continuations(gemma3: Engine) -> None:
    check_continuations(gemma3, "gemma-3-270m-q4_k_m")
