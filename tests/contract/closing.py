"""Groups that are closed before their mesh: names, communicators, and who knows of it."""

from __future__ import annotations

import numpy as np
import pytest

import mpimesh as mm
from mpimesh.errors import (
    ClosedError,
    GroupError,
    MismatchError,
    UnknownNameError,
    UnresolvedError,
)
from tests.contract.meshes import members_agree, mesh_of, sum_of, world_size
from tests.helpers.raises import raises


def check_a_closed_group_is_forgotten(comm):
    with mesh_of(comm) as mesh:
        n = mesh.world_size
        before = mesh.group_names
        with mesh.add_group("turned", range(n)[::-1], apart=True) as group:
            assert not group.closed
            sum_of(group)
        assert group.closed
        assert "closed" in repr(group)
        assert mesh.group_names == before
        assert mesh.get_group("turned") is None
        with raises(UnknownNameError, "'turned'"):
            mesh.group("turned")
        group.close()  # a second time
        x = np.ones(n)
        for call in (
            lambda: group.all_reduce(x),
            lambda: group.all_reduce_init(x),
            lambda: group.reduce(x),
            lambda: group.reduce_scatter(x),
            lambda: group.all_gather(x),
            lambda: group.gather(x),
            lambda: group.scatter([x] * n if mesh.rank == n - 1 else None),
            lambda: group.all_to_all(x),
            lambda: group.broadcast(x),
            lambda: group.broadcast(None, root=None),
            lambda: group.shift(x),
            lambda: group.send(x, 0),
            lambda: group.recv(0),
            lambda: group.barrier(),
            lambda: group.barrier(timeout_s=1),
            lambda: group.empty_once(3),
            lambda: group.algorithms(),
            lambda: group.communicator,
        ):
            with raises(ClosedError, f"rank {mesh.rank}", "'turned'", "add_group"):
                call()
        again = mesh.add_group("turned", range(n))
        assert again is mesh.group("turned")
        members_agree(mesh)
    again.close()  # its mesh has closed it


def check_results_stay_and_prepared_ones_do_not_start(comm):
    with mesh_of(comm) as mesh:
        n = mesh.world_size
        group = mesh.add_group("g", range(n), apart=True)
        handle = group.all_reduce(np.ones(3))
        handle.resolve()
        x = np.ones(2)
        prepared = group.all_reduce_init(x)
        assert prepared.start().resolve().tolist() == [n, n]
        group.close()
        assert handle.resolve().tolist() == [n] * 3
        with raises(ClosedError, "'g'"):
            prepared.start()


def check_the_groups_of_the_mesh_itself_stay(comm):
    with mm.DeviceMesh(mm.MeshTopology.tensor_parallel(world_size(comm)), comm) as mesh:
        for name in mesh.group_names:
            with raises(GroupError, f"rank {mesh.rank}", repr(name), "add_group"):
                mesh.group(name).close()
        with raises(GroupError, "'everyone'"):
            mesh._core.everyone.close()
        members_agree(mesh)


def check_members_close_alone(comm):
    """Who is not in the group need not call it: the next add_group tells all."""
    with mesh_of(comm) as mesh:
        n = mesh.world_size
        for chosen in ([0], [n - 1], list(range(n))[::-2], [0, n - 1][: min(n, 2)]):
            for _ in range(2):
                group = mesh.add_group("some", chosen)
                if group.rank is not None:
                    sum_of(group)
                    group.close()
                mesh.add_group("same", chosen)
                members_agree(mesh)
                mesh.group("same").close()
        mesh.add_group("g", [0])
        assert mesh.group_names[-1] == "g"
        assert not {"some", "same"} & set(mesh.group_names)


def check_non_members_alone_close_nothing(comm):
    with mesh_of(comm) as mesh:
        if mesh.world_size == 1:
            return
        group = mesh.add_group("first", [0])
        if mesh.rank:
            group.close()
            assert mesh.get_group("first") is None
        with raises(GroupError, "already", "'first'") as caught:
            mesh.add_group("first", [1])
        assert caught.value.agreed
        if mesh.rank == 0:
            sum_of(group)
        group.close()
        mesh.add_group("first", [1])
        members_agree(mesh)


def check_two_names_share_a_communicator(comm):
    with mesh_of(comm) as mesh:
        n = mesh.world_size
        if n == 1:
            return
        ranks = list(range(n))[::-1]
        first, second = mesh.add_group("first", ranks), mesh.add_group("second", ranks)
        assert first.communicator is second.communicator
        handle = second.all_reduce(1)
        first.close()
        assert handle.resolve() == n
        sum_of(second)
        # The name, for other ranks; the communicator, for other names.
        first = mesh.add_group("first", ranks[1:] + ranks[:1])
        third = mesh.add_group("third", ranks)
        assert third.communicator is second.communicator
        second.close()
        members_agree(mesh)
        third.close()
        members_agree(mesh)
        whole = mesh.add_group("whole", range(n))
        whole.close()
        sum_of(mesh.group())


