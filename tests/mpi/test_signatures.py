"""Without checks, too, ranks of one node that start different operations learn so."""

from __future__ import annotations

import time

import numpy as np
import pytest

import mpimesh as mm
from mpimesh.errors import MismatchError
from tests.contract.early_ends import WAITS, all_are_told
from tests.contract.mismatch_cases import COLLECTIVES, differences, plannings
from tests.contract.shared_memory import nodes_of
from tests.helpers.depth import deep, deep_but
from tests.helpers.named_ranks import named_ranks

ODD = 1
"""The rank that starts something else."""

PAIRS = {
    "shape": (lambda g: g.all_reduce(np.ones(4)), lambda g: g.all_reduce(np.ones(3))),
    "same size": (
        lambda g: g.all_reduce(np.ones((2, 3))),
        lambda g: g.all_reduce(np.ones((3, 2))),
    ),
    "large": (lambda g: g.all_reduce(np.ones(300_001)), lambda g: g.all_reduce(np.ones(300_000))),
    "dtype": (
        lambda g: g.all_reduce(np.ones(3, "f4")),
        lambda g: g.all_reduce(np.ones(3, "i4")),
    ),
    # Bytes that are no whole number of the others' elements: MPICH would end the job.
    "f4 into f8": (
        lambda g: g.all_reduce(np.ones(3, "f4")),
        lambda g: g.all_reduce(np.ones(3, "f8")),
    ),
    "one f8": (lambda g: g.all_reduce(np.ones(1)), lambda g: g.all_reduce(np.ones(1, "f4"))),
    "f4 into c16": (
        lambda g: g.all_reduce(np.ones(5, "f4")),
        lambda g: g.all_reduce(np.ones(5, "c16")),
    ),
    "f4 into f8, reduce": (
        lambda g: g.reduce(np.ones(3, "f4")),
        lambda g: g.reduce(np.ones(3, "i8")),
    ),
    "f4 into f8, reduce_scatter": (
        lambda g: g.reduce_scatter(np.ones(3 * g.size, "f4")),
        lambda g: g.reduce_scatter(np.ones(3 * g.size, "f8")),
    ),
    "bytes into f8": (
        lambda g: g.all_gather(np.ones(5, "i1")),
        lambda g: g.all_reduce(np.ones(5)),
    ),
    "reduction": (lambda g: g.all_reduce(np.ones(3), "max"), lambda g: g.all_reduce(np.ones(3))),
    "general": (
        lambda g: g.all_reduce(np.ones(8)[::2]),
        lambda g: g.all_reduce(np.ones(6)[::2]),
    ),
    "reduce": (lambda g: g.reduce(np.ones(4)), lambda g: g.reduce(np.ones(3))),
    "root": (
        lambda g: g.broadcast(np.ones(3), root=g.size - 1),
        lambda g: g.broadcast(np.ones(3), root=0),
    ),
    "blocks": (lambda g: g.all_gather(np.ones(4)), lambda g: g.all_gather(np.ones(3))),
    "axes": (
        lambda g: g.all_to_all(np.ones((g.size, g.size)), concat_axis=1),
        lambda g: g.all_to_all(np.ones((g.size, g.size))),
    ),
    "blocks of as many bytes": (
        lambda g: g.all_to_all(np.ones((g.size, 6))),
        lambda g: g.all_to_all(np.ones((2 * g.size, 3))),
    ),
    "sizes on one rank": (
        lambda g: g.all_to_all(np.ones(2 * g.size), sizes=[2] * g.size),
        lambda g: g.all_to_all(np.ones(2 * g.size)),
    ),
    "operation": (lambda g: g.all_gather(np.ones(3)), lambda g: g.all_reduce(np.ones(3))),
    "barrier": (lambda g: g.start_barrier(), lambda g: g.all_reduce(np.ones(3))),
}

ROOTED = ("reduce", "root", "f4 into f8, reduce")


@pytest.fixture(autouse=True, params=["auto", "always", "never"])
def _way(request, monkeypatch):
    monkeypatch.setenv("MPIMESH_NODE_SHARED", request.param)
    monkeypatch.setenv("MPIMESH_CHECKS", "0")


