"""Signatures in a window: who starts something else is found, and nobody else is accused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from mpimesh.comm.signatures import digest_of, last_started, mismatch
from mpimesh.core.node import DOOR_BYTES, LANE_BYTES, Door, Engine, Window
from tests.helpers.depth import examples
from tests.helpers.named_ranks import named_ranks

ENTRIES = 16
KINDS = [
    ("all_reduce", op, (n,), np.dtype(kind))
    for op in ("sum", "max")
    for n in (3, 4)
    for kind in "fd"
]


def team(size):
    """Return ranks that are threads of one process, without the threads."""
    doors = [Door(np.zeros(DOOR_BYTES, np.uint8)) for _ in range(size)]
    lanes = [np.zeros(LANE_BYTES + 4096, np.uint8) for _ in range(size)]
    starts = [-lane.ctypes.data % 4096 for lane in lanes]
    return [
        Rank(Window(Engine(door, is_thread=True), rank, lanes, starts, doors, is_threads=True))
        for rank, door in enumerate(doors)
    ]


class Rank:
    """One rank that starts operations by other ways than the window, and takes them later."""

    def __init__(self, window):
        self.window = window
        self.operations = []

    def start(self, signature, text=""):
        digest = digest_of(self.window, signature, text)
        self.operations.append(self.window.post(digest, len(self.operations) + 1))

    def take(self, number):
        """Return the error that it finds at an operation, if it does."""
        if not self.operations[number - 1].differs():
            return None
        return mismatch(self.window, range(self.window.size), "g")


def test_what_differs_is_named_by_rank_operation_and_shape():
    ranks = team(3)
    for rank in ranks:
        rank.start(KINDS[0])
    for place, rank in enumerate(ranks):
        rank.start(("all_reduce", "sum", (3 + (place == 1),), np.dtype("f8")))
    for rank in ranks:
        assert rank.take(1) is None
        text = str(rank.take(2))
        assert "operation 2:" in text
        assert "ranks 0, 2: all_reduce(shape (3,), float64, sum)" in text
        assert "rank 1: all_reduce(shape (4,), float64, sum)" in text
        assert "'g'" in text


def test_who_has_not_come_is_not_waited_for_and_not_accused():
    first, second = team(2)
    first.start(KINDS[0])
    assert first.take(1) is None
    second.start(KINDS[1])
    assert second.take(1) is not None
    assert first.take(1) is not None


@pytest.mark.parametrize("ahead", [1, ENTRIES - 1, ENTRIES, ENTRIES + 1, 3 * ENTRIES])
def test_a_rank_that_is_ahead_is_not_accused_and_hides_nothing(ahead):
    for differ in (False, True):
        first, second = team(2)
        first.start(KINDS[1])
        for number in range(ahead):
            first.start(KINDS[number % 3])
        second.start(KINDS[2] if differ else KINDS[1])
        errors = [second.take(1)]
        for number in range(ahead):
            second.start(KINDS[number % 3])
            errors.append(second.take(number + 2))
        errors.append(first.take(ahead + 1))
        assert any(errors) == differ
        if differ:
            assert errors[0] is not None


def test_who_waits_learns_what_went_wrong_before():
    first, second = team(2)
    first.start(KINDS[0])
    assert first.take(1) is None
    first.start(KINDS[1])
    assert first.take(2) is None
    second.start(KINDS[1])
    assert "operation 1:" in str(first.take(2))


def test_two_operations_in_another_order_are_found_by_who_is_far_ahead():
    first, second = team(2)
    for rank, order in ((first, (0, 1)), (second, (1, 0))):
        for kind in order:
            rank.start(KINDS[kind])
    for rank in (first, second):
        for _ in range(2 * ENTRIES):
            rank.start(KINDS[0])
    assert "operation 1:" in str(first.take(1))
    assert "operation 1:" in str(first.take(2 * ENTRIES + 2))
    assert "operation 1:" in str(second.take(2 * ENTRIES + 2))


def test_after_a_mismatch_nothing_is_started():
    ranks = team(3)
    for one, other in ((0, 0), (1, 2), (3, 3), (0, 0)):
        for place, rank in enumerate(ranks):
            rank.start(KINDS[other if place == 1 else one])
    for rank in ranks:
        rank.take(2)
    for rank in ranks:
        assert rank.take(1) is None  # what came before can end
        for number in (2, 3, 4):
            assert "operation 2:" in str(rank.take(number))
        rank.start(KINDS[0])
        assert "operation 2:" in str(rank.take(5))


def test_results_taken_in_any_order():
    first, second = team(2)
    for _ in range(10):
        first.start(KINDS[0])
    for number in range(10):
        second.start(KINDS[number == 7])
    assert "operation 8:" in str(first.take(10))
    assert first.take(3) is None
    assert "operation 8:" in str(first.take(8))
    assert first.take(7) is None
    assert "operation 8:" in str(second.take(9))


@given(
    st.lists(st.tuples(st.integers(0, 2), st.sampled_from(KINDS), st.booleans()), max_size=60),
    st.integers(0, 59),
    st.integers(0, 9),
    st.sampled_from([None, *KINDS]),
)
@settings(max_examples=examples(300))
def test_an_error_says_that_programs_differ_and_only_that(steps, at, waits, instead):
    """Three ranks start one program, but for one operation of rank 1, each at its own pace."""
    program = [kind for _, kind, _ in steps]
    programs = [program, list(program), program]
    if instead is not None and at < len(program):
        programs[1][at] = instead
    differ = programs[1] != program
    ranks = team(3)
    errors = []
    # Any order of the ranks' starts, then each goes on to its end.
    for turn in [who for who, _, _ in steps] + [who for who in range(3) for _ in program]:
        rank = ranks[turn]
        if len(rank.operations) < len(program):
            rank.start(programs[turn][len(rank.operations)])
            errors.append(rank.take(max(1, len(rank.operations) - waits)))
    # Of more than there are entries, some could not be posted before the others came.
    errors += [rank.take(len(program)) for _ in steps for rank in ranks if program]
    found = [error for error in errors if error is not None]
    assert bool(found) == differ
    for error in found:
        assert 1 in named_ranks(str(error))


def test_reductions_of_either_byte_order_are_one_operation():
    first, second = team(2)
    for name, differ in (("all_reduce", False), ("all_gather", True)):
        first.start((name, "sum", (3,), np.dtype("<f8")))
        second.start((name, "sum", (3,), np.dtype(">f8")))
        assert (first.take(len(first.operations)) is not None) == differ


def test_many_signatures_and_long_ones():
    first, second = team(2)
    for number in range(5000):
        first.start(("all_reduce", "sum", (number,), np.dtype("f8")))
        second.start(("all_reduce", "sum", (number + (number == 4999),), np.dtype("f8")))
        errors = [rank.take(number + 1) for rank in (first, second)]
        assert (errors[1] is not None) == (number == 4999)
    text = str(first.take(5000))
    assert "shape (4999,)" in text
    assert "shape (5000,)" in text
    first, second = team(2)
    first.start(("compose", "x" * 1000, None, ""))
    second.start(("compose", "y" * 1000, None, ""))
    assert "yyyy ..." in str(first.take(1))


def test_a_digest_is_shown_as_what_its_rank_has_described_it_last():
    """And stays so once a mismatch is found."""
    mine, other = team(2)
    agreement = ("agreement", "", None, "")
    for number in range(1, 200):  # more than there are entries
        for rank in (mine, other):
            rank.start(agreement, f"call {number}")
            rank.take(number)
    assert last_started(other.window)[0] == (199, "call 199")
    mine.start(agreement, "close()")
    other.start(KINDS[0])
    assert last_started(other.window) == [
        (200, "close()"),
        (200, "all_reduce(shape (3,), float32, sum)"),
    ]
    for _ in range(2):
        for rank in (mine, other):
            assert "rank 0: close()" in str(rank.take(200))
        other.start(agreement, "add_group()")
