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
        self.matrices = {}

    def as_cached(self, k, v):
        return k, v

    def rows(self):
        return -(-self.plan["max_num_tokens"] // 128) * 128

    def matrix(self, name):
        if name not in self.matrices:
            self.matrices[name] = self.decoded(name)
        return self.matrices[name]

    def decoded(self, name):
        record = self.plan["linears"][name]
        n, k, data = record["n"], record["k"], self.tensors[record["tensor"]]
        if record["format"] == "bf16":
            return bf16_values(data.view(np.uint16).reshape(n, k))
        if record["format"] in ("int4", "int8"):
            return self.integers(record, data)
        codes = e4m3_values()[data.reshape(n, k)]
        if record["format"] == "fp8":
            return codes * self.tensors[record["scales"]].reshape(n, 1)
        assert record["format"] == "fp8_block"
        row, column = np.arange(n), np.arange(k)
        block = 2 * (row // 256) + row // 8 % 2 if name.endswith("gate_up") else row // 128
        scales = self.tensors[record["scales"]]
        assert scales.shape == (-(-n // 128), k // 128)
        return codes * scales[block[:, None], column // 128]

    def integers(self, record, data):
        """Codes from where the kernels' threads find them, in blocks of 64 x 128."""
        n, k, group = record["n"], record["k"], record.get("group")
        row, column = np.arange(n)[:, None], np.arange(k)[None, :]
        strips, blocks = -(-n // 64), -(-k // 128)
        thread = row % 64 // 16 * 32 + row % 8 * 4 + column % 8 // 2
        step, lower, right, odd = column % 128 // 16, row // 8 % 2, column // 8 % 2, column % 2
        block = row // 64 * blocks + column // 128
        if record["format"] == "int4":
            assert data.size == strips * blocks * 4096
            nibble = 4 * odd + 2 * right + lower
            byte = block * 4096 + step // 4 * 2048 + thread * 16 + step % 4 * 4 + nibble // 2
            codes = (data[byte] >> (nibble % 2 * 4) & 15).astype(F32)
        else:
            assert data.size == strips * blocks * 8192
            byte = block * 8192 + step // 2 * 2048 + thread * 16 + step % 2 * 8 + lower * 4 + odd * 2 + right
            codes = data.view(np.int8)[byte].astype(F32)
        scales = self.tensors[record["scales"]]
        if group is None:
            return codes * scales.reshape(n, 1)
        zeros = self.tensors[record["zeros"]]
        assert scales.shape == zeros.shape == (strips, blocks * 128 // group, 64)
        place = row // 64, column // group, row % 64
        offset = 128 if record["format"] == "int8" else 0
        return scales[place] * (codes + F32(offset) - zeros[place].astype(F32))

    def gate_and_up(self, op, h):
        both = self.linear(op["gate_up"], h, op.get("gate_up_bias")).reshape(len(h), -1, 2, 8)
        return both[:, :, 0].reshape(len(h), -1), both[:, :, 1].reshape(len(h), -1)

    def expert(self, op, expert):
        gate_up, down = (np.split(self.matrix(op[part]), op["num_experts"])[expert] for part in ("gate_up", "down"))
        halves = gate_up.reshape(-1, 2, 8, gate_up.shape[1])
        return *(halves[:, half].reshape(-1, gate_up.shape[1]) for half in (0, 1)), down

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
        if op["op"] == "norm_moe":
            self.norm_moe(op, batch)
            return self.buffer(op["out"], batch) - self.buffer(op["residual"], batch)
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
        return self.run(Batch.of(tokens, start_positions, block_tables, logits))

    def run(self, batch, entering=None):
        """Logits; of a stage that has no head, the residual stream that leaves it."""
        stage = self.ranks[0].plan.get("pp", {})
        for rank in self.ranks:
            rank.arena[:] = np.nan
            if "entering" in stage:
                rank.buffer(stage["entering"], batch)[:] = entering
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
        leaving = [rank.buffer(stage["leaving"], batch).copy() for rank in self.ranks]
        assert all(np.array_equal(value, leaving[0]) for value in leaving)
        return leaving[0]


class PipelineInterpreter:
    """All ranks of all stages of an engine. `step` as in `PlanInterpreter`."""

    def __init__(self, ranks: list[CudaPlanInterpreter], tp: int):
        self.stages = [ShardedInterpreter(ranks[i : i + tp]) for i in range(0, len(ranks), tp)]
        begin = 0
        for i, stage in enumerate(self.stages):
            for rank in stage.ranks:
                record = rank.plan["pp"]
                assert (record["size"], record["rank"]) == (len(self.stages), i)
                assert ("entering" in record, "leaving" in record) == (i > 0, i + 1 < len(self.stages))
                assert record["layers"][0] == begin < record["layers"][1]
            begin = record["layers"][1]
        assert begin == len(record_layers(self.stages[0].ranks[0]))

    def step(self, tokens, start_positions, block_tables, logits):
        batch = Batch.of(tokens, start_positions, block_tables, logits)
        stream = None
        for stage in self.stages:
            stream = stage.run(batch, stream)
        return stream


def record_layers(rank: CudaPlanInterpreter):
    """All layers of the model, which each plan lists."""
    return rank.plan["kv"]["layers"]


def open_ranks(folder: Path, size: int, num_blocks: int) -> list[CudaPlanInterpreter]:
    """The ranks of an engine folder."""
    paths = [folder / f"rank{rank}.engine" for rank in range(size)]
    plans = [json.loads(read_header(path)["__metadata__"]["plan"]) for path in paths]
    return [CudaPlanInterpreter(plan, load_file(path), num_blocks) for plan, path in zip(plans, paths, strict=True)]
