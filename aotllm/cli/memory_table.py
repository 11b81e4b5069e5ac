"""What the memory of the KV cache buys, as a table for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aotllm.cli.console import size

if TYPE_CHECKING:
    from aotllm.kv_memory import KvMemory

_HEADINGS = ("attention", "blocks", "host blocks", "bytes per block", "in all")


def memory_table(memory: KvMemory) -> str:
    """One row per KV group, and a line with the totals."""
    rows = [_HEADINGS] + [
        (
            f"window {group.window}" if group.window else "full",
            str(group.device_blocks),
            str(group.host_blocks),
            size(group.bytes_per_block),
            size(group.num_bytes),
        )
        for group in memory.groups
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADINGS))]
    lines = [
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in rows
    ]
    host = f" and {size(memory.host_bytes)} of host memory" if memory.host_bytes else ""
    total = (
        f"KV cache: {size(memory.device_bytes)}{host} in blocks of {memory.tokens_per_block} tokens hold "
        f"{memory.tokens} tokens, or {memory.sequences_at_max_len} sequences of the full {memory.max_seq_len}"
    )
    return "\n".join([total, *(f"  {line}" for line in lines)])
