"""LoRA adapters end to end: what PEFT saves, read by aotllm and run beside the engine, gives PEFT's logits.

The engine is built once from the bare model; adapters are loaded into its runner.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aotllm import _runtime
from aotllm.engines import Engine
from aotllm.errors import Internal, InvalidRequest
from aotllm.lora import LoraUpdate, read_adapter, runtime_adapter
from tests.integration.engines import build_engine, prompt_logits, runner, save_tiny_model
from tests.integration.test_architectures import CASES, random_prompt
from tests.integration.test_quality import exact_model, log_softmax

PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ADAPTERS: dict[str, dict[str, Any]] = {
    "rank 1": {"r": 1, "lora_alpha": 1},
    "rank 8": {"r": 8, "lora_alpha": 16},
    "rank 64, rank-stabilized": {"r": 64, "lora_alpha": 4, "use_rslora": True},
    "ranks by pattern": {
        "r": 4,
        "lora_alpha": 8,
        "rank_pattern": {"q_proj": 17, "^model.layers.1.mlp.down_proj": 2},
        "alpha_pattern": {r"layers\.(0|2)\..*": 4, "o_proj": 12},
    },
    "a few modules of one layer": {
        "r": 8,
        "lora_alpha": 32,
        "target_modules": ["v_proj", "up_proj"],
        "layers_to_transform": [1],
    },
}


def save_adapter(folder: Path, model: Any, seed: int, **config: Any) -> Any:
    """A random adapter around `model`, saved by PEFT; the model with it. `unload()` gives the bare model back."""
    import peft
    import torch

    torch.manual_seed(seed)
    lora = peft.LoraConfig(task_type="CAUSAL_LM", **{"target_modules": PROJECTIONS, **config})
    adapted = peft.get_peft_model(model, lora).eval()
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.normal_(0.0, 0.15 if "lora_A" in name else 0.3 / parameter.shape[1] ** 0.5)
    adapted.save_pretrained(folder)
    return adapted


def reference_logits(model: Any, prompt: Sequence[int]) -> np.ndarray:
    import torch

    with torch.no_grad():
        logits: np.ndarray = model(torch.tensor([list(prompt)])).logits[0].numpy()
    return logits


def steps_of(run: _runtime.CpuRunner, prompts: list[list[int]], adapters: list[int], chunk: int) -> list[np.ndarray]:
    """Logits `[tokens, vocab]` of every prompt while all run side by side, `chunk` tokens of each in a step."""
    tables, next_block = [], 0
    for prompt in prompts:
        blocks = -(-len(prompt) // run.tokens_per_block)
        tables.append(list(range(next_block, next_block + blocks)))
        next_block += blocks
    rows: list[list[np.ndarray]] = [[] for _ in prompts]
    for start in range(0, max(map(len, prompts)), chunk):
        live = [i for i, prompt in enumerate(prompts) if start < len(prompt)]
        parts = [prompts[i][start : start + chunk] for i in live]
        logits = run.step(
            parts, [start] * len(live), [tables[i] for i in live], ["all"] * len(live), [adapters[i] for i in live]
        )
        ends = np.cumsum([len(part) for part in parts])
        for i, values in zip(live, np.split(logits, ends[:-1]), strict=True):
            rows[i].append(values)
    return [np.concatenate(r) for r in rows]


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and a.tobytes() == b.tobytes()


@pytest.mark.parametrize("case", ["llama", "llama, odd sizes", "llama, biases", "qwen2", "qwen3", "gemma2", "gemma3"])
def test_float32_equals_peft(case: str, tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model", *CASES[case])
    engine = build_engine(tmp_path / "model", tmp_path / "engine", max_seq_len=128)
    run = runner(engine)
    prompt = random_prompt(7)
    bare = reference_logits(model, prompt)
    for id, (name, config) in enumerate(ADAPTERS.items(), start=1):
        folder = tmp_path / name
        adapted = save_adapter(folder, model, seed=id, **config)
        expected = reference_logits(adapted, prompt)
        model = adapted.unload()
        run.load_adapter(id, read_adapter(folder))
        logits = steps_of(run, [prompt], [id], chunk=128)[0]
        assert np.abs(logits - expected).max() <= 1e-3, name
        assert np.abs(bare - expected).max() > 0.05, f"{name}: the adapter hardly matters"
    assert np.abs(steps_of(run, [prompt], [0], chunk=128)[0] - bare).max() <= 1e-3


def random_adapter(sizes: dict[str, tuple[int, int]], layers: int, rank: int, seed: int) -> list[LoraUpdate]:
    """Updates of all seven modules of every layer; `sizes`: module → (in, out)."""
    rng = np.random.default_rng(seed)
    return [
        LoraUpdate(
            layer,
            module,
            rng.normal(0, size_in**-0.5, (rank, size_in)).astype(np.float32),
            rng.normal(0, 0.3 * rank**-0.5, (size_out, rank)).astype(np.float32),
        )
        for layer in range(layers)
        for module, (size_in, size_out) in sizes.items()
    ]


SMOLLM2 = {
    "q": (576, 576), "k": (576, 192), "v": (576, 192), "o": (576, 576),
    "gate": (576, 1536), "up": (576, 1536), "down": (1536, 576),
}  # fmt: skip
PROMPTS = ["The sea was calm that night, " * 4, "Once", "A list of colours: red, ", "Once upon a time " * 3, "2 + 2 ="]


@pytest.fixture(scope="module")
def smollm2_adapters() -> dict[int, _runtime.Adapter]:
    return {
        5: runtime_adapter(random_adapter(SMOLLM2, 30, 8, 1)),
        9: runtime_adapter(random_adapter(SMOLLM2, 30, 3, 2)),
    }


def test_mixed_batches_give_the_bits_of_lone_requests(
    smollm2: Engine, smollm2_adapters: dict[int, _runtime.Adapter]
) -> None:
    """Q4_1: also, a prompt without an adapter gives the bits of a runner that has never seen one."""
    tokenizer = smollm2.tokenizer()
    prompts = [tokenizer.encode(text) for text in PROMPTS]
    adapters = [5, 0, 9, 9, 0]
    reference = runner(smollm2)
    for id, adapter in smollm2_adapters.items():
        reference.load_adapter(id, adapter)
    alone = [
        steps_of(reference, [prompt], [id], 128)[0] if id else prompt_logits(smollm2, prompt)
        for prompt, id in zip(prompts, adapters, strict=True)
    ]
    for threads, chunk in ((1, 64), (2, 1), (2, 7), (3, 5)):
        run = runner(smollm2, num_threads=threads)
        for id, adapter in smollm2_adapters.items():
            run.load_adapter(id, adapter)
        together = steps_of(run, prompts, adapters, chunk)
        for i, (got, want) in enumerate(zip(together, alone, strict=True)):
            assert same_bits(got, want), f"prompt {i}, {threads} threads, chunks of {chunk}"


def test_smollm2_with_an_adapter_stays_close_to_exact_arithmetic(
    smollm2: Engine, smollm2_gguf: Path, tmp_path: Path
) -> None:
    """Beside Q4_1 weights, with Q and K in the row order of transformers though the file has them in another one."""
    adapted = save_adapter(tmp_path, exact_model(smollm2_gguf), seed=1, r=16, lora_alpha=8)
    prompt = smollm2.tokenizer().encode("The lighthouse keeper wrote in his diary that the sea had been calm. " * 6)
    exact = log_softmax(reference_logits(adapted, prompt))
    bare = log_softmax(reference_logits(adapted.unload(), prompt))
    run = runner(smollm2)
    run.load_adapter(1, read_adapter(tmp_path))
    ours = log_softmax(steps_of(run, [prompt], [1], chunk=32)[0])
    divergence = (np.exp(exact) * (exact - ours)).sum(-1)
    effect = (np.exp(exact) * (exact - bare)).sum(-1)
    print(f"KL mean {divergence.mean():.5f}, max {divergence.max():.4f}; of the bare model {effect.mean():.3f}")
    assert divergence.mean() <= 0.01
    assert effect.mean() > 0.3, "the adapter hardly matters"


def test_adapters_come_and_go(smollm2: Engine, smollm2_adapters: dict[int, _runtime.Adapter]) -> None:
    run = runner(smollm2)
    prompt = smollm2.tokenizer().encode(PROMPTS[2])
    bare = steps_of(run, [prompt], [0], 64)[0]
    assert run.adapter_bytes == 0
    run.load_adapter(5, smollm2_adapters[5])
    adapted = steps_of(run, [prompt], [5], 64)[0]
    assert not np.allclose(adapted, bare, atol=0.1)
    one = run.adapter_bytes
    assert one >= 30 * 4 * 8 * sum(size_in + size_out for size_in, size_out in SMOLLM2.values())
    run.load_adapter(9, smollm2_adapters[9])
    assert run.adapter_bytes > one
    run.unload_adapter(5)
    assert same_bits(steps_of(run, [prompt], [0], 64)[0], bare)
    with pytest.raises(Internal, match="expected 0 or a loaded adapter, got adapter 5"):
        steps_of(run, [prompt], [5], 64)


def test_an_adapter_of_another_model_is_refused(smollm2: Engine) -> None:
    run = runner(smollm2)
    cases = [
        (random_adapter({"q": (64, 64)}, 1, 8, 1), "layers.0.q A: expected shape [8, 576], got shape [8, 64]"),
        (random_adapter({"k": (576, 576)}, 1, 8, 1), "layers.0.k B: expected shape [192, 8], got shape [576, 8]"),
        (random_adapter({"up": (576, 1536)}, 31, 1, 1), "layers.30.up: expected a layer in [0, 30), got 30"),
    ]
    for updates, message in cases:
        with pytest.raises(InvalidRequest) as caught:
            run.load_adapter(1, runtime_adapter(updates))
        assert message in str(caught.value)
    assert run.adapter_bytes == 0
    with pytest.raises(InvalidRequest, match="adapters: expected one entry for each of the 1 sequences, got 2"):
        run.step([[1]], [0], [[0]], ["last"], [0, 0])
