"""Placement: no two living buffers share a byte. Checked byte by byte, by a checker that knows nothing of gaps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aotllm.builder.passes.arena import ALIGNMENT, Lifetime, place

MAX_STEPS = 12


@st.composite
def lifetimes(draw):
    first = draw(st.integers(0, MAX_STEPS))
    return Lifetime(draw(st.integers(1, 700)), first, draw(st.integers(first, MAX_STEPS)))


def peak(buffers: list[Lifetime]) -> int:
    """Bytes alive at the busiest step: no placement can be smaller."""
    return max(
        sum(-(-b.size // ALIGNMENT) * ALIGNMENT for b in buffers if b.first <= step <= b.last)
        for step in range(MAX_STEPS + 1)
    )


@given(st.lists(lifetimes(), min_size=1, max_size=14))
def test_living_buffers_do_not_overlap(buffers):
    placement = place(buffers)
    for step in range(MAX_STEPS + 1):
        owners: dict[int, int] = {}
        for i, (buffer, offset) in enumerate(zip(buffers, placement.offsets, strict=True)):
            if buffer.first <= step <= buffer.last:
                for byte in range(offset, offset + buffer.size):
                    assert owners.setdefault(byte, i) == i


@given(st.lists(lifetimes(), min_size=1, max_size=14))
def test_offsets_are_aligned_and_the_arena_is_tight(buffers):
    placement = place(buffers)
    assert all(offset >= 0 and offset % ALIGNMENT == 0 for offset in placement.offsets)
    assert placement.size % ALIGNMENT == 0
    ends = [offset + buffer.size for buffer, offset in zip(buffers, placement.offsets, strict=True)]
    assert max(ends) <= placement.size < max(ends) + ALIGNMENT
    assert peak(buffers) <= placement.size <= sum(-(-b.size // ALIGNMENT) * ALIGNMENT for b in buffers)


@given(st.lists(lifetimes(), max_size=14))
def test_placement_is_a_function_of_its_arguments(buffers):
    assert place(buffers) == place(list(buffers))


@pytest.mark.parametrize(
    ("buffers", "offsets", "size"),
    [
        ([], (), 0),
        ([Lifetime(1, 0, 0)], (0,), 64),
        ([Lifetime(64, 0, 1), Lifetime(64, 1, 2)], (0, 64), 128),  # meet at step 1
        ([Lifetime(64, 0, 1), Lifetime(64, 2, 3)], (0, 0), 64),
        ([Lifetime(64, 0, 9), Lifetime(128, 0, 1), Lifetime(256, 2, 3)], (256, 0, 0), 320),
        # The last one goes into the tightest gap: [448, 576) and not [0, 256).
        (
            [Lifetime(256, 1, 2), Lifetime(192, 1, 9), Lifetime(128, 1, 2), Lifetime(128, 1, 9), Lifetime(64, 3, 9)],
            (0, 256, 448, 576, 448),
            704,
        ),
    ],
)
def test_examples(buffers, offsets, size):
    placement = place(buffers)
    assert (placement.offsets, placement.size) == (offsets, size)
