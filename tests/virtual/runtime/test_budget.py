"""Budgets of what a section may receive, on virtual ranks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import mpimesh as mm
from mpimesh.errors import BudgetError, ClosedError, MeshError, MismatchError, MpimeshError
from tests.helpers.depth import examples
from tests.helpers.raises import raises


def on_ranks(size, body, dims=None):
    def main():
        with mm.DeviceMesh(dims or f"dp={size}") as mesh:
            return body(mesh)

    return mm.run_virtual(size, main)


# -- the first operation too much -----------------------------------------------------------------


@settings(max_examples=examples(25))
@given(st.lists(st.integers(0, 40), max_size=8), st.integers(0, 200), st.integers(0, 12))
def test_the_first_operation_that_is_too_much_raises_and_does_not_count(gathers, nbytes, messages):
    def body(mesh):
        used_bytes = used_messages = 0
        with mesh.budget(bytes=nbytes, messages=messages) as budget:
            for size in gathers:
                call = mesh.group().all_gather
                more_bytes, more_messages = 2 * size, 2 * (size > 0)
                if size and (
                    used_bytes + more_bytes > nbytes or used_messages + more_messages > messages
                ):
                    with raises(BudgetError, "all_gather", f"{2 * size} bytes in 2 messages"):
                        call(np.ones(size, "u1"))
                    continue
                call(np.ones(size, "u1")).resolve()
                used_bytes += more_bytes
                used_messages += more_messages
            assert (budget.used_bytes, budget.used_messages) == (used_bytes, used_messages)
        assert mesh.traffic().received_bytes == used_bytes
        assert mesh.traffic().received_messages == used_messages
        assert mesh.group().all_reduce(np.ones(1)).resolve()[0] == 3

    on_ranks(3, body)


STARTS = {
    "all_reduce": lambda group: group.all_reduce(np.ones(8)),
    "reduce_scatter": lambda group: group.reduce_scatter(np.ones(4)),
    "all_gather": lambda group: group.all_gather(np.ones(4)),
    "all_to_all": lambda group: group.all_to_all(np.ones(4)),
    "barrier": lambda group: group.barrier(timeout_s=20),
}


@pytest.mark.parametrize("checks", ["0", "1"])
@pytest.mark.parametrize("name", STARTS)
def test_what_is_known_is_refused_before_it_starts(name, checks, monkeypatch):
    monkeypatch.setenv("MPIMESH_CHECKS", checks)

    def body(mesh):
        group = mesh.group("tp")
        started = mesh.traffic().snapshot()
        named = (f"rank {mesh.rank}", f"{name}(", "group 'tp'", f"{__file__}:", "0 messages")
        with mesh.budget(messages=0), raises(BudgetError, *named, "used before: nothing"):
            STARTS[name](group)
        assert mesh.traffic() == started
        handle = STARTS[name](group)
        if handle is not None:
            handle.resolve()
        return mesh.traffic().received_messages

    assert all(on_ranks(4, body, "dp=2,tp=2"))


ENDS = {
    "broadcast": lambda group: group.broadcast(np.ones(4) if group.rank == 0 else None, root=None),
    "scatter": lambda group: group.scatter(np.ones((2, 4)) if group.rank == 0 else None),
    "shift": lambda group: group.shift(np.ones(4)),
}


@pytest.mark.parametrize("name", ENDS)
def test_what_only_the_sender_knows_is_refused_at_its_end(name):
    def body(mesh):
        group = mesh.group()
        with mesh.budget(bytes=31) as budget:
            handle = ENDS[name](group)  # nobody leaves it: the others need this rank
            if group.rank == 0:
                handle.resolve()
            else:
                with raises(BudgetError, name, "32 bytes in 1 message", "31 bytes"):
                    handle.resolve()
        counts = (32, 1) if group.rank else (0, 0)
        assert (budget.used_bytes, budget.used_messages) == counts
        assert (mesh.traffic().received_bytes, mesh.traffic().received_messages) == counts
        assert group.all_reduce(np.ones(1)).resolve()[0] == 2

    on_ranks(2, body)


def test_a_receive_is_refused_when_its_size_is_known():
    def body(mesh):
        group = mesh.group()
        if group.rank == 0:
            for count in (4, 4, 5):
                group.send(np.ones(count), 1).resolve()
            return
        with mesh.budget(bytes=40) as budget:
            first = group.recv(0, shape=4, dtype="f8")
            assert budget.used_bytes == 32  # before it has come
            with raises(BudgetError, "recv(shape (4,)", "32 bytes in 1 message", "40 bytes"):
                group.recv(0, out=np.empty(4))
            second = group.recv(0)
            first.resolve()
            with raises(BudgetError, "recv(source 0", "40 bytes", "used before: 32 bytes"):
                second.resolve()
        np.testing.assert_array_equal(group.recv(0).resolve(), np.ones(5))
        assert budget.used_bytes == 64

    on_ranks(2, body)


def test_what_came_instead_of_what_was_told_counts():
    def body(mesh):
        group = mesh.group()
        if group.rank == 0:
            group.send(np.ones(3), 1).resolve()
            return
        with mesh.budget() as budget, raises(MpimeshError, "rank 1", (5,), (3,)):
            group.recv(0, shape=5, dtype="f8").resolve()
        assert (budget.used_bytes, budget.used_messages) == (24, 1)
        assert mesh.traffic().by_peer() == mesh.traffic().by_peer("recv")
        assert mesh.traffic().received_bytes == 24

    on_ranks(2, body)


# -- sections -------------------------------------------------------------------------------------


def test_each_of_nested_budgets_counts_its_own_section():
    def body(mesh):
        gather = mesh.group().all_gather
        with mesh.budget(bytes=30) as outer:
            gather(np.ones(1)).resolve()
            with mesh.budget(bytes=16) as inner:
                gather(np.ones(2)).resolve()
                with raises(BudgetError, "all_gather", "16 bytes"):
                    gather(np.ones(1))
            assert (inner.used_bytes, outer.used_bytes) == (16, 24)
            with mesh.budget(bytes=100), raises(BudgetError, "all_gather", "30 bytes"):
                gather(np.ones(1))
            gather(np.ones(6, "u1")).resolve()
        assert outer.used_by == {"all_gather": (30, 3)}
        gather(np.ones(100)).resolve()

    on_ranks(2, body)


def test_operations_belong_to_the_section_in_which_they_start():
    def body(mesh):
        group = mesh.group()
        before = group.shift(np.ones(9), wrap=True)
        with mesh.budget(bytes=8) as budget:
            before.resolve()
            within = group.shift(np.ones(1), wrap=True)
            after = group.shift(np.ones(1), wrap=True)
        within.resolve()
        with raises(BudgetError, "shift", "used before: 8 bytes in 1 message"):
            after.resolve()
        assert budget.used_bytes == 16
        group.shift(np.ones(9), wrap=True).resolve()
        assert budget.used_bytes == 16

    on_ranks(2, body)


@pytest.mark.parametrize("checks", ["0", "1"])
@pytest.mark.parametrize("name", ENDS)
def test_what_only_the_sender_knows_belongs_to_where_it_starts(name, checks, monkeypatch):
    monkeypatch.setenv("MPIMESH_CHECKS", checks)

    def body(mesh):
        group = mesh.group()
        if group.rank == 0:  # who has the array comes late
            for _ in range(2):
                group.recv(1).resolve()
                ENDS[name](group).resolve()
            return
        before = ENDS[name](group)
        with mesh.budget(bytes=8) as budget:
            group.send(np.ones(1), 0).resolve()
            before.resolve()
        assert budget.used_bytes == 0
        with mesh.budget() as budget:
            within = ENDS[name](group)
        group.send(np.ones(1), 0).resolve()
        within.resolve()
        assert budget.used_bytes == 32

    on_ranks(2, body)


def test_nothing_is_never_too_much():
    def body(mesh):
        group = mesh.group()
        root = mesh.rank == 0  # which receives, where the others do not
        with mesh.budget(bytes=None if root else 0, messages=2 if root else 0):
            group.barrier()
            group.all_reduce(np.ones(0)).resolve()
            group.all_gather(np.ones((4, 0))).resolve()
            mesh.group("solo").all_reduce(np.ones(100)).resolve()
            group.gather(np.ones(5)).resolve()
            group.scatter(np.ones((3, 0)) if root else None).resolve()

    on_ranks(3, body, "dp=3,solo=1")


def test_after_too_much_has_come_what_receives_nothing_goes_on():
    def body(mesh):
        group = mesh.group()
        with mesh.budget(bytes=7, messages=9):
            with pytest.raises(BudgetError):
                group.shift(np.ones(1), wrap=True).resolve()
            group.shift(np.ones(0), wrap=True).resolve()  # a message of 0 bytes
            group.barrier()
            with raises(BudgetError, "all_reduce", "used before: 8 bytes in 2 messages"):
                group.all_reduce(np.ones(1))

    on_ranks(2, body)


def test_code_that_moves_arrays_itself_counts_too():
    def body(mesh):
        with mesh.budget(bytes=10) as budget:
            mesh.traffic().receive("redistribute", 1, 6)
            with raises(BudgetError, "redistribute", f"{__file__}:", "5 bytes in 2 messages"):
                mesh.traffic().receive("redistribute", 2, 5, messages=2)
        assert budget.used_by == {"redistribute": (11, 3)}
        assert mesh.traffic().received_messages == 3

    on_ranks(1, body)


def test_with_checks_the_others_hear_of_a_budget_of_one_rank(monkeypatch):
    monkeypatch.setenv("MPIMESH_CHECKS", "1")

    def body(mesh):
        group = mesh.group()
        error = MismatchError if mesh.rank else BudgetError
        told = raises(error, "rank 0", "all_reduce(shape (3,)", "4 bytes")
        with mesh.budget(bytes=None if mesh.rank else 4), told:
            group.all_reduce(np.ones(3)).resolve()
        assert group.all_reduce(np.ones(1)).resolve()[0] == 3

    on_ranks(3, body)


# -- wrong use ------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [-1, 1.5, "8", True, np.nan])
@pytest.mark.parametrize("what", ["bytes", "messages"])
def test_a_limit_is_a_whole_number(what, value):
    def body(mesh):
        with raises(MeshError, what, "budget", repr(value)):
            mesh.budget(**{what: value})
        assert mesh.budget(**{what: np.int64(3)}) is not None

    on_ranks(1, body)


def test_a_budget_is_entered_once_and_of_an_open_mesh():
    def main():
        mesh = mm.DeviceMesh("dp=1")
        with mesh.budget(bytes=7) as budget, raises(MeshError, f"{__file__}:", "entered before"):
            budget.__enter__()
        assert repr(budget) == "<Budget bytes=7, messages=None, used 0 bytes in 0 messages>"
        mesh.close()
        with raises(ClosedError, "rank 0", "budget", "closed"):
            mesh.budget()

    mm.run_virtual(1, main)