@pytest.mark.nprocs(2, 4)
@pytest.mark.parametrize("name", PAIRS)
def test_every_rank_learns_who_started_what(comm, name):
    odd, rest = PAIRS[name]
    with mm.DeviceMesh("dp=-1", comm) as mesh:
        group = mesh.group()
        for _ in range(3):
            group.all_reduce(np.ones(2)).resolve()
        handle = odd(group) if mesh.rank == ODD else rest(group)
        if name in ROOTED:
            comm.Barrier()  # not every rank needs all others: let them look when all have started
        with pytest.raises(MismatchError) as caught:
            handle.resolve()
        assert f"rank {ODD}: " in str(caught.value)
        assert mesh.rank in named_ranks(str(caught.value))
        assert "operation 4:" in str(caught.value)
        # MPI has lost the order of this group's collectives: none starts, on any rank.
        for size in (2, 300_000):
            with pytest.raises(MismatchError) as caught:
                group.all_reduce(np.ones(size)).resolve()
            assert "operation 4:" in str(caught.value)


@pytest.mark.nprocs(2, 4)
@pytest.mark.parametrize("name", deep_but(COLLECTIVES, "all_reduce"))
def test_each_collective_plain_and_planned_is_compared_with_each_other(comm, name):
    """Of each difference one way to plan, for each takes communicators, which stay in use."""
    for turn, (what, (odd, rest)) in enumerate(differences(name).items()):
        plans = plannings(name, what)
        odd_plans, rest_plans = plans[turn % len(plans)]
        with mm.DeviceMesh("dp=-1", comm) as mesh:
            group = mesh.group()
            handle = odd(group, odd_plans) if mesh.rank == ODD else rest(group, rest_plans)
            comm.Barrier()  # not every rank needs all others: let them look when all have started
            try:
                handle.resolve(10)
                found = "no error"
            except MismatchError as error:
                found = "" if f"rank {ODD}: " in str(error) else str(error)
            assert set(comm.allgather(found)) == {""}, (what, odd_plans, rest_plans)


@pytest.mark.nprocs(4)
def test_no_later_mesh_gets_what_was_on_its_way(comm, monkeypatch):
    """MPI gives a freed communicator's number to another, and its messages with it."""
    with mm.DeviceMesh("dp=-1", comm) as mesh:
        group = mesh.group()
        group.all_reduce(np.ones(2)).resolve()
        handle = group.start_barrier() if mesh.rank == ODD else group.all_reduce(np.ones(3))
        with pytest.raises(MismatchError):
            handle.resolve()
    monkeypatch.setenv("MPIMESH_NODE_SHARED", "never")
    with mm.DeviceMesh("dp=-1", comm) as mesh:
        # Its communicator may get a number that only the ranks left out still use.
        group = mesh.add_group("rest", [2, 3])
        if mesh.rank in group.ranks:
            for size in range(1, 9):
                want = np.full(size, 7.0)
                x = np.full(size, 1.0 + mesh.rank)
                np.testing.assert_array_equal(group.all_reduce(x).resolve(), want)


@pytest.mark.nprocs(2)
@pytest.mark.parametrize("size", [3, 200])
def test_no_later_mesh_gets_a_message_that_nobody_received(comm, monkeypatch, size):
    """Without checks, which would refuse to close the mesh.

    MPI sends such few bytes at once; a large message that nobody receives is never sent.
    """
    monkeypatch.setenv("MPIMESH_CHECKS", "0")
    for nobody in (True, False):
        with mm.DeviceMesh("dp=-1", comm) as mesh:
            group = mesh.group()
            sent = np.full(size, 1.0 + nobody)
            if mesh.rank == 0:
                group.send(sent, 1).resolve()
            elif mesh.rank == 1 and not nobody:
                np.testing.assert_array_equal(group.recv(0).resolve(), sent)


