"""Boards of signatures: who starts something else is found, and nobody else is accused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from mpimesh.comm import signatures
from mpimesh.comm.signatures import BOARD_BYTES, LAST_SLOT, Signatures
from mpimesh.core.node import DOOR_BYTES, Door
from mpimesh.errors import MismatchError
from tests.helpers.depth import examples
from tests.helpers.named_ranks import named_ranks

SLOTS = LAST_SLOT + 1
KINDS = [
    ("all_reduce", op, (n,), np.dtype(kind))
    for op in ("sum", "max")
    for n in (3, 4)
    for kind in "fd"
]


def team(size):
    boards = [np.zeros(BOARD_BYTES, np.uint8) for _ in range(size)]
    doors = [Door(np.zeros(DOOR_BYTES, np.uint8)) for _ in range(size)]
    return [Signatures(rank, range(size), boards, doors) for rank in range(size)]


class Rank:
    """One rank that starts operations, and takes their results later."""

    def __init__(self, board):
        self.board = board
        self.words = []

    def start(self, signature):
        self.words.append(self.board.post(len(self.words) + 1, self.board.digest(signature)))

    def take(self, number):
        """Return the error that it finds at an operation, if it does."""
        word = self.words[number - 1]
        if word < 0:  # it was not started
            return self.board.error("g")
        return self._found(lambda: self.board.compare(number, word, "g")) if word else None

    def wait(self, number):
        """Return the error that it finds while it waits for an operation, if it does."""
        return self._found(lambda: self.board.look(number, "g"))

    def _found(self, look):
        try:
            look()
        except MismatchError as error:
            return error
        return None


def test_what_differs_is_named_by_rank_operation_and_shape():
    ranks = [Rank(board) for board in team(3)]
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
    first, second = (Rank(board) for board in team(2))
    first.start(KINDS[0])
    assert first.take(1) is None
    second.start(KINDS[1])
    assert second.take(1) is not None
    assert first.take(1) is not None


@pytest.mark.parametrize("ahead", [1, SLOTS - 1, SLOTS, SLOTS + 1, 3 * SLOTS])
def test_a_rank_that_is_ahead_is_not_accused_and_hides_nothing(ahead):
    for differ in (False, True):
        first, second = (Rank(board) for board in team(2))
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
        if differ and ahead < SLOTS:
            assert errors[0] is not None


def test_who_waits_learns_what_went_wrong_before():
    first, second = (Rank(board) for board in team(2))
    first.start(KINDS[0])
    assert first.take(1) is None  # as the root of a broadcast does
    first.start(KINDS[1])
    assert first.wait(2) is None
    second.start(KINDS[1])
    assert "operation 1:" in str(first.wait(2))


def test_two_operations_in_another_order_are_found_by_who_is_far_ahead():
    first, second = (Rank(board) for board in team(2))
    for rank, order in ((first, (0, 1)), (second, (1, 0))):
        for kind in order:
            rank.start(KINDS[kind])
    for rank in (first, second):
        for _ in range(2 * SLOTS):
            rank.start(KINDS[0])
    assert "operation 1:" in str(first.take(1))
    assert "operation 1:" in str(first.wait(2 * SLOTS + 2))
    assert "operation 1:" in str(second.take(2 * SLOTS + 2))


def test_after_a_mismatch_nothing_is_started():
    first, second, third = (Rank(board) for board in team(3))
    for one, other in ((0, 0), (1, 2), (3, 3), (0, 0)):
        first.start(KINDS[one])
        second.start(KINDS[other])
        third.start(KINDS[one])
    for rank in (first, second, third):
        assert rank.words[0] >= 0
        assert rank.take(1) is None
        for number in (2, 3, 4):
            assert "operation 2:" in str(rank.take(number) or rank.wait(number))
        rank.start(KINDS[0])
        assert rank.words[4] == -1
        assert rank.wait(1) is None  # what came before can end


def test_results_taken_in_any_order():
    first, second = (Rank(board) for board in team(2))
    for _ in range(20):
        first.start(KINDS[0])
    for number in range(20):
        second.start(KINDS[number == 7])
    assert second.words == [0] * 7 + [-1] * 13
    assert "operation 8:" in str(first.wait(15))
    assert first.take(3) is None
    assert "operation 8:" in str(first.take(8))
    assert first.take(7) is None


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
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(signatures, "LAST_SLOT", 3)
        patch.setattr(signatures, "SLOTS", 4)
        ranks = [Rank(board) for board in team(3)]
        errors = []
        # Any order of the ranks' starts, then each goes on to its end.
        for turn in [who for who, _, _ in steps] + [who for who in range(3) for _ in program]:
            rank = ranks[turn]
            if len(rank.words) < len(program):
                rank.start(programs[turn][len(rank.words)])
                errors.append(rank.take(len(rank.words)))
                errors.append(rank.wait(max(1, len(rank.words) - waits)))
        errors += [rank.take(len(program)) for rank in ranks if program]
    found = [error for error in errors if error is not None]
    assert bool(found) == differ
    for error in found:
        assert 1 in named_ranks(str(error))


def test_reductions_of_either_byte_order_are_one_operation():
    first, second = (Rank(board) for board in team(2))
    for name, differ in (("all_reduce", False), ("all_gather", True)):
        first.start((name, "sum", (3,), np.dtype("<f8")))
        second.start((name, "sum", (3,), np.dtype(">f8")))
        assert (first.take(len(first.words)) is not None) == differ


def test_many_signatures_and_long_ones():
    first, second = (Rank(board) for board in team(2))
    for number in range(5000):
        first.start(("all_reduce", "sum", (number,), np.dtype("f8")))
        second.start(("all_reduce", "sum", (number + (number == 4999),), np.dtype("f8")))
    text = str(first.take(5000))
    assert "shape (4999,)" in text
    assert "shape (5000,)" in text
    first, second = (Rank(board) for board in team(2))
    first.start(("compose", "x" * 1000, None, ""))
    second.start(("compose", "y" * 1000, None, ""))
    assert "yyyy ..." in str(first.take(1))


def test_a_digest_is_shown_as_what_its_rank_has_described_it_last():
    """And stays so once a mismatch is found."""
    mine, other = team(2)
    agreement, all_reduce = ("agreement", "", None, ""), KINDS[0]
    for number in range(1, 200):  # more than there are entries
        for board in (mine, other):
            board.describe(board.digest(agreement), f"call {number}")
            board.post(number, board.digest(agreement))
    mine.describe(mine.digest(agreement), "close()")
    mine.post(200, mine.digest(agreement))
    assert other.post(200, other.digest(all_reduce)) == -1
    mine.look(199, "g")
    for board in (mine, other):
        with pytest.raises(MismatchError, match=r"rank 0: close\(\)"):
            board.look(200, "g")
        board.describe(board.digest(agreement), "add_group()")
