"""Arrays that are read where they lie, and come back when nobody reads them any more."""

from __future__ import annotations

import gc
import os
from collections import deque

import numpy as np
import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mpimesh.comm.arena import Node
from mpimesh.comm.lending import Lending
from tests.helpers.depth import examples
from tests.helpers.raises import raises

LENDER, BORROWER = 0, 1


def nothing() -> None:
    """Stand for the fence of a processor that needs none."""


@pytest.fixture(scope="module")
def nodes():
    """Two processes' memories in one."""
    return Node(), Node()


class Ends:
    """A row of loans from the first node to the second, by both of its ends."""

    def __init__(self, lender, borrower):
        self.lending = Lending(lender.arena, {BORROWER: lender.open(borrower.address)}, nothing)
        memories = {LENDER: borrower.open(lender.address)}
        self.other = Lending(borrower.arena, memories, nothing)
        self.row = self.lending.row(BORROWER)
        self.loans = self.other.borrowing(LENDER, self.row.start)

    def lend(self, array, **options):
        self.row.lend(array, self.lending.find(array), **options)

    def borrow(self):
        assert self.loans.has_come()
        return self.loans.take((self.loans.nbytes // 8,), np.dtype(np.int64))

    @property
    def num_lent(self):
        return self.lending.num_lent


@pytest.fixture
def ends(nodes):
    """Both ends of a row, each with the other's memory as it maps it."""
    return Ends(*nodes)


def filled(node, value, size=1000):
    array = node.arena.empty(8 * size).view(np.int64)
    array[...] = value
    return array


def test_the_borrower_reads_what_the_lender_wrote_and_cannot_write(nodes, ends):
    array = filled(nodes[0], 7)
    assert not ends.loans.has_come()
    ends.lend(array)
    got = ends.borrow()
    np.testing.assert_array_equal(got, array)
    array[3] = 8
    assert got[3] == 8, "it was copied"
    with raises(ValueError, "read-only"):
        got[3] = 9
    assert not ends.loans.has_come()


def test_it_has_the_shape_and_dtype_that_are_asked_for(nodes, ends):
    ends.lend(filled(nodes[0], 3))
    assert ends.loans.nbytes == 8000
    got = ends.loans.take((10, 200), np.dtype(np.int32))
    assert (got.shape, got.dtype) == ((10, 200), np.dtype(np.int32))
    np.testing.assert_array_equal(got[:, ::2], 3)


def test_arrays_come_in_the_order_in_which_they_were_lent(nodes, ends):
    """Also many more than entries are made at a time, some of which come back before others."""
    kept = []
    for number in range(1000):
        ends.lend(filled(nodes[0], number, 1 + number % 3))
        if number % 3:
            got = ends.borrow()
            assert got.tolist() == [got[0]] * got.size
            kept.append(got)
        if number % 7 == 0 and kept:
            kept.pop(0)
    numbers = [int(got[0]) for got in kept]
    assert numbers == sorted(numbers)
    while ends.loans.has_come():
        kept.append(ends.borrow())
    assert kept[-1][0] == 999
    assert ends.num_lent == len(kept)


def test_it_comes_back_when_the_last_view_is_gone(nodes, ends):
    ends.lend(filled(nodes[0], 1))
    got = ends.borrow()
    views = [got.view(np.int64).reshape(10, 100)[2], got[5:6]]
    del got
    gc.collect()
    while views:
        assert ends.num_lent == 1
        views.pop()
    gc.collect()
    assert ends.num_lent == 0


def test_it_comes_back_when_the_borrowers_end_is_gone_before(nodes, ends):
    ends.lend(filled(nodes[0], 1))
    got = ends.borrow()
    del ends.loans, ends.other
    gc.collect()
    assert ends.num_lent == 1
    del got
    assert ends.num_lent == 0


def test_a_lent_array_lives_until_it_is_back(nodes, ends):
    array = filled(nodes[0], 5)
    ends.lend(array)
    got = ends.borrow()
    del array
    others = [filled(nodes[0], 6) for _ in range(20)]
    assert (got == 5).all()
    del others


def test_one_array_may_be_lent_several_times(nodes, ends):
    array = filled(nodes[0], 3)
    ends.lend(array)
    ends.lend(array)
    first, second = ends.borrow(), ends.borrow()
    del first
    assert ends.num_lent == 1
    del second
    assert ends.num_lent == 0


def test_a_loan_can_be_ended_unused(nodes, ends):
    ends.lend(filled(nodes[0], 3))
    ends.lend(filled(nodes[0], 4))
    ends.loans.skip()
    assert ends.num_lent == 1
    assert ends.borrow()[0] == 4


def test_a_note_is_told_from_other_arrays(nodes, ends):
    text = nodes[0].arena.empty(5)
    text[...] = 1, 2, 3, 4, 5
    ends.lend(text, is_note=True)
    ends.lend(filled(nodes[0], 4))
    assert ends.loans.nbytes == -1
    assert ends.loans.take_note().tolist() == [1, 2, 3, 4, 5]
    assert ends.borrow()[0] == 4


def test_an_ordinary_array_has_no_place(ends):
    assert ends.lending.find(np.zeros(10)) == -1


def test_it_reaches_those_whose_memory_it_has(ends):
    lender, borrower = ends.lending, ends.other
    assert (lender.reaches(BORROWER), lender.reaches(LENDER)) == (True, False)
    assert (borrower.reaches(LENDER), borrower.reaches(5)) == (True, False)


def test_a_forked_borrower_does_not_give_back(nodes, ends):
    ends.lend(filled(nodes[0], 2))
    got = ends.borrow()
    child = os.fork()
    if child == 0:
        del got
        gc.collect()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert ends.num_lent == 1
    del got
    assert ends.num_lent == 0


def test_what_is_lent_when_it_closes_is_never_used_again(nodes):
    gc.collect()
    before = nodes[0].arena.used_bytes
    ends = Ends(*nodes)
    kept: list[np.ndarray] = []
    ends.lend(filled(nodes[0], 4))
    ends.lend(filled(nodes[0], 9))
    got = ends.borrow()
    ends.lending.close(kept.append)
    del ends
    gc.collect()
    assert nodes[0].arena.used_bytes > before
    assert (got == 4).all()
    del got  # writes into an entry that nobody else has
    kept.clear()
    gc.collect()
    assert nodes[0].arena.used_bytes == before


def test_after_all_is_back_nothing_is_kept(nodes):
    gc.collect()
    before = nodes[0].arena.used_bytes
    ends = Ends(*nodes)
    ends.lend(filled(nodes[0], 4))
    got = ends.borrow()
    del got
    kept: list[np.ndarray] = []
    ends.lending.close(kept.append)
    assert kept == []
    del ends
    gc.collect()
    assert nodes[0].arena.used_bytes == before


class Lent(RuleBasedStateMachine):
    """Whatever is lent, viewed and dropped in whatever order: what can be read is right."""

    def __init__(self):
        super().__init__()
        self.ends = Ends(*NODES)
        self.number = 0
        self.waiting: deque[int] = deque()
        self.read: list[tuple[int, np.ndarray]] = []

    @rule(size=st.integers(1, 3000))
    def lend(self, size):
        self.number += 1
        self.ends.lend(filled(NODES[0], self.number, size))
        self.waiting.append(self.number)

    @precondition(lambda self: self.waiting)
    @rule()
    def borrow(self):
        self.read.append((self.waiting.popleft(), self.ends.borrow()))

    @precondition(lambda self: self.waiting)
    @rule()
    def refuse(self):
        self.waiting.popleft()
        self.ends.loans.skip()

    @precondition(lambda self: self.read)
    @rule(data=st.data(), part=st.booleans())
    def drop(self, data, part):
        place = data.draw(st.integers(0, len(self.read) - 1))
        number, array = self.read.pop(place)
        if part:
            self.read.append((number, array[array.size // 2 :]))

    @invariant()
    def all_reads_well(self):
        assert all((array == number).all() for number, array in self.read)
        assert self.ends.loans.has_come() == bool(self.waiting)
        assert self.ends.num_lent == len(self.waiting) + len(self.read)

    def teardown(self):
        self.read.clear()
        for _ in self.waiting:
            self.ends.loans.skip()
        assert self.ends.num_lent == 0


NODES = (Node(), Node())
TestLent = Lent.TestCase
TestLent.settings = settings(max_examples=examples(30), stateful_step_count=40)
