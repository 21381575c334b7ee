"""Meshes, groups, sub-meshes, reshape and copy."""

from __future__ import annotations

import numpy as np
import pytest

import mpimesh as mm
from mpimesh.errors import (
    GroupError,
    MismatchError,
    MpimeshError,
    RankError,
    UnknownNameError,
    WorldSizeError,
)
from tests.contract.meshes import groups_of, members_agree, mesh_of, sum_of, world_size
from tests.helpers.raises import raises


def check_groups_of_dims_follow_the_arithmetic(comm):
    n = world_size(comm)
    factors = [f for f in range(1, n + 1) if n % f == 0]
    for first in factors:
        for second in [f for f in factors if (n // first) % f == 0]:
            with mm.DeviceMesh(f"x={first},y={second},z=-1", comm) as mesh:
                grid = np.arange(n).reshape(first, second, -1)
                place = np.unravel_index(mesh.rank, grid.shape)
                for axis, name in enumerate("xyz"):
                    line = [p if a != axis else slice(None) for a, p in enumerate(place)]
                    ranks = grid[tuple(line)].tolist()
                    group = mesh.group(name)
                    assert list(group.ranks) == ranks
                    assert group.rank == place[axis] == mesh.coord(name)
                    assert mesh.group_rank(name) == place[axis]
                    assert mesh.in_group(name)
                    sum_of(group)
                pair = mesh.add_group("zx", dims=("z", "x"))
                assert list(pair.ranks) == grid[:, place[1], :].T.ravel().tolist()
                members_agree(mesh)
                assert mesh.group_names == ["world", "x", "y", "z", "zx"]


def check_custom_groups_keep_their_order(comm):
    with groups_of(comm, many=True) as groups:
        for group in groups:
            gathered = group.all_gather(np.array([group.world_rank])).resolve()
            assert gathered.tolist() == list(group.ranks)
            sum_of(group)


def check_non_members_only_describe_a_group(comm):
    with mesh_of(comm) as mesh:
        n = mesh.world_size
        chosen = [rank for rank in range(n) if rank % 2 == 0][::-1]
        group = mesh.add_group("even", chosen)
        assert mesh.get_group("even") is group
        assert list(group.ranks) == chosen
        assert group.size == len(chosen)
        assert mesh.in_group("even") == (mesh.rank in chosen)
        assert len(mesh.devices_in_group("even")) == len(chosen)
        x = np.ones(group.size)
        if mesh.rank in chosen:
            sum_of(group)
        else:
            assert group.rank is None
            assert mesh.group_rank("even") is None
            for call in (
                lambda: group.all_reduce(x),
                lambda: group.reduce(x),
                lambda: group.reduce_scatter(x),
                lambda: group.all_gather(x),
                lambda: group.gather(x),
                lambda: group.scatter(x),
                lambda: group.all_to_all(x),
                lambda: group.broadcast(x),
                lambda: group.broadcast(None, root=None),
                lambda: group.shift(x),
                lambda: group.send(x, 0),
                lambda: group.recv(0),
                lambda: group.send_next(x),
                lambda: group.barrier(),
                lambda: group.barrier(timeout_s=1),
                lambda: group.communicator,
            ):
                with raises(RankError, f"rank {mesh.rank}", "'even'", list(group.ranks)):
                    call()
        assert "'even'" in repr(group)


def check_unknown_groups(comm):
    with mesh_of(comm) as mesh:
        with raises(UnknownNameError, "'none'", f"world, {mesh.dim_names[0]}"):
            mesh.group("none")
        with raises(UnknownNameError, "'none'", f"world, {mesh.dim_names[0]}"):
            mesh.devices_in_group("none")
        assert mesh.get_group("none") is None
        assert mesh.group_rank("none") is None
        assert not mesh.in_group("none")


def check_add_group_refuses_on_all_ranks(comm):
    with mesh_of(comm) as mesh:
        n = mesh.world_size
        before = mesh.group_names
        for name, options, error, values in (
            ("g", {"ranks": [n]}, RankError, (f"Rank {n}", "'g'", list(range(n)))),
            ("g", {"ranks": [-1]}, MpimeshError, ("Rank -1", "'g'")),
            ("g", {"ranks": []}, GroupError, ("'g'", "no ranks")),
            ("g", {"ranks": [0, 0]}, GroupError, ("'g'", "rank 0", (0, 0))),
            ("world", {"ranks": [0]}, GroupError, ("already", "'world'")),
            (mesh.dim_names[0], {"ranks": [0]}, GroupError, ("already", repr(mesh.dim_names[0]))),
            ("g", {}, GroupError, ("'g'", "ranks or dims")),
            ("g", {"ranks": [0], "dims": "a"}, GroupError, ("'g'", "ranks or dims")),
            ("g", {"dims": "nope"}, UnknownNameError, ("nope",)),
            ("g", {"ranks": [0], "backend": "nccl"}, GroupError, ("'g'", "nccl")),
            ("g", {"ranks": [0], "backend": "x"}, GroupError, ("'g'", "backend", "'x'")),
            ("g", {"ranks": ["0"]}, MpimeshError, ("'g'", "rank", "'0'")),
            ("", {"ranks": [0]}, MpimeshError, ("name", "''")),
        ):
            with raises(error, *values) as caught:
                mesh.add_group(name, **options)
            assert caught.value.agreed
        assert mesh.group_names == before
        members_agree(mesh)


def check_add_group_with_different_arguments(comm):
    with mesh_of(comm) as mesh:
        if mesh.world_size == 1:
            return
        before = mesh.group_names
        last = mesh.rank == mesh.world_size - 1
        for mine, others, values in (
            (("p", [0, 1]), ("p", [1, 0]), ("rank", "'p'", (1, 0), (0, 1))),
            (("p", [0]), ("q", [0]), ("rank", "'p'", "'q'")),
            (("world", [0]), ("p", [0]), ("rank", "'p'", "'world'")),
            (("p", [99]), ("p", [0]), ("rank", "'p'", "Rank 99")),
        ):
            with raises(MismatchError, *values) as caught:
                mesh.add_group(*(mine if last else others))
            assert caught.value.agreed
        assert mesh.group_names == before
        mesh.add_group("p", [0])


def check_groups_that_lie_along_dims_for_some_ranks_only(comm):
    """A listed group may equal the group along a dim on its ranks, and on no others."""
    with mesh_of(comm) as mesh:
        dims = mesh.dim_names
        grid = np.arange(mesh.world_size).reshape(mesh.shape)
        if len(dims) == 1:
            return
        front = grid[..., 0].ravel().tolist()
        mesh.add_group("front", front)
        mesh.add_group("along", dims=dims[:-1])
        mesh.add_group("along again", dims=dims[:-1])
        mesh.add_group("front again", front)
        mesh.add_group("line", grid[(0,) * (grid.ndim - 1)].tolist())
        members_agree(mesh)
        mesh.reshape("all=-1")
        members_agree(mesh)
        mesh.add_group("front once more", front)
        mesh.add_group("back", grid[..., -1].ravel().tolist())
        members_agree(mesh)
        mesh.reshape({f"{name}2": size for name, size in zip(dims, grid.shape, strict=True)})
        mesh.add_group("dims", dims=[f"{name}2" for name in dims[:-1]])
        members_agree(mesh)


def check_reshape_rebuilds_groups_and_keeps_custom_ones(comm):
    with mesh_of(comm) as mesh:
        n = mesh.world_size
        custom = mesh.add_group("mine", list(range(n))[::-1])
        old = mesh.dim_names
        mesh.reshape(f"u={n},v=1")
        assert list(mesh.dim_names) == ["u", "v"]
        assert mesh.group("mine") is custom
        assert set(mesh.group_names) == {"world", "u", "v", "mine"}
        for name in old:
            assert mesh.get_group(name) is None
        members_agree(mesh)
        mesh.reshape({"v": 1, "w": -1})
        assert mesh.coord("w") == mesh.rank
        members_agree(mesh)
        mesh.reshape(mm.MeshTopology.tensor_parallel(n))
        assert mesh.topology is not None
        members_agree(mesh)
        mesh.reshape("w=-1")
        assert mesh.topology is None
        members_agree(mesh)


def check_reshape_changes_all_or_nothing(comm):
    with mesh_of(comm) as mesh:
        n = mesh.world_size
        mesh.add_group("mine", [0])
        mesh.add_group("tp_0", [n - 1])
        before = (repr(mesh), mesh.dims, mesh.topology, mesh.group_names)
        for dims, error, values in (
            (f"a={n + 1}", WorldSizeError, (f"a={n + 1}", n)),
            ("a=3,a=4", MpimeshError, ("repeated", "'a'")),
            ("mine=-1", GroupError, (["mine"],)),
            (mm.MeshTopology.tensor_parallel(n), GroupError, (["tp_0"],)),
            ("a=0", MpimeshError, ("'a'", 0)),
            (3.5, MpimeshError, (3.5,)),
        ):
            with raises(error, *values):
                mesh.reshape(dims)
            now = (repr(mesh), mesh.dims, mesh.topology, mesh.group_names)
            assert now == before
            members_agree(mesh)
        if n > 1:
            with pytest.raises(MismatchError):
                mesh.reshape("p=-1" if mesh.rank == 0 else "q=-1")
            with pytest.raises(MismatchError):
                mesh.reshape("p=-1" if mesh.rank else f"q={n + 1}")
            assert mesh.dims == before[1]
            members_agree(mesh)
