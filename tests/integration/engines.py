"""Engines for integration tests: tiny random models by transformers, built and run by aotllm."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from aotllm import _runtime
from aotllm.builder.build import build
from aotllm.builder.options import BuildOptions
from aotllm.engines import Engine, open_engine

TORCH_DTYPES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}


def save_tiny_model(
    folder: Path,
    model_class: str,
    parameters: dict[str, Any],
    dtype: str = "f32",
    seed: int = 0,
    max_gain: float = math.inf,
) -> Any:
    """A random model of `model_class`, saved as a Hugging Face folder with a small tokenizer; returned in float32.

    No matrix makes the norm of what it multiplies more than `max_gain` times as large: the wider the model, the more it
    would amplify the rounding of what is before it.
    """
    import torch
    import transformers

    torch.manual_seed(0)
    cls = getattr(transformers, model_class)
    model = cls(cls.config_class(**parameters)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Larger than the initialiser's, so that logits spread; norms away from 1, so that each one counts.
            sigma = min(0.1, max_gain / math.sqrt(parameter.shape[-1])) if parameter.ndim > 1 else 0.3
            parameter.normal_(0.0, sigma)
            if parameter.ndim == 1 and "norm" in name and "gemma" not in model_class.lower():
                parameter.add_(1.0)
    stored = copy.deepcopy(model).to(getattr(torch, TORCH_DTYPES[dtype]))
    stored.save_pretrained(folder)
    with torch.no_grad():  # parameters only: buffers such as RoPE's frequencies are float32 in any model that is loaded
        for parameter, rounded in zip(model.parameters(), stored.parameters(), strict=True):
            parameter.copy_(rounded)
    (folder / "tokenizer.json").write_text(byte_tokenizer(parameters["vocab_size"]))
    return model


def byte_tokenizer(vocab_size: int) -> str:
    """A tokenizer of single characters, whatever they are: engines carry one, and these tests speak in ids."""
    from tokenizers import Tokenizer, decoders, models

    vocab = {f"<{i}>" if i < 33 or i > 126 else chr(i): i for i in range(vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<0>"))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer.to_str()


class GreedyReference:
    """What transformers says to a prompt, in float32."""

    def __init__(self, model: Any, prompt: Sequence[int], new_tokens: int) -> None:
        import torch

        with torch.no_grad():
            ids = torch.tensor([list(prompt)])
            self.prompt_logits = model(ids).logits[0].numpy()
            self.tokens: list[int] = []
            for _ in range(new_tokens):
                token = int(model(ids).logits[0, -1].argmax())
                self.tokens.append(token)
                ids = torch.cat([ids, torch.tensor([[token]])], dim=1)

    @cached_property
    def top2_gap(self) -> np.ndarray:
        """Difference of the two largest logits at each prompt position."""
        top = np.sort(self.prompt_logits, axis=-1)[:, -2:]
        return top[:, 1] - top[:, 0]


def build_engine(model: Path, output: Path, **options: Any) -> Engine:
    """Builds and opens an engine."""
    build(model, output, BuildOptions(**{"max_num_tokens": 128, "max_batch_size": 32, **options}))
    return open_engine(output)


def runner(engine: Engine, num_blocks: int = 64, num_threads: int = 2) -> _runtime.CpuRunner:
    """The engine's runner without the manager."""
    return _runtime.CpuRunner(str(engine.rank_file()), num_blocks, num_threads)


def prompt_logits(engine: Engine, prompt: Sequence[int], chunk: int = 0, num_threads: int = 2) -> np.ndarray:
    """Logits at every position of one prompt, `[tokens, vocab]`, run in chunks of `chunk` tokens (0 = largest)."""
    run = runner(engine, num_threads=num_threads)
    chunk = chunk or run.max_num_tokens
    table = list(range(-(-len(prompt) // run.tokens_per_block)))
    rows = [run.step([list(prompt[i : i + chunk])], [i], [table], ["all"]) for i in range(0, len(prompt), chunk)]
    return np.concatenate(rows)


def greedy(engine: Engine, prompt: Sequence[int], new_tokens: int) -> list[int]:
    """Greedy continuation, token by token."""
    run = runner(engine)
    table = list(range(-(-(len(prompt) + new_tokens) // run.tokens_per_block)))
    tokens, pending, position = [], list(prompt), 0
    while len(tokens) < new_tokens:
        logits = run.step([pending], [position], [table], ["last"])
        position += len(pending)
        pending = [int(logits[0].argmax())]
        tokens += pending
    return tokens
