"""A plan, executed in numpy over one real arena: the oracle of the lowering, and what each op of the format means.

Weights are plain float matrices under the tensor names of the segments. Everything is float32, one op after the other,
one token after the other where that is clearer. The arena is filled with NaN before each step and an output before its
op, so that reading what nobody wrote shows in the logits, and so does an output that overlaps an input.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from aotllm.builder.numerics import bf16_bits, bf16_values

F32 = np.float32


@dataclass(frozen=True)
class Batch:
    """The tokens of a step, those of all sequences one after the other."""

    token_ids: np.ndarray  # [tokens]
    positions: np.ndarray  # [tokens], in their sequences
    block_tables: list[list[int]]  # [tokens]: of each token's sequence
    logit_rows: list[int]  # tokens whose logits are asked for

    @classmethod
    def of(cls, tokens, start_positions, block_tables, logits) -> Batch:
        token_ids, positions, tables, rows = [], [], [], []
        for sequence, start, table, wanted in zip(tokens, start_positions, block_tables, logits, strict=True):
            end = len(token_ids) + len(sequence)
            rows += {"none": [], "last": [end - 1], "all": range(len(token_ids), end)}[wanted]
            token_ids += sequence
            positions += range(start, start + len(sequence))
            tables += [list(table)] * len(sequence)
        return cls(np.asarray(token_ids), np.asarray(positions), tables, rows)


class PlanInterpreter:
    """Runs the steps of one engine. `step` has the signature of `aotllm._runtime.CpuRunner.step`."""

    element_bytes = 4  # of a buffer in the arena

    def __init__(self, plan: dict[str, Any], tensors: Mapping[str, np.ndarray], num_blocks: int):
        assert plan["version"] == 1
        self.plan = plan
        self.tensors = tensors
        self.arena = np.zeros(plan["arena_bytes"] // self.element_bytes, F32)
        kv = plan["kv"]
        self.cache = [  # per layer: K, V [num_blocks, tokens_per_block, num_kv_heads, head_dim]
            np.full(
                (2, num_blocks, kv["tokens_per_block"], layer["num_kv_heads"], layer["head_dim"]),
                np.nan,
                np.float32,  # integers: what scale · code makes
            )
            for layer in kv["layers"]
        ]

    def step(
        self,
        tokens: Sequence[Sequence[int]],
        start_positions: Sequence[int],
        block_tables: Sequence[Sequence[int]],
        logits: Sequence[str],
    ) -> np.ndarray:
        """Logits `[rows, vocab_size]` of the tokens that were asked for (`none` | `last` | `all` per sequence)."""
        batch = Batch.of(tokens, start_positions, block_tables, logits)
        assert len(batch.token_ids) <= self.plan["max_num_tokens"]
        self.arena[:] = np.nan
        result = None
        for op in self.plan["ops"]:
            assert result is None, "lm_head is the last op"
            result = self.run(op, batch)
        assert result is not None, "the last op is lm_head"
        return result

    def run(self, op, batch):
        in_place = op.get("residual") == op.get("out")
        if "out" in op and not in_place:
            self.buffer(op["out"], batch)[:] = np.nan
        return getattr(self, op["op"])(op, batch)

    # The ops.

    def embedding(self, op, batch):
        self.buffer(op["out"], batch)[:] = self.looked_up(op, batch)

    def looked_up(self, op, batch):
        return F32(op["scale"]) * self.matrix(op["linear"])[batch.token_ids]

    def norm_qkv_rope(self, op, batch):
        heads, kv_heads, dim = op["num_heads"], op["num_kv_heads"], op["head_dim"]
        h = rms_norm(self.buffer(op["in"], batch), self.tensors[op["norm"]], op["eps"])
        qkv = self.linear(op["linear"], h, op.get("bias"))
        q, k, v = (
            part.reshape(len(h), -1, dim) for part in np.split(qkv, [heads * dim, (heads + kv_heads) * dim], axis=1)
        )
        if op.get("q_norm"):
            q = rms_norm(q, self.tensors[op["q_norm"]], op["qk_norm_eps"])
        if op.get("k_norm"):
            k = rms_norm(k, self.tensors[op["k_norm"]], op["qk_norm_eps"])
        cos, sin = self.rotary_tables(op["rope"], batch.positions)
        q, k = rotate_half(q, cos, sin), rotate_half(k, cos, sin)
        k, v = self.as_cached(k, v)
        for token in range(len(h)):
            block, slot = self.slot(batch, token, batch.positions[token])
            self.cache[op["layer"]][0, block, slot] = k[token]
            self.cache[op["layer"]][1, block, slot] = v[token]
        self.buffer(op["out"], batch)[:] = q.reshape(len(h), heads * dim)

    def as_cached(self, k, v):
        """What the cache gives back of K and V, [tokens, num_kv_heads, head_dim]."""
        dtype = self.plan["kv"]["dtype"]
        if dtype == "bf16":
            return bf16_values(bf16_bits(k)), bf16_values(bf16_bits(v))
        if dtype == "int8":
            return codes_and_back(k, 127), codes_and_back(v, 127)
        if dtype == "int16":
            norm = np.sqrt(np.square(k).sum(axis=-1, keepdims=True))
            return codes_and_back(k, 32767, norm / F32(46300)), codes_and_back(v, 16383)
        return k, v

    def paged_attention(self, op, batch):
        heads, kv_heads, dim = op["num_heads"], op["num_kv_heads"], op["head_dim"]
        query, out = self.buffer(op["in"], batch), self.buffer(op["out"], batch)
        for token, position in enumerate(batch.positions):
            first = max(0, position - op["window"] + 1) if op["window"] else 0
            slots = [self.slot(batch, token, p) for p in range(first, position + 1)]
            blocks, offsets = zip(*slots, strict=True)
            k, v = self.cache[op["layer"]][:, blocks, offsets].astype(F32)  # [keys, num_kv_heads, head_dim]
            q = query[token].reshape(kv_heads, heads // kv_heads, dim)
            scores = np.einsum("kgd,tkd->kgt", q, k) * F32(op["scale"])
            weights = softmax(softcap(scores, op["softcap"]))
            out[token] = np.einsum("kgt,tkd->kgd", weights, v).reshape(-1)

    def linear_residual(self, op, batch):
        residual = self.buffer(op["residual"], batch).copy()
        out = self.buffer(op["out"], batch)
        out[:] = np.nan  # it may be the residual's buffer, but not the input's
        out[:] = residual + self.normed(op, self.linear(op["linear"], self.buffer(op["in"], batch), op.get("bias")))

    def normed(self, op, y):
        return rms_norm(y, self.tensors[op["post_norm"]], op["eps"]) if op.get("post_norm") else y

    def norm_swiglu(self, op, batch):
        h = rms_norm(self.buffer(op["in"], batch), self.tensors[op["norm"]], op["eps"])
        gate, up = self.gate_and_up(op, h)
        self.buffer(op["out"], batch)[:] = {"silu": silu, "gelu_tanh": gelu_tanh}[op["activation"]](gate) * up

    def norm_moe(self, op, batch):
        """Each token by itself: its experts one after the other."""
        h = rms_norm(self.buffer(op["in"], batch), self.tensors[op["norm"]], op["eps"])
        residual, out = self.buffer(op["residual"], batch), self.buffer(op["out"], batch)
        router = self.tensors[op["router"]]
        assert router.shape == (op["num_experts"], h.shape[1])
        act = {"silu": silu, "gelu_tanh": gelu_tanh}[op["activation"]]
        for token in range(len(h)):
            logits = router @ h[token]
            weights = softmax(logits)
            chosen = np.argsort(-logits, kind="stable")[: op["top_k"]]
            scale = weights[chosen].sum() if op["normalize"] else F32(1)
            total = np.zeros(h.shape[1], F32)
            for expert in sorted(chosen):
                gate, up, down = self.expert(op, expert)
                total += weights[expert] / scale * (down @ (act(gate @ h[token]) * (up @ h[token])))
            out[token] = residual[token] + total

    def expert(self, op, expert):
        """gate, up `[neurons, width]` and down `[width, neurons]` of one expert."""
        return (np.split(self.matrix(op[part]), op["num_experts"])[expert] for part in ("gate", "up", "down"))

    def gate_and_up(self, op, h):
        return self.linear(op["gate"], h, op.get("gate_bias")), self.linear(op["up"], h, op.get("up_bias"))

    def lm_head(self, op, batch):
        h = rms_norm(self.buffer(op["in"], batch)[batch.logit_rows], self.tensors[op["norm"]], op["eps"])
        return softcap(self.linear(op["linear"], h, op.get("bias")), op["softcap"])

    # What the ops refer to.

    def buffer(self, index, batch):
        """float32 `[tokens, width]`: a view of the arena."""
        record = self.plan["buffers"][index]
        first, size = record["offset"] // self.element_bytes, self.rows() * record["width"]
        data = self.arena[first : first + size]
        assert len(data) == size, f"buffer {index} ends outside the arena"
        return data.reshape(-1, record["width"])[: len(batch.token_ids)]

    def rows(self):
        """Rows of every buffer."""
        return self.plan["max_num_tokens"]

    def matrix(self, name):
        """`[n, k]`: the segments of a linear, one under the other."""
        record = self.plan["linears"][name]
        parts = [self.tensors[segment["tensor"]] for segment in record["segments"]]
        assert [len(part) for part in parts] == [segment["n"] for segment in record["segments"]]
        matrix = np.concatenate(parts)
        assert matrix.shape == (record["n"], record["k"])
        return matrix

    def linear(self, name, x, bias):
        y = x @ self.matrix(name).T
        return y + self.tensors[bias] if bias else y

    def rotary_tables(self, index, positions):
        """cos, sin `[tokens, 1, rotary_dim / 2]`."""
        record = self.plan["rope"][index]
        angles = positions.astype(F32)[:, None, None] * self.tensors[record["inv_freq"]]
        return np.cos(angles) * F32(record["attention_factor"]), np.sin(angles) * F32(record["attention_factor"])

    def slot(self, batch, token, position):
        """Block and slot that hold `position` of `token`'s sequence."""
        size = self.plan["kv"]["tokens_per_block"]
        return batch.block_tables[token][position // size], position % size


def codes_and_back(x, limit, least_scale=0):
    """Codes with one scale for each head of a token."""
    scale = np.maximum(np.abs(x).max(axis=-1, keepdims=True) / F32(limit), least_scale)
    return np.rint(x / np.where(scale == 0, F32(1), scale)) * scale


def rms_norm(x, weight, eps):
    return x / np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True) + F32(eps)) * weight


def rotate_half(x, cos, sin):
    """Rotates dimensions i and i + rotary_dim / 2 of each head; those from rotary_dim on pass."""
    half = cos.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)


def softcap(x, cap):
    return F32(cap) * np.tanh(x / F32(cap)) if cap else x


def softmax(x):
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def silu(x):
    return x / (1 + np.exp(-x))


def gelu_tanh(x):
    return F32(0.5) * x * (1 + np.tanh(F32(np.sqrt(2 / np.pi)) * (x + F32(0.044715) * x**3)))
