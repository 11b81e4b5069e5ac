"""Tensor parallelism: what each rank holds of a model, and the pass that cuts a fused graph to one rank's size.

Q, K, V, gate and up are split by rows (heads, neurons), the two matrices that follow them by columns, embedding and
head by vocabulary (arXiv 1909.08053); each expert is split like an MLP, and routers are copied. All ranks have the same
shapes, so one graph stands for all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from aotllm.builder.config import ModelConfig
from aotllm.builder.passes.fused_ops import NORM_QKV_ROPE, NORM_SWIGLU, PAGED_ATTENTION
from aotllm.errors import UnsupportedModel


@dataclass(frozen=True)
class Partition:
    """The part of rank `rank` of `size`: ranges over the heads, neurons and tokens of the whole model.

    Raises:
        UnsupportedModel: heads or neurons cannot be dealt out evenly.
    """

    config: ModelConfig
    size: int = 1
    rank: int = 0

    def __post_init__(self) -> None:
        if (obstacle := _obstacle(self.config, self.size)) is not None:
            possible = next(size for size in range(self.size, 0, -1) if _obstacle(self.config, size) is None)
            raise UnsupportedModel(
                f"tp={self.size}: {obstacle}; the next smaller that fits the model is --tp {possible}"
            )

    @property
    def heads(self) -> range:
        """Query heads."""
        return _share(self.config.num_heads, self.size, self.rank)

    @property
    def kv_heads(self) -> range:
        """KV heads; where there are fewer than ranks, several ranks hold the same one."""
        count = self.config.num_kv_heads
        if count >= self.size:
            return _share(count, self.size, self.rank)
        head = self.rank * count // self.size
        return range(head, head + 1)

    @property
    def neurons(self) -> range:
        """Rows of gate and up of a dense MLP."""
        return _share(self.config.intermediate_size, self.size, self.rank)

    @property
    def expert_neurons(self) -> range:
        """Rows of gate and up of each expert: every rank holds a part of all of them."""
        return _share(self.config.moe_intermediate_size, self.size, self.rank)

    @property
    def tokens(self) -> range:
        """Token ids, dealt out as evenly as can be."""
        return _share(self.config.vocab_size, self.size, self.rank)

    def vocabulary(self, multiple: int) -> range:
        """Token ids, equally many on each rank and a multiple of `multiple`; the last ones may not exist."""
        count = -(-self.config.vocab_size // (self.size * multiple)) * multiple
        return range(self.rank * count, (self.rank + 1) * count)


def shard(model: ir.Model, config: ModelConfig, size: int) -> None:
    """Cuts a fused `model` to the size of one of `size` ranks, in place: head counts and widths of what ops make.

    Weights stay whole references; a target takes from each what `Partition` gives to a rank. A `linear_residual` or
    `norm_moe` of a sharded model computes one addend of a sum over ranks: such a graph only means something to a
    target.

    Raises:
        UnsupportedModel: the model cannot be split so.
    """
    part = Partition(config, size)
    if size == 1:
        return
    q_width, kv_width = len(part.heads) * config.head_dim, len(part.kv_heads) * config.head_dim
    widths = {
        NORM_QKV_ROPE: (q_width, kv_width, kv_width),
        PAGED_ATTENTION: (q_width,),
        NORM_SWIGLU: (len(part.neurons),),
    }
    for node in model.graph:
        if node.op_type in (NORM_QKV_ROPE, PAGED_ATTENTION):
            node.attributes.add(ir.AttrInt64("num_heads", len(part.heads)))
            node.attributes.add(ir.AttrInt64("num_kv_heads", len(part.kv_heads)))
        for value, width in zip(node.outputs, widths.get(node.op_type, ()), strict=False):
            assert value.shape is not None
            value.shape = ir.Shape([*value.shape[:-1], width])


def _share(count: int, size: int, rank: int) -> range:
    return range(rank * count // size, (rank + 1) * count // size)


def _obstacle(config: ModelConfig, size: int) -> str | None:
    """Why the model cannot be split over `size` ranks; None where it can."""
    sparse = [config.has_experts(layer) for layer in range(config.num_layers)]
    counts = [(config.num_heads, "query heads")]
    if not all(sparse):
        counts.append((config.intermediate_size, "neurons of an MLP"))
    if any(sparse):
        counts.append((config.moe_intermediate_size, "neurons of an expert"))
    for count, what in counts:
        if count % size:
            return f"{count} {what} cannot be dealt out evenly"
    if config.vocab_size < size:
        return f"{config.vocab_size} tokens are too few for a share each"
    if config.num_kv_heads % size and size % config.num_kv_heads:
        return f"{config.num_kv_heads} KV heads can neither be dealt out nor be copied evenly"
    return None
