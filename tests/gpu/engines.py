"""Tiny random models of every architecture in sizes that CUDA kernels take, and engines run without the manager."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from aotllm import _runtime
from aotllm.engines import Engine
from tests.builder.cuda_plan_interpreter import open_ranks
from tests.integration.engines import build_engine, save_tiny_model
from tests.integration.test_architectures import ROPES

VOCAB = 512
BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GEMMA = {
    **BASE,
    "num_hidden_layers": 6,
    "sliding_window": 24,
    "query_pre_attn_scalar": 24,
    "hidden_activation": "gelu_pytorch_tanh",
}
SOFTCAPS = {"attn_logit_softcapping": 20.0, "final_logit_softcapping": 10.0}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", BASE),
    "llama, tied": ("LlamaForCausalLM", {**BASE, "tie_word_embeddings": True}),
    "llama, biases": ("LlamaForCausalLM", {**BASE, "attention_bias": True, "mlp_bias": True}),
    "llama, heads of 96, odd sizes": (
        "LlamaForCausalLM",
        {**BASE, "hidden_size": 160, "intermediate_size": 352, "head_dim": 96, "num_attention_heads": 4,
         "num_key_value_heads": 1, "vocab_size": 416},
    ),
    "llama, heads of 128, 8 to 1": (
        "LlamaForCausalLM",
        {**BASE, "hidden_size": 256, "head_dim": 128, "num_attention_heads": 8, "num_key_value_heads": 1},
    ),
    "mistral, window": ("MistralForCausalLM", {**BASE, "sliding_window": 24}),
    "qwen2": ("Qwen2ForCausalLM", BASE),
    "qwen3": ("Qwen3ForCausalLM", BASE),
    "mixtral": ("MixtralForCausalLM", {**BASE, "intermediate_size": 160, "num_local_experts": 8}),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        {**BASE, "moe_intermediate_size": 80, "num_experts": 40, "num_experts_per_tok": 6, "norm_topk_prob": True,
         "mlp_only_layers": [1]},
    ),
    "gemma2": ("Gemma2ForCausalLM", {**GEMMA, **SOFTCAPS}),
    "gemma2, heads of 256": (
        "Gemma2ForCausalLM",
        {**GEMMA, **SOFTCAPS, "head_dim": 256, "num_key_value_heads": 1, "query_pre_attn_scalar": 256},
    ),
    "gemma3": ("Gemma3ForCausalLM", GEMMA),
    **{f"llama, {name}": ("LlamaForCausalLM", {**BASE, **ROPES[name]}) for name in ("llama3", "yarn")},
}  # fmt: skip

MIXTURES = ("mixtral", "qwen3_moe")
"""Cases whose layers have experts"""


def random_prompt(seed: int, length: int, vocab: int = 400) -> list[int]:
    return np.random.default_rng(seed).integers(3, vocab, length).tolist()


def tiny_engine(folder: Path, case: str, **options: Any) -> tuple[Any, Engine]:
    """The model with its bf16 weights, computing in float32, and its engine."""
    model_class, parameters = CASES[case]
    model = save_tiny_model(folder / "model", model_class, parameters, dtype="bf16", max_gain=0.8)
    options = {"max_seq_len": 512, "target": "cuda", "max_num_tokens": 256, **options}
    return model, build_engine(folder / "model", folder / "engine", **options)


def devices_of(engine: Engine) -> list[int]:
    """The first device for all ranks or, with AOTLLM_TEST_SPREAD=N in the environment, the first N in turn."""
    count = int(os.environ.get("AOTLLM_TEST_SPREAD", "1"))
    parallel = engine.manifest.parallel
    return [0] if count == 1 else [rank % count for rank in range(parallel.tp * parallel.pp)]


def device_list(engine: Engine) -> str:
    """The same as the executor's option."""
    return ",".join(map(str, devices_of(engine)))


class Sequences:
    """A CUDA runner with KV blocks for `count` sequences of the engine's full length."""

    def __init__(self, engine: Engine, count: int = 1, **options: Any) -> None:
        limits = engine.manifest.limits
        self.per_sequence = -(-limits.max_seq_len // limits.tokens_per_block)
        self.max_num_tokens = limits.max_num_tokens
        blocks = count * self.per_sequence
        self.runner = _runtime.CudaRunner(str(engine.rank_file()), blocks, devices=devices_of(engine), **options)

    def table(self, index: int) -> list[int]:
        """Blocks of a sequence: in no order, and not side by side."""
        count = self.runner.num_blocks // self.per_sequence
        return [index + count * ((5 * i + 3) % self.per_sequence) for i in range(self.per_sequence)]

    def step(self, tokens: Sequence[Sequence[int]], starts: Sequence[int], indices: Sequence[int]) -> list[np.ndarray]:
        """Logits at each token of each sequence, `[tokens, vocab]`."""
        tables = [self.table(i) for i in indices]
        rows = self.runner.step([list(t) for t in tokens], list(starts), tables, ["all"] * len(tokens))
        return np.split(rows, np.cumsum([len(t) for t in tokens])[:-1])

    def logits(self, prompt: Sequence[int], chunk: int = 0, index: int = 0) -> np.ndarray:
        """Logits at every position of a prompt that runs alone, in chunks (0 = largest)."""
        chunk = chunk or self.max_num_tokens
        return np.concatenate(
            [self.step([prompt[i : i + chunk]], [i], [index])[0] for i in range(0, len(prompt), chunk)]
        )


def exact_logits(engine: Engine, prompt: Sequence[int]) -> np.ndarray:
    """The engine's plan in numpy."""
    (rank,) = open_ranks(engine.path, 1, num_blocks=16)
    tokens_per_block = engine.manifest.limits.tokens_per_block
    table = list(range(-(-len(prompt) // tokens_per_block)))
    logits: np.ndarray = rank.step([list(prompt)], [0], [table], ["all"])
    return logits


def row_errors(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """‖got − want‖ / ‖want‖ of each row."""
    assert np.isfinite(got).all()
    distance: np.ndarray = np.linalg.norm(got.astype(np.float64) - want, axis=-1)
    return distance / np.linalg.norm(want, axis=-1)


def relative_error(got: np.ndarray, want: np.ndarray) -> float:
    """‖got − want‖ / ‖want‖; infinite where anything is not finite."""
    if not np.isfinite(got).all():
        return float("inf")
    return float(np.linalg.norm(got.astype(np.float64) - want) / np.linalg.norm(want.astype(np.float64)))
