"""Plans of the CUDA target in numpy: what differs from the CPU's, and the ranks of a sharded engine in lockstep.

Everything is float32, so that what is compared is what a plan means and not how a device rounds.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from aotllm.builder.numerics import bf16_values, e4m3_values
from aotllm.engines.rank_file import read_header
from tests.builder.plan_interpreter import F32, Batch, PlanInterpreter


class CudaPlanInterpreter(PlanInterpreter):
    """One rank. `tensors` are those of the engine's file, as they lie there."""

    element_bytes = 2

    def __init__(self, plan, tensors, num_blocks):
        assert plan["target"] == "cuda"
        super().__init__(plan, tensors, num_blocks)

    def rows(self):
        return -(-self.plan["max_num_tokens"] // 128) * 128

    def matrix(self, name):
        record = self.plan["linears"][name]
        n, k, data = record["n"], record["k"], self.tensors[record["tensor"]]
        if record["format"] == "bf16":
            return bf16_values(data.view(np.uint16).reshape(n, k))
        codes = e4m3_values()[data.reshape(n, k)]
        if record["format"] == "fp8":
            return codes * self.tensors[record["scales"]].reshape(n, 1)
        assert record["format"] == "fp8_block"
        row, column = np.arange(n), np.arange(k)
        block = 2 * (row // 256) + row // 8 % 2 if name.endswith("gate_up") else row // 128
        scales = self.tensors[record["scales"]]
        assert scales.shape == (-(-n // 128), k // 128)
        return codes * scales[block[:, None], column // 128]

    def gate_and_up(self, op, h):
        both = self.linear(op["gate_up"], h, op.get("gate_up_bias")).reshape(len(h), -1, 2, 8)
        return both[:, :, 0].reshape(len(h), -1), both[:, :, 1].reshape(len(h), -1)

    def lm_head(self, op, batch):
        return self.gathered_logits(op, [super().lm_head(op, batch)])

    def gathered_logits(self, op, parts):
        """The row without the tokens that do not exist."""
        row = np.concatenate(parts, axis=1)
        assert row.shape[1] == op["vocab_size"] == self.plan["vocab_size"]
        size = np.isfinite(row).any(axis=0).sum() if "bias" in op else row.shape[1]
        assert (row[:, size:] == -np.inf).all()
        return row[:, :size]

    # Ranks: what one computes alone, and what follows the sum.

    def addend(self, op, batch):
        if op["op"] == "embedding":
            matrix, local = self.matrix(op["linear"]), batch.token_ids - op["vocab_begin"]
            mine = (local >= 0) & (local < len(matrix))
            return F32(op["scale"]) * np.where(mine[:, None], matrix[np.where(mine, local, 0)], 0)
        return self.linear(op["linear"], self.buffer(op["in"], batch), None)

    def finish(self, op, batch, total):
        out = self.buffer(op["out"], batch)
        if op["op"] == "embedding":
            out[:] = total
            return
        if op.get("bias"):
            total = total + self.tensors[op["bias"]]
        out[:] = self.buffer(op["residual"], batch) + self.normed(op, total)


class ShardedInterpreter:
    """All ranks of an engine, op by op. `step` as in `PlanInterpreter`."""

    def __init__(self, ranks: list[CudaPlanInterpreter]):
        self.ranks = ranks
        for i, rank in enumerate(ranks):
            assert rank.plan["tp"] == {"size": len(ranks), "rank": i}

    def step(self, tokens, start_positions, block_tables, logits):
        batch = Batch.of(tokens, start_positions, block_tables, logits)
        for rank in self.ranks:
            rank.arena[:] = np.nan
        for ops in zip(*(rank.plan["ops"] for rank in self.ranks), strict=True):
            if ops[0]["op"] == "lm_head":
                parts = [PlanInterpreter.lm_head(rank, op, batch) for rank, op in zip(self.ranks, ops, strict=True)]
                return self.ranks[0].gathered_logits({**ops[0], "bias": ops[-1].get("bias")}, parts)
            if ops[0].get("all_reduce") or "vocab_begin" in ops[0]:
                total = sum(rank.addend(op, batch) for rank, op in zip(self.ranks, ops, strict=True))
                for rank, op in zip(self.ranks, ops, strict=True):
                    rank.finish(op, batch, total)
            else:
                for rank, op in zip(self.ranks, ops, strict=True):
                    rank.run(op, batch)
        raise AssertionError("the last op is lm_head")


def open_ranks(folder: Path, size: int, num_blocks: int) -> list[CudaPlanInterpreter]:
    """The ranks of an engine folder."""
    paths = [folder / f"rank{rank}.engine" for rank in range(size)]
    plans = [json.loads(read_header(path)["__metadata__"]["plan"]) for path in paths]
    return [CudaPlanInterpreter(plan, load_file(path), num_blocks) for plan, path in zip(plans, paths, strict=True)]
