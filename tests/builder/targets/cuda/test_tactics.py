"""The table of kernels: defaults by rows, and measured records that win over them."""

from __future__ import annotations

import pytest

from aotllm.builder.options import SMS
from aotllm.builder.targets.cuda.tactics import TACTICS, Tactic, tactics_for
from aotllm.errors import Internal


def pairs(records):
    return [(record["max_rows"], record["kernel"]) for record in records]


SKINNY = [(8, "skinny.8"), (16, "skinny.16"), (32, "skinny.32"), (64, "skinny.64")]


@pytest.mark.parametrize(
    ("fmt", "rest"),
    [
        ("bf16", [(128, "tile.7"), (256, "tile.6"), (768, "tile.2"), (8192, "tile.0")]),
        ("fp8", [(128, "tile.7"), (256, "tile.6"), (768, "tile.2"), (8192, "tile.0")]),
        ("fp8_block", [(256, "tile.6"), (8192, "tile.2")]),
    ],
)
def test_rules_of_sm90(fmt, rest):
    assert pairs(tactics_for(90, fmt, 2048, 2048, 8192)) == SKINNY + rest


@pytest.mark.parametrize(
    ("sm", "fmt", "prefix"),
    [(80, "bf16", ""), (89, "bf16", ""), (89, "fp8", ""), (80, "int4", "dequant."), (89, "int8", "dequant.")],
)
def test_rules_before_sm90(sm, fmt, prefix):
    shapes = [(8, "sm80.5"), (64, "sm80.3"), (256, "sm80.2"), (8192, "sm80.1")]
    assert pairs(tactics_for(sm, fmt, 2048, 2048, 8192)) == [(rows, prefix + kernel) for rows, kernel in shapes]


def test_records_of_a_shape_are_in_order_and_end_with_any_number_of_rows():
    for shape in {(t.sm, t.format, t.n, t.k) for t in TACTICS}:
        rows = [t.max_rows for t in TACTICS if (t.sm, t.format, t.n, t.k) == shape]
        assert rows[-1] is None
        assert rows[:-1] == sorted(set(rows[:-1]))


@pytest.mark.parametrize(
    ("max_num_tokens", "kernels"), [(1, ["skinny.8"]), (8, ["skinny.8"]), (9, ["skinny.8", "skinny.16"])]
)
def test_kernels_that_no_step_needs_are_left_out(max_num_tokens, kernels):
    assert [kernel for _, kernel in pairs(tactics_for(90, "bf16", 64, 64, max_num_tokens))] == kernels


def test_measured_records_of_a_shape_win():
    table = (*TACTICS, Tactic(90, "fp8", 24, "skinny.32", 320, 4096), Tactic(90, "fp8", None, "tile.3", 320, 4096))
    assert pairs(tactics_for(90, "fp8", 320, 4096, 512, table)) == [(24, "skinny.32"), (512, "tile.3")]
    assert pairs(tactics_for(90, "fp8", 4096, 4096, 512, table))[0] == (8, "skinny.8")


def test_every_sm_has_kernels_for_any_number_of_rows():
    for sm in SMS:
        assert tactics_for(sm, "bf16", 64, 64, 8192)[-1]["max_rows"] == 8192


def test_what_the_table_lacks_is_said():
    with pytest.raises(Internal, match=r"no kernel for sm 80, fp8 \[64, 32\]"):
        tactics_for(80, "fp8", 64, 32, 8)