@pytest.mark.nprocs(2)
def test_an_operation_too_few_is_found_while_others_wait(comm):
    with mm.DeviceMesh("dp=-1", comm) as mesh:
        group = mesh.group()

        def main():
            if mesh.rank == 0:
                group.broadcast(np.ones(2), root=0).resolve()
            group.all_reduce(np.ones(3)).resolve()

        with pytest.raises(MismatchError) as caught:
            main()
        assert "rank 0: broadcast(shape (2,), float64, root 0)" in str(caught.value)
        assert "rank 1: all_reduce(shape (3,), float64, sum)" in str(caught.value)
        comm.Barrier()


@pytest.mark.parametrize("odd_way", ["plain", "general"])
def test_the_short_way_and_the_general_one_are_one_operation(comm, odd_way):
    """An array that is not contiguous goes another way inside a rank, and not over ranks."""
    with mm.DeviceMesh("dp=-1", comm) as mesh:
        group, n = mesh.group(), comm.size

        def x(*shape):
            whole = np.ones((*shape, 2))
            general = (mesh.rank == 0) == (odd_way == "general")
            return whole[..., 0] if general else np.ascontiguousarray(whole[..., 0])

        for _ in range(3):
            for op in ("sum", "mean", "max"):
                assert group.all_reduce(x(3), op).resolve().shape == (3,)
            assert group.all_reduce(x(2, 3)).resolve().shape == (2, 3)
            assert group.reduce_scatter(x(2 * n, 3)).resolve().shape == (2, 3)
            assert group.all_gather(x(2, 3)).resolve().shape == (2 * n, 3)
            assert group.all_to_all(x(2 * n, 3)).resolve().shape == (2 * n, 3)
            assert group.broadcast(x(4), root=n - 1).resolve().shape == (4,)


@pytest.mark.nprocs(2, 3, 4)
def test_what_was_under_way_before_a_mismatch_ends_and_what_came_after_it_raises(comm):
    with mm.DeviceMesh("dp=-1", comm) as mesh:
        group = mesh.group()
        before = [group.all_reduce(np.full(3, float(n))) for n in range(5)]
        odd = group.all_reduce(np.ones(3, "f4" if mesh.rank == ODD else "f8"))
        after = [group.all_reduce(np.full(3, float(n))) for n in range(5)]
        for n, handle in enumerate(before):
            np.testing.assert_array_equal(handle.resolve(), np.full(3, float(n * comm.size)))
        for handle in (odd, *after):
            with pytest.raises(MismatchError) as caught:
                handle.resolve()
            assert "operation 6:" in str(caught.value)
            assert f"rank {ODD}: all_reduce(shape (3,), float32" in str(caught.value)


@pytest.mark.nprocs(2)
def test_what_queues_behind_shared_memory_starts_though_what_comes_after_it_differs(comm):
    with mm.DeviceMesh("dp=-1", comm) as mesh:
        group = mesh.group()
        time.sleep(0.1 * mesh.rank)
        before = [group.all_reduce(np.ones(20_000)), group.start_barrier()]
        before.append(group.all_reduce(np.ones(2)))
        time.sleep(0.3 * (1 - mesh.rank))
        odd = group.all_reduce(np.ones(3, "f4" if mesh.rank == ODD else "f8"))
        for handle in before:
            handle.resolve(10)
        with pytest.raises(MismatchError):
            odd.resolve(10)


@pytest.mark.nprocs(2)
@pytest.mark.parametrize("odd_kind", ["f4", *deep("f8", "i1")])
@pytest.mark.parametrize("late", [0, *deep(1)])
@pytest.mark.parametrize(
    "common",
    [
        lambda mesh: mesh.add_group("all", range(mesh.world_size)),
        lambda mesh: mm.distribute(np.ones((4, 4)), mesh, "dp=S0").redistribute("dp=S1"),
        lambda mesh: mm.from_callback((4,), mesh, "dp=S0", lambda at: np.ones(4)[at]),
        lambda mesh: mesh.group().all_to_all(np.ones(mesh.world_size)).resolve(),
    ],
    ids=["add_group", "redistribute", "from_callback", "all_to_all"],
)
def test_what_is_no_method_of_a_group_is_compared_too(comm, common, late, odd_kind):
    """And nothing that comes after it takes what was left over: it was wrong numbers."""
    with mm.DeviceMesh("dp=-1", comm) as mesh:
        group = mesh.group()
        time.sleep(0.05 * (mesh.rank == late))

        def main():
            if mesh.rank == ODD:
                return group.all_reduce(np.ones(3, odd_kind)).resolve()
            return common(mesh)

        with pytest.raises(MismatchError):
            main()
        for _ in range(2):
            with pytest.raises(MismatchError):
                common(mesh)
        assert not group._core.progress.pending
        comm.Barrier()


