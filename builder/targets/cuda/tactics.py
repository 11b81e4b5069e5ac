"""Which kernel multiplies which matrix: one table of records, by SM, format, shape and number of rows.

Records without a shape are defaults by rule; `aotllm tune` measures and adds records of its own with one, which win.
Kernels: `skinny.R` streams the weights once for up to R rows, `tile.I` is warp-specialised with tile shape I, and
`cublaslt` is NVIDIA's library. `sm80.I`, with tile shape I, is for any number of rows and any SM. Of int8 and int4,
`int.R` streams the weights, and `dequant.…` makes them bf16 for the kernel that it names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from aotllm.builder.targets.cuda.plan import TacticRecord
from aotllm.errors import Internal


@dataclass(frozen=True)
class Tactic:
    """A record of the table."""

    sm: int
    format: str
    max_rows: int | None
    """Rows that the kernel is chosen for, at most; None = any number"""
    kernel: str
    n: int | None = None
    """Shape of the matrix; None = any"""
    k: int | None = None


_SKINNY = ((8, "skinny.8"), (16, "skinny.16"), (32, "skinny.32"), (64, "skinny.64"))
"""For few rows the weights are streamed once, unless something else was measured to be faster"""

_INTEGERS = tuple((rows, f"int.{rows}") for rows, _ in _SKINNY)
"""The same for int8 and int4; for more rows they are made bf16 first"""

_RULES: dict[str, tuple[tuple[int | None, str], ...]] = {
    "bf16": ((128, "tile.7"), (256, "tile.6"), (768, "tile.2"), (None, "tile.0")),
    "fp8": ((128, "tile.7"), (256, "tile.6"), (768, "tile.2"), (None, "tile.0")),
    "fp8_block": ((256, "tile.6"), (None, "tile.2")),
}
"""For more rows, on SM90: k is split for few of them, so that small matrices fill the card"""

_MEASURED: dict[tuple[str, int, int], tuple[tuple[int | None, str], ...]] = {
    ("bf16", 6144, 4096): ((128, "tile.7"), (256, "cublaslt"), (512, "tile.1"), (None, "cublaslt")),
    ("bf16", 4096, 4096): ((128, "tile.8"), (256, "tile.6"), (512, "tile.2"), (None, "cublaslt")),
    ("bf16", 28672, 4096): ((512, "tile.3"), (1024, "cublaslt"), (None, "tile.0")),
    ("bf16", 4096, 14336): ((128, "tile.8"), (256, "tile.6"), (None, "cublaslt")),
    ("bf16", 128256, 4096): ((128, "tile.3"), (None, "cublaslt.1")),
    ("fp8", 6144, 4096): ((128, "tile.7"), (256, "tile.2"), (1024, "tile.1"), (None, "cublaslt")),
    ("fp8", 4096, 4096): (
        (64, "tile.8"),
        (128, "tile.8"),
        (256, "tile.6"),
        (512, "tile.2"),
        (None, "tile.0"),
    ),
    ("fp8", 28672, 4096): (
        (64, "tile.3"),
        (128, "tile.3"),
        (512, "tile.4"),
        (None, "tile.0"),
    ),
    ("fp8", 4096, 14336): (
        (64, "tile.8"),
        (128, "tile.8"),
        (256, "tile.6"),
        (512, "tile.2"),
        (1024, "cublaslt"),
        (None, "tile.0"),
    ),
    ("fp8", 128256, 4096): ((128, "tile.3"), (256, "cublaslt"), (None, "tile.0")),
}
"""The fastest on an H200 for the matrices of 8B Llama models (docs/benchmarks.md)"""


_BEFORE_SM90: tuple[tuple[int | None, str], ...] = (
    (8, "sm80.5"),
    (64, "sm80.3"),
    (256, "sm80.2"),
    (None, "sm80.1"),
)
"""The fastest for the bf16 matrices of a layer of an 8B Llama model together, on an H200: no older card was there to
measure on"""


def _from_one_row(records: Sequence[tuple[int | None, str]]) -> tuple[tuple[int | None, str], ...]:
    """The records, and streaming of the weights for fewer rows than they begin with."""
    first = records[0][0]
    return (*(few for few in _SKINNY if first is None or few[0] < first), *records)


TACTICS: tuple[Tactic, ...] = (
    *(
        Tactic(90, fmt, rows, kernel, n, k)
        for (fmt, n, k), records in _MEASURED.items()
        for rows, kernel in _from_one_row(records)
    ),
    *(Tactic(90, fmt, rows, kernel) for fmt, records in _RULES.items() for rows, kernel in (*_SKINNY, *records)),
    *(
        Tactic(90, fmt, rows, kernel)
        for fmt in ("int8", "int4")
        for rows, kernel in (*_INTEGERS, *((rows, f"dequant.{kernel}") for rows, kernel in _RULES["bf16"]))
    ),
    *(
        Tactic(sm, fmt, rows, prefix + kernel)
        for sm, fmt, prefix in (
            *((sm, "bf16", "") for sm in (80, 89)),
            *((sm, fmt, "dequant.") for sm in (80, 89) for fmt in ("int8", "int4")),
            (89, "fp8", ""),
        )
        for rows, kernel in _BEFORE_SM90
    ),
)
"""Records of one (sm, format, n, k) in ascending order of `max_rows`, the last of them for any number of rows"""


def tactics_for(
    sm: int, fmt: str, n: int, k: int, max_num_tokens: int, table: Sequence[Tactic] = TACTICS
) -> list[TacticRecord]:
    """The plan's records for a linear `[n, k]`: the table's for this very shape, else its defaults.

    The last record covers `max_num_tokens`; those that no step can need are left out.

    Raises:
        Internal: the table has nothing for this SM and format.
    """
    fitting = [tactic for tactic in table if (tactic.sm, tactic.format) == (sm, fmt)]
    exact = [tactic for tactic in fitting if (tactic.n, tactic.k) == (n, k)]
    records: list[TacticRecord] = []
    for tactic in exact or [tactic for tactic in fitting if tactic.n is None]:
        records.append({"max_rows": tactic.max_rows or max_num_tokens, "kernel": tactic.kernel})
        if records[-1]["max_rows"] >= max_num_tokens:
            return records
    raise Internal(f"The table of tactics has no kernel for sm {sm}, {fmt} [{n}, {k}] and {max_num_tokens} rows.")
