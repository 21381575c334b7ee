"""Meshes: made, refused, copied, over a part of the world."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mpimesh as mm
from mpimesh.errors import (
    MismatchError,
    MpimeshError,
    RankError,
    WorldSizeError,
)
from tests.contract.cases import same
from tests.contract.meshes import members_agree, mesh_of, world_size
from tests.helpers.raises import raises


def check_a_copy_is_independent(comm):
    with mesh_of(comm) as mesh:
        mesh.add_group("mine", [0])
        mesh.add_group("pairs", dims=mesh.dim_names[-1:])
        with mesh.copy() as other:
            assert other.dims == mesh.dims
            assert other.group_names == mesh.group_names
            other.add_group("more", [0])
            assert mesh.get_group("more") is None
            members_agree(other)
            if mesh.world_size > 1:
                first, second = (mesh, other) if mesh.rank else (other, mesh)
                handles = [first.group().all_reduce(1), second.group().all_reduce(1)]
                for handle in handles:
                    same(handle.resolve(), np.asarray(mesh.world_size))
            other.reshape("other=-1")
            assert mesh.dim_names != other.dim_names
        members_agree(mesh)
        mesh.reshape(mm.MeshTopology.pipeline_parallel(mesh.world_size))
        with mesh.copy() as third:
            assert third.topology == mesh.topology
            assert sorted(third.group_names) == sorted(mesh.group_names)
            members_agree(third)


def check_topologies(comm):
    n = world_size(comm)
    kinds: list[mm.MeshTopology] = [mm.MeshTopology.data_parallel()]
    kinds += [mm.MeshTopology.tensor_parallel(f) for f in range(1, n + 1) if n % f == 0]
    kinds.append(mm.MeshTopology.pipeline_parallel(n))
    if n == 8:
        kinds.append(mm.MeshTopology.mixed(tp=2, pp=2, dp=2))
    if n == 4:
        kinds.append(mm.MeshTopology.mixed(tp=2, pp=1, dp=2))
    for topology in kinds:
        with mm.DeviceMesh(topology, comm) as mesh:
            assert mesh.topology == topology
            plan = topology.group_plan(n)
            for name, ranks in plan:
                assert list(mesh.group(name).ranks) == list(ranks)
            members_agree(mesh)
            if n == 8 and "tp_dp0_pp0" in mesh.group_names:
                assert list(mesh.group("tp_dp1_pp0").ranks) == [4, 5]
                assert mesh.group_rank("tp_dp1_pp1") == {6: 0, 7: 1}.get(mesh.rank)


def check_set_rank(comm):
    with mesh_of(comm) as mesh:
        mesh.set_rank(mesh.rank)
        n = mesh.world_size
        for rank in (n, -1, n + 5):
            with raises(RankError, f"Rank {rank}", f"world size {n}"):
                mesh.set_rank(rank)
        if n > 1:
            with raises(RankError, f"rank {mesh.rank}", f"rank {(mesh.rank + 1) % n}"):
                mesh.set_rank((mesh.rank + 1) % n)


def check_devices_and_stats(comm):
    with mesh_of(comm) as mesh:
        n = mesh.world_size
        devices = mesh.all_devices()
        assert len(devices) == n
        assert mesh.local_device() == devices[mesh.rank] == mesh.get_device(mesh.rank)
        assert mesh.get_device(n) is None
        assert mesh.get_device(-1) is None
        backend = mesh.local_device().backend
        assert len(mesh.devices_by_backend(backend)) == n
        assert len(mesh.devices_in_group("world")) == n
        assert mesh.total_memory_mb > 0
        assert mesh.total_compute_units > 0


def check_a_world_that_does_not_fit(comm):
    n = world_size(comm)
    dims: Any
    caught: Any
    for dims in (f"dp={n + 1}", f"dp={2 * n},tp=2", {"a": n, "b": 3}):
        with pytest.raises(WorldSizeError) as caught:
            mm.DeviceMesh(dims, comm)
        text = str(caught.value)
        assert str(n) in text
        assert "\n" not in text
        assert ("mpiexec -n" in text) == (n == 1), text
        assert caught.value.agreed
    for dims in ("dp=-1,tp=-1", "dp=0", "", "dp", "dp=x", {"dp": 1.5}, None, 7):
        with pytest.raises(MpimeshError) as caught:
            mm.DeviceMesh(dims, comm)
        assert caught.value.agreed, dims
    for dims in ("world=-1", {"world": n}):
        with raises(MpimeshError, "'world'") as caught:
            mm.DeviceMesh(dims, comm)
    if n > 1:
        mine = world_rank_of(comm)
        for pair in (("a=-1", "b=-1"), (f"a={n}", f"a={n + 1}"), ("a=-1", f"a={n},b=1")):
            with raises(MismatchError, "rank 0: DeviceMesh") as caught:
                mm.DeviceMesh(pair[mine == 0], comm)
            assert caught.value.agreed


def world_rank_of(comm):
    """This rank of `comm`."""
    with mm.DeviceMesh("a=-1", comm) as mesh:
        return mesh.rank


def check_one_size_may_be_left_open(comm):
    with mm.DeviceMesh("a=1,b=-1", comm) as mesh:
        assert mesh.dim_size("b") == mesh.world_size
        assert list(mesh.shape) == [1, mesh.world_size]


def check_meshes_over_part_of_the_world(comm):
    n = world_size(comm)
    if n < 2:
        return
    half = n // 2
    first = mm.Mesh([("x", half)], range(half))
    second = mm.Mesh([("y", n - half)], list(range(half, n))[::-1])
    with mm.DeviceMesh(first, comm) as low, mm.DeviceMesh(second, comm) as high:
        mine, other = (low, high) if low.rank < half else (high, low)
        group = mine.group()
        start = 0 if mine is low else half
        members = list(range(start, start + group.size))
        assert sorted(group.ranks) == members
        assert list(high.ids) == list(range(half, n))[::-1]
        members_agree(mine)
        with raises(RankError, f"rank {mine.rank}", other.dims_text):
            other.group()
        assert other.get_group("world") is None
        assert other.group_names == []
        assert not other.in_group("world")
        with pytest.raises(RankError):
            other.coord(other.dim_names[0])
        assert other.rank == mine.rank
        assert other.dim_size(other.dim_names[0]) in (half, n - half)
        assert len(other.all_devices()) == n
        handle = group.all_reduce(np.array([float(mine.rank)]))
        same(handle.resolve(), np.array([float(sum(members))]))
        mine.add_group("both ends", sorted({members[0], members[-1]}))
        members_agree(mine)
        foreign = 0 if mine is high else n - 1
        with raises(RankError, f"Rank {foreign}", "'foreign'", mine.ids.tolist()):
            mine.add_group("foreign", [foreign])
        with mm.DeviceMesh("all=-1", comm) as world:
            members_agree(world)


def check_a_mesh_of_one_rank(comm):
    n = world_size(comm)
    with mm.DeviceMesh(mm.Mesh([("x", 1)], [n - 1]), comm) as mesh:
        if mesh.rank == n - 1:
            group = mesh.group("x")
            same(group.all_reduce(np.arange(3.0), "mean").resolve(), np.arange(3.0))
            same(group.all_gather(2).resolve(), np.array([2]))
            same(group.shift(np.ones(2), wrap=True).resolve(), np.ones(2))
            assert group.shift(np.ones(2)).resolve() is None
            group.barrier(timeout_s=1)
        else:
            assert mesh.get_group("x") is None


def check_shared_memory_is_aligned(comm):
    with mesh_of(comm) as mesh:
        for shape, dtype in (((3, 5), "f4"), (7, "i8"), ((), "f8"), ((0, 4), "c16")):
            array = mesh.shared_empty(shape, dtype)
            assert array.dtype == dtype
            assert array.size == 0 or array.ctypes.data % 64 == 0
            assert array.flags.c_contiguous
            assert array.flags.writeable
            array[...] = 1
        with raises(MpimeshError, (2, -1)):
            mesh.shared_empty((2, -1))
        with raises(MpimeshError, "object", "Python objects"):
            mesh.shared_empty(3, object)


def check_many_meshes_and_groups_come_and_go(comm):
    for number in range(20):
        with mesh_of(comm) as mesh:
            mesh.add_group("mine", range(mesh.world_size))
            if number % 10 == 0:
                members_agree(mesh)