def test_done_is_true_where_resolve_would_raise(comm):
    with mm.DeviceMesh("dp=-1", comm) as mesh:
        group = mesh.group()
        time.sleep(0.1 * (mesh.rank == ODD))
        handle = group.all_reduce(np.ones(3, "f4" if mesh.rank == ODD else "f8"))
        end_s = time.monotonic() + 10
        while not handle.done():
            assert time.monotonic() < end_s
        if comm.size == 1:
            handle.resolve()
        else:
            with pytest.raises(MismatchError):
                handle.resolve()


@pytest.mark.nprocs(2)
@pytest.mark.parametrize("odd", ["f4", *deep("broadcast", "barrier")])
def test_many_under_way_of_which_the_first_differs(comm, odd):
    with mm.DeviceMesh("dp=-1", comm) as mesh:
        group = mesh.group()
        time.sleep(0.2 * mesh.rank)
        first: mm.CollectiveTensor
        if mesh.rank != ODD:
            first = group.all_reduce(np.ones(3))
        elif odd == "f4":
            first = group.all_reduce(np.ones(3, "f4"))
        else:
            first = group.start_barrier() if odd == "barrier" else group.broadcast(np.ones(3))
        handles = [first] + [group.all_reduce(np.ones(3)) for _ in range(600)]
        for handle in handles:
            with pytest.raises(MismatchError):
                handle.resolve(10)
        assert not group._core.progress.pending


def test_many_under_way_resolved_in_any_order(comm):
    with mm.DeviceMesh("dp=-1", comm) as mesh:
        group = mesh.group()
        handles = [group.all_reduce(np.full(1 + n % 3, float(n))) for n in range(1500)]
        order = np.random.default_rng(mesh.rank).permutation(len(handles))
        for n in order:
            assert handles[n].resolve()[0] == n * comm.size


@pytest.mark.nprocs(4)
def test_ranks_of_several_nodes_compare_inside_each(comm):
    with nodes_of(2), mm.DeviceMesh("dp=2,tp=2", comm) as mesh:
        across, inside = mesh.group("dp"), mesh.group("tp")
        for _ in range(3):
            assert across.all_reduce(np.ones(3)).resolve()[0] == 2
        if mesh.rank < 2:
            with pytest.raises(MismatchError):
                inside.all_reduce(np.ones(3 + mesh.rank)).resolve()
        else:
            assert inside.all_reduce(np.ones(3)).resolve()[0] == 2


@pytest.mark.nprocs(2, 3, 4)
@pytest.mark.parametrize("name", WAITS)
def test_ranks_that_end_the_block_and_the_one_that_waits_for_them_are_told(comm, name):
    all_are_told(comm, name)
    with mm.DeviceMesh("dp=-1", comm) as mesh:  # and what comes next has its own
        assert mesh.group().all_reduce(np.ones(1)).resolve()[0] == comm.size


@pytest.mark.nprocs(4)
@pytest.mark.parametrize("node_ranks", [0, 2])
def test_ranks_that_end_the_block_while_neighbours_wait_in_parts_of_the_mesh(comm, node_ranks):
    def main():
        with nodes_of(node_ranks), mm.DeviceMesh("dp=2,tp=2", comm) as mesh:
            group = mesh.group("tp")
            handle = group.all_reduce(np.ones(3)) if group.rank == 0 else None
            comm.Barrier()  # else those of one part may learn first that the others have gone
            if handle is not None:
                handle.resolve()

    with pytest.raises(MismatchError) as caught:
        main()
    found = "rank 0: all_reduce(shape (3,), float64, sum); rank 1: close() of the mesh"
    assert found in str(caught.value)