def check_lines_close_one_by_one(comm):
    """Of groups along dims each closes for itself; the name is free when all have."""
    with mesh_of(comm) as mesh:
        dims = mesh.dim_names
        n = mesh.world_size
        if len(dims) < 2 or dims == ("a",):
            return
        mesh.reshape({"u": n // 2, "v": 2})
        grid = np.arange(n).reshape(n // 2, 2)
        mesh.reshape(f"w={n}")
        value = mm.Mesh({"u": n // 2, "v": 2}, world_size=n)
        mesh.reshape(value)
        mesh.add_group("lines", dims="v")
        mesh.add_group("pairs", grid[0].tolist())
        if mesh.coord("u") == 0:
            mesh.group("lines").close()
        with raises(GroupError, "already", "'lines'"):
            mesh.add_group("lines", dims="u")
        members_agree(mesh)
        mesh.reshape(f"w={n}")  # the lines that are still there come along
        members_agree(mesh)
        mesh.reshape(value)
        mesh.add_group("again", dims="v")
        members_agree(mesh)
        if mesh.get_group("lines") is not None:
            mesh.group("lines").close()
        mesh.add_group("lines", dims="u")
        members_agree(mesh)


def check_copies_have_what_is_open(comm):
    with mesh_of(comm) as mesh:
        n = mesh.world_size
        line = [rank for rank in range(n) if rank % 2 == 0]
        for name in ("kept", "closed"):
            mesh.add_group(name, line)
        mesh.add_group("first two", list(range(min(n, 2))))
        if mesh.in_group("closed"):
            mesh.group("closed").close()
        with mesh.copy() as other:
            assert other.group_names == [name for name in mesh.group_names if name != "closed"]
            assert list(other.group("first two").ranks) == list(range(min(n, 2)))
            members_agree(other)
            other.group("kept").close()
            members_agree(other)
            members_agree(mesh)
            mesh.group("kept").close()
            other.add_group("closed", line)
            members_agree(other)
        members_agree(mesh)


def check_closing_is_refused_while_results_are_open(comm):
    with mesh_of(comm) as mesh:
        n = mesh.world_size
        group = mesh.add_group("g", range(n), apart=True)
        handle = group.all_reduce(np.ones(2))
        if mesh.rank != n - 1:
            handle.resolve()
        with raises(UnresolvedError, "'g'", f"rank {n - 1}", "all_reduce") as caught:
            group.close()
        assert caught.value.agreed
        assert not group.closed
        assert handle.resolve().tolist() == [n, n]
        sum_of(group)
        group.close()


def check_an_error_leaves_the_group_to_its_mesh(comm):
    with mesh_of(comm) as mesh:
        group = mesh.add_group("g", range(mesh.world_size), apart=True)
        with pytest.raises(KeyError), group:
            raise KeyError("on each rank for itself")
        sum_of(group)


def check_different_groups_are_not_closed(comm):
    with mesh_of(comm) as mesh:
        n = mesh.world_size
        if n == 1:
            return
        names = ["first", "second"]
        for name in names:
            mesh.add_group(name, range(n)[::-1])
        with raises(MismatchError, "'first'", "'second'") as caught:
            mesh.group(names[mesh.rank == 0]).close()
        assert caught.value.agreed
        for name in names:
            assert not mesh.group(name).closed


def messages_that_nobody_received(comm):
    """With checks on they are an error; without, the communicator is kept for them.

    Not where a send waits for its receive.
    """
    with mesh_of(comm) as mesh:
        n = mesh.world_size
        if n == 1:
            return
        ranks = [n - 1, 0]
        group = mesh.add_group("pair", ranks)
        if group.rank == 1:
            group.send(np.ones(1), 0).resolve()
        if not mesh._core.context.settings.checks:
            group.close()
        elif group.rank is not None:
            with raises(MismatchError, "'pair'", "send", f"rank {n - 1}"):
                group.close()
            if group.rank == 0:
                group.recv(1).resolve()
            group.close()
        # Another of the same ranks gets its own messages and no others.
        group = mesh.add_group("pair", ranks)
        if group.rank == 1:
            group.send(np.array([7.0]), 0).resolve()
        elif group.rank == 0:
            assert group.recv(1).resolve().tolist() == [7.0]
