"""A Llama checkpoint of any shape with random weights: for benchmarks, where only sizes count.

Shards are written by threads (numpy's generators release the GIL), about a second per gigabyte and core.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

SIGMA = 0.02
_CHUNK = 1 << 22
"""Values that are drawn at a time"""
BYTES_PER_VALUE = 2


@dataclass(frozen=True)
class LlamaShape:
    """Sizes of a Llama model; the defaults are those of Llama-3.1-8B."""

    hidden: int = 4096
    intermediate: int = 14336
    layers: int = 32
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    vocab: int = 128256

    def config(self) -> dict[str, object]:
        """`config.json` as meta-llama/Llama-3.1-8B has it, with these sizes."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab,
            "hidden_act": "silu",
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-05,
            "rope_theta": 500000.0,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": False,
            "bos_token_id": self.vocab - 256,
            "eos_token_id": self.vocab - 255,
            "torch_dtype": "bfloat16",
        }

    def shards(self) -> Iterator[dict[str, tuple[int, ...]]]:
        """Name → shape of the tensors of each shard, the largest shards first."""
        yield {"model.embed_tokens.weight": (self.vocab, self.hidden)}
        yield {"lm_head.weight": (self.vocab, self.hidden), "model.norm.weight": (self.hidden,)}
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        for layer in range(self.layers):
            tensors: dict[str, tuple[int, ...]] = {
                "input_layernorm.weight": (self.hidden,),
                "self_attn.q_proj.weight": (q, self.hidden),
                "self_attn.k_proj.weight": (kv, self.hidden),
                "self_attn.v_proj.weight": (kv, self.hidden),
                "self_attn.o_proj.weight": (self.hidden, q),
                "post_attention_layernorm.weight": (self.hidden,),
                "mlp.gate_proj.weight": (self.intermediate, self.hidden),
                "mlp.up_proj.weight": (self.intermediate, self.hidden),
                "mlp.down_proj.weight": (self.hidden, self.intermediate),
            }
            yield {f"model.layers.{layer}.{name}": shape for name, shape in tensors.items()}


def write_random_llama(folder: Path, shape: LlamaShape, seed: int = 0) -> int:
    """Writes the checkpoint (bf16, matrices normal · 0.02, norms near 1); returns its bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(shape.config(), indent=2))
    (folder / "tokenizer.json").write_text(_tokenizer(shape.vocab))
    shards = list(shape.shards())
    names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    weight_map = {tensor: name for name, tensors in zip(names, shards, strict=True) for tensor in tensors}
    total = sum(_num_bytes(size) for tensors in shards for size in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        jobs = [
            pool.submit(_write_shard, folder / name, tensors, np.random.SFC64([seed, i]))
            for i, (name, tensors) in enumerate(zip(names, shards, strict=True))
        ]
        for job in jobs:
            job.result()
    return total


def _num_bytes(shape: tuple[int, ...]) -> int:
    return int(np.prod(shape)) * BYTES_PER_VALUE


def _write_shard(path: Path, tensors: dict[str, tuple[int, ...]], bits: np.random.BitGenerator) -> None:
    header, offset = {}, 0
    for name, shape in tensors.items():
        end = offset + _num_bytes(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    rng = np.random.Generator(bits)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for shape in tensors.values():
            mean = 1.0 if len(shape) == 1 else 0.0
            remaining = int(np.prod(shape))
            while remaining:
                values = rng.standard_normal(min(remaining, _CHUNK), dtype=np.float32)
                values *= SIGMA
                values += mean
                file.write(np.ascontiguousarray(values.view(np.uint16)[1::2]).data)  # the upper half of each: bf16
                remaining -= len(values)


def _tokenizer(vocab_size: int) -> str:
    """One word for each id: the benchmark speaks in ids, but an engine carries a tokenizer."""
    from tokenizers import Tokenizer, decoders, models

    tokenizer = Tokenizer(models.WordLevel({f"<{i}>": i for i in range(vocab_size)}, unk_token="<0>"))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer.to_str()
