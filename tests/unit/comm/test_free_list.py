"""Which parts of a row of bytes are free, against a row of bytes that is painted."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from mpimesh.comm.arena import FreeList

SIZE = 200
FREE = 0

# A number of bytes with an alignment to take, or the number of the part to give.
steps = st.lists(
    st.one_of(
        st.tuples(st.integers(0, SIZE + 1), st.sampled_from([1, 2, 8, 64])),
        st.integers(0, 1000),
    ),
    max_size=60,
)


def first_fit(row: list[int], nbytes: int, alignment_bytes: int) -> int | None:
    """The first place where all bytes are free, by looking at each."""
    for at in range(0, SIZE - nbytes + 1, alignment_bytes):
        if not any(row[at : at + nbytes]):
            return at
    return None


@given(steps)
def test_parts_are_the_first_free_ones_and_never_overlap(steps):
    free_list, row = FreeList(SIZE), [FREE] * SIZE
    parts: list[tuple[int, int]] = []
    for paint, step in enumerate(steps, 1):
        if isinstance(step, tuple):
            nbytes, alignment_bytes = step
            taken = max(nbytes, 1)
            at = free_list.take(nbytes, alignment_bytes)
            assert at == first_fit(row, taken, alignment_bytes)
            if at is not None:
                row[at : at + taken] = [paint] * taken
                parts.append((at, at + taken))
        elif parts:
            start, end = parts.pop(step % len(parts))
            assert free_list.give(start) == (start, end)
            row[start:end] = [FREE] * (end - start)
        assert free_list.used_bytes == sum(byte != FREE for byte in row)
    for start, _ in parts:
        free_list.give(start)
    assert free_list.used_bytes == 0
    assert free_list.take(SIZE, 1) == 0, "the gaps have not been joined"


def test_parts_of_no_bytes_have_places_of_their_own():
    free_list = FreeList(3)
    assert [free_list.take(0, 1) for _ in range(4)] == [0, 1, 2, None]


def test_a_row_of_no_bytes_has_no_parts():
    assert FreeList(0).take(0, 1) is None


def test_only_a_part_that_begins_there_can_be_given():
    free_list = FreeList(8)
    free_list.take(4, 1)
    for at in (1, 4):
        with pytest.raises(KeyError):
            free_list.give(at)
    free_list.give(0)
    with pytest.raises(KeyError):
        free_list.give(0)
    assert free_list.take(8, 1) == 0
