"""Meshes and groups for any number of ranks."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import numpy as np

import mpimesh as mm
from mpimesh.runtime.world import current_world
from tests.contract.cases import same

_DIMS = {4: "a=2,b=2", 6: "a=2,b=3", 8: "a=2,b=2,c=2"}


def world_size(comm: Any) -> int:
    """Number of ranks of `comm`; None is the world of :func:`mpimesh.run_virtual`."""
    return current_world().size_of(comm)


def mesh_of(comm: Any) -> Any:
    """Collective: open a mesh of as many dims as the number of ranks has."""
    return mm.DeviceMesh(_DIMS.get(world_size(comm), "a=-1"), comm)


@contextmanager
def groups_of(comm: Any, *, many: bool = False):
    """Open a mesh and give some of its groups that this rank is in.

    Collective. All ranks get the groups in the same order.

    Args:
        comm: The ranks.
        many: All kinds of groups, overlapping and permuted; if not, one of all ranks in another
            order, one of a part of them, and one of a single rank.
    """
    with mesh_of(comm) as mesh:
        size = mesh.world_size
        ranks = list(range(size))
        names = ["turned", mesh.dim_names[-1], "alone"]
        mesh.add_group("turned", ranks[::-1])
        mesh.add_group("alone", [size // 2])
        if many:
            mesh.add_group("rotated", ranks[1:] + ranks[:1])
            mesh.add_group("first and last", sorted({size - 1, 0}, reverse=True))
            if len(mesh.dim_names) > 1:
                mesh.add_group("joined", dims=mesh.dim_names[:0:-1])
            names = mesh.group_names
        mine: dict[tuple[int, ...], Any] = {}
        for group in map(mesh.group, names):
            if group.rank is not None:
                # Two names for the same ranks are one group: once is enough.
                mine.setdefault(tuple(group.ranks), group)
        yield list(mine.values())


def sum_of(group):
    """The sum over the group's ranks, by communication and by arithmetic."""
    total = group.all_reduce(np.array([1 << group.world_rank])).resolve()
    same(total, np.array([sum(1 << rank for rank in group.ranks)]), group)


def members_agree(mesh):
    """Every group is the ranks that it says, in that order."""
    for name in mesh.group_names:
        group = mesh.get_group(name)
        if group.rank is None:
            assert mesh.rank not in group.ranks
            continue
        assert group.ranks[group.rank] == mesh.rank
        gathered = group.all_gather(np.array([mesh.rank])).resolve()
        assert gathered.tolist() == list(group.ranks), name
