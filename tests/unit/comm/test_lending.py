"""Arrays that are read where they lie, and come back when nobody reads them any more."""

from __future__ import annotations

import gc
import os

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mpimesh.comm.lending import TICKET_BYTES, Lending
from mpimesh.comm.node import Node
from tests.helpers.depth import examples
from tests.helpers.raises import raises

LENDER, BORROWER = 0, 1


def nothing() -> None:
    """Stand for the fence of a processor that needs none."""


@pytest.fixture(scope="module")
def nodes():
    """Two processes' memories in one."""
    return Node(), Node()


@pytest.fixture
def ends(nodes):
    """The lending of both, each with the other's memory as it maps it."""
    lender, borrower = nodes
    return pair(lender, borrower)


def pair(lender, borrower):
    return (
        Lending(lender.arena, {BORROWER: lender.open(borrower.address)}, nothing),
        Lending(borrower.arena, {LENDER: borrower.open(lender.address)}, nothing),
    )


def filled(node, value, size=1000):
    array = node.arena.empty(8 * size).view(np.int64)
    array[...] = value
    return array


def test_the_borrower_reads_what_the_lender_wrote_and_cannot_write(nodes, ends):
    lender, borrower = ends
    array = filled(nodes[0], 7)
    ticket = lender.lend(array)
    assert ticket.nbytes == TICKET_BYTES
    got = borrower.borrow(ticket, LENDER).view(np.int64)
    np.testing.assert_array_equal(got, array)
    array[3] = 8
    assert got[3] == 8, "it was copied"
    with raises(ValueError, "read-only"):
        got[3] = 9


def test_it_comes_back_when_the_last_view_is_gone(nodes, ends):
    lender, borrower = ends
    array = filled(nodes[0], 1)
    got = borrower.borrow(lender.lend(array), LENDER)
    views = [got.view(np.int64).reshape(10, 100)[2], got[5:6]]
    del got
    gc.collect()
    while views:
        assert lender.num_lent == 1
        views.pop()
    gc.collect()
    assert lender.num_lent == 0


def test_a_lent_array_lives_until_it_is_back(nodes, ends):
    lender, borrower = ends
    array = filled(nodes[0], 5)
    got = borrower.borrow(lender.lend(array), LENDER).view(np.int64)
    del array
    others = [filled(nodes[0], 6) for _ in range(20)]
    assert (got == 5).all()
    del others


def test_one_array_may_be_lent_several_times(nodes, ends):
    lender, borrower = ends
    array = filled(nodes[0], 3)
    first, second = (borrower.borrow(lender.lend(array), LENDER) for _ in range(2))
    del first
    assert lender.num_lent == 1
    del second
    assert lender.num_lent == 0


def test_a_ticket_can_go_back_unused(nodes, ends):
    lender, borrower = ends
    ticket = lender.lend(filled(nodes[0], 3))
    borrower.give_back(np.zeros(TICKET_BYTES, np.uint8), LENDER)
    assert lender.num_lent == 1
    borrower.give_back(ticket, LENDER)
    assert lender.num_lent == 0


def test_an_ordinary_array_is_not_lent(ends):
    assert ends[0].lend(np.zeros(10)) is None
    assert ends[0].num_lent == 0


def test_it_reaches_those_whose_memory_it_has(ends):
    lender, borrower = ends
    assert (lender.reaches(BORROWER), lender.reaches(LENDER)) == (True, False)
    assert (borrower.reaches(LENDER), borrower.reaches(5)) == (True, False)


def test_a_forked_borrower_does_not_give_back(nodes, ends):
    lender, borrower = ends
    got = borrower.borrow(lender.lend(filled(nodes[0], 2)), LENDER)
    child = os.fork()
    if child == 0:
        del got
        gc.collect()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert lender.num_lent == 1
    del got
    assert lender.num_lent == 0


def test_what_is_lent_when_it_closes_is_never_used_again(nodes):
    lender, borrower = pair(*nodes)
    gc.collect()
    before = nodes[0].arena.used_bytes
    kept: list[np.ndarray] = []
    lender.lend(filled(nodes[0], 9))
    got = borrower.borrow(lender.lend(filled(nodes[0], 4)), LENDER).view(np.int64)
    lender.close(kept.append)
    del lender
    gc.collect()
    assert nodes[0].arena.used_bytes > before
    assert (got == 4).all()
    del got  # writes into a cell that nobody else has
    kept.clear()
    gc.collect()
    assert nodes[0].arena.used_bytes == before


def test_after_all_is_back_nothing_is_kept(nodes):
    lender, borrower = pair(*nodes)
    gc.collect()
    before = nodes[0].arena.used_bytes
    got = borrower.borrow(lender.lend(filled(nodes[0], 4)), LENDER)
    del got
    kept: list[np.ndarray] = []
    lender.close(kept.append)
    assert kept == []
    del lender
    gc.collect()
    assert nodes[0].arena.used_bytes == before


class Lent(RuleBasedStateMachine):
    """Whatever is lent, viewed and dropped in whatever order: what can be read is right."""

    def __init__(self):
        super().__init__()
        self.nodes = NODES
        self.lender, self.borrower = pair(*NODES)
        self.number = 0
        self.tickets: list[tuple[int, np.ndarray]] = []
        self.read: list[tuple[int, np.ndarray]] = []

    @rule(size=st.integers(1, 3000))
    def lend(self, size):
        self.number += 1
        self.tickets.append((self.number, self.lender.lend(filled(NODES[0], self.number, size))))

    @precondition(lambda self: self.tickets)
    @rule(data=st.data())
    def borrow(self, data):
        number, ticket = self.tickets.pop(data.draw(st.integers(0, len(self.tickets) - 1)))
        self.read.append((number, self.borrower.borrow(ticket, LENDER).view(np.int64)))

    @precondition(lambda self: self.tickets)
    @rule(data=st.data())
    def refuse(self, data):
        _, ticket = self.tickets.pop(data.draw(st.integers(0, len(self.tickets) - 1)))
        self.borrower.give_back(ticket, LENDER)

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
        assert self.lender.num_lent == len(self.tickets) + len(self.read)

    def teardown(self):
        self.read.clear()
        for _, ticket in self.tickets:
            self.borrower.give_back(ticket, LENDER)
        assert self.lender.num_lent == 0


NODES = (Node(), Node())
TestLent = Lent.TestCase
TestLent.settings = settings(max_examples=examples(30), stateful_step_count=40)
