"""Meshes on MPI communicators: the user's own, parts of the world, and very many of them."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

import mpimesh as mm
from mpimesh.errors import ClosedError, MeshError, MpimeshError, RankError, TransportError
from tests.helpers.raises import raises

MESHES = 5000
"""More than twice as many as MPICH has communicators."""


def test_a_communicator_of_the_user(comm):
    from mpi4py import MPI

    part = comm.Split(comm.rank % 2, -comm.rank)
    with mm.DeviceMesh("x=-1", part) as mesh:
        assert (mesh.rank, mesh.world_size) == (part.rank, part.size)
        members = [rank for rank in range(comm.size) if rank % 2 == comm.rank % 2][::-1]
        got = mesh.group("x").all_gather(comm.rank).resolve()
        assert got.tolist() == members
        # The user's own traffic on it goes on, between the same ranks and with the same tags.
        handle = mesh.group().all_reduce(np.ones(3))
        after, before = (part.rank + 1) % part.size, (part.rank - 1) % part.size
        theirs = np.zeros(1)
        part.Sendrecv(np.array([7.0 + part.rank]), after, 0, theirs, before, 0)
        assert theirs[0] == 7.0 + before
        assert part.allreduce(1, MPI.SUM) == part.size
        assert handle.resolve().tolist() == [part.size] * 3
    # It is still theirs.
    assert part.allreduce(1, MPI.SUM) == part.size
    part.Free()


def test_a_communicator_of_this_rank_alone(comm):
    from mpi4py import MPI

    with mm.DeviceMesh("x=1", MPI.COMM_SELF) as mesh:
        assert mesh.world_size == 1
        assert mesh.group().all_gather(np.arange(2)).resolve().tolist() == [0, 1]
        assert mesh.group().all_to_all(np.arange(2)).resolve().tolist() == [0, 1]


def test_a_mesh_on_the_communicator_of_a_group(comm):
    with mm.DeviceMesh("all=-1", comm) as outer:
        with mm.DeviceMesh("x=-1", outer.group().communicator) as inner:
            assert inner.group("x").all_reduce(1).resolve() == comm.size
        assert outer.group().all_reduce(2).resolve() == 2 * comm.size


def test_what_is_no_communicator(comm):
    for wrong in (7, "world", object(), [0, 1]):
        shown = "object" if type(wrong) is object else repr(wrong)
        with raises(MeshError, "comm", shown):
            mm.DeviceMesh("x=-1", wrong)


def test_the_native_communicator(comm):
    with mm.DeviceMesh("x=-1", comm) as mesh:
        native = mesh.group().communicator.native
        assert native.allgather(comm.rank) == list(range(comm.size))
        group = mesh.group("x")
    with pytest.raises(ClosedError):
        _ = group.communicator


@pytest.mark.nprocs(2)
def test_a_failed_mesh_gives_its_communicators_back(comm):
    """Half as many as MPICH has; each would hold one or more if it kept them."""
    with mm.DeviceMesh("x=-1", comm) as mesh:
        for number in range(1100):
            with pytest.raises(MpimeshError):
                mm.DeviceMesh(f"x={comm.size + 1}", comm)
            if number % 3 == 0:
                mesh.reshape(f"x{number}=-1,y=1")


@pytest.mark.deep
@pytest.mark.nprocs(2)
@pytest.mark.limit(100)
def test_thousands_of_meshes_one_after_the_other(comm):
    start_s = time.perf_counter()
    for number in range(MESHES):
        with mm.DeviceMesh("dp=1,pp=2", comm) as mesh:
            if number % 500 == 0:
                mesh.add_group("turned", [1, 0])
                assert mesh.group("turned").all_reduce(1).resolve() == 2
    took_s = time.perf_counter() - start_s
    if comm.rank == 0:
        print(f"{MESHES} meshes in {took_s:.1f} s")


@pytest.mark.nprocs(4)
def test_groups_of_groups_come_and_go(comm):
    for number in range(40):
        with mm.DeviceMesh("dp=2,pp=2", comm) as mesh, mesh.copy() as other:
            other.add_group("a", [3, 1])
            other.add_group("b", dims="pp,dp")
            other.reshape("a2=4,b2=1")
            if number % 50 == 0:
                assert other.group("b").all_reduce(1).resolve() == 4


@pytest.mark.nprocs(2, 3)
def test_a_rank_that_a_split_leaves_out_is_told(comm):
    from mpi4py import MPI

    part = comm.Split(MPI.UNDEFINED if comm.rank == 0 else 0)
    if comm.rank == 0:
        with raises(RankError, "COMM_NULL"):
            mm.DeviceMesh("x=-1", part)
        return
    with mm.DeviceMesh("x=-1", part) as mesh:
        assert mesh.world_size == comm.size - 1
    part.Free()


@pytest.mark.nprocs(2, 3, 4)
def test_a_group_apart_has_an_order_of_its_own(comm):
    """One of the first rank's operations waits, and those of the mesh go on, and of a copy, too."""
    with mm.DeviceMesh("x=-1", comm) as mesh:
        with raises(MpimeshError, "add_group('apart')", "dims"):
            mesh.add_group("apart", dims="x", apart=True)
        apart = mesh.add_group("apart", range(comm.size), apart=True)
        assert mesh.add_group("same", range(comm.size)).communicator is mesh.group().communicator
        copied = mesh.copy()
        assert copied.group("apart").communicator is not copied.group().communicator
        copied.close()
        early = apart.all_reduce(1) if mesh.rank == 0 else None
        assert mesh.group().all_reduce(2).resolve() == 2 * comm.size
        late = apart.all_reduce(1) if early is None else early
        assert late.resolve() == comm.size


@pytest.mark.nprocs(2)
def test_where_mpi_has_no_more_the_error_says_who_holds_them(comm):
    from mpi4py import MPI

    if "MPICH" not in MPI.Get_library_version():
        return  # Open MPI has more than a test can open
    parts: list[Any] = []
    with mm.DeviceMesh("x=1", MPI.COMM_SELF) as mesh:
        try:
            with raises(TransportError, __file__, "close()"):
                while len(parts) <= MESHES:
                    parts.append(mesh.group().communicator.split(0, 0))
        finally:
            for part in parts:
                part.free()
    # What was given back can be had again.
    with mm.DeviceMesh("x=-1", comm) as mesh:
        assert mesh.size == comm.size


@pytest.mark.nprocs(2)
def test_of_a_mesh_that_was_left_or_moved_nothing_is_kept(comm):
    with mm.DeviceMesh("x=-1", comm) as first:
        world = first._core.context.world
        assert world.channels is not None
        meshes = set(world.channels._meshes)
        names = set(world.progress.ledgers)

        def left():
            with mm.DeviceMesh("x=-1", comm) as mesh:
                mesh.group().all_reduce(1).resolve()
                raise KeyError("on each rank for itself")

        with pytest.raises(KeyError):
            left()
        with mm.DeviceMesh("x=-1", comm) as mesh:
            mesh.set_comm(comm.Dup())
            assert mesh.group().all_reduce(1).resolve() == comm.size
        assert set(world.progress.ledgers) == names
        assert set(world.channels._meshes) == meshes
