"""Groups of ranks: along a dim that a mesh may lack, and of all ranks that hold one thing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from mpimesh.arguments import shown
from mpimesh.errors import MeshError, UnknownNameError
from mpimesh.parallel.header import fingerprint
from mpimesh.runtime import DeviceMesh, ProcessGroup
from mpimesh.runtime.agreement import agree
from mpimesh.runtime.call import Call

__all__ = [
    "group_along",
    "group_named",
    "groups_of_lines",
    "lines_along",
    "lines_of_holders",
    "live_mesh",
    "no_dim",
]

_LONGEST_NAME = 40

Line = tuple[int, ...]


def group_along(mesh: DeviceMesh, dim: str, usual: str) -> ProcessGroup:
    """Return the group along `dim`; this rank alone where the mesh has not the usual dim.

    Raises:
        UnknownNameError: If there is no such dim, and it is not the usual one.
        MeshError: If it is no live mesh.
    """
    live_mesh(mesh)
    if isinstance(dim, str) and mesh.contains_dim(dim):
        return mesh.group(dim)
    if not isinstance(dim, str) or dim != usual:
        raise no_dim(mesh, dim, "data_dim" if usual == "dp" else "dim")
    return mesh.group().alone()


def no_dim(mesh: DeviceMesh, dim: object, option: str) -> UnknownNameError:
    """Return the error for a dim that a mesh has not, given as an option of that name."""
    option_dim = dim if isinstance(dim, str) and dim.isidentifier() else "dp"
    return UnknownNameError(
        f"the mesh {mesh.dims_text} has no dim {shown(dim)}: give the name of one of its dims as "
        f"{option}=, or make the mesh with such a dim, as in DeviceMesh('{option_dim}=-1')"
    )


def live_mesh(mesh: object) -> DeviceMesh:
    """Return a mesh, if it is one with ranks.

    Raises:
        MeshError: If it is not.
    """
    if isinstance(mesh, DeviceMesh):
        return mesh
    wanted = "a DeviceMesh, which has ranks, such as mm.DeviceMesh('dp=2')"
    raise MeshError(f"mesh must be {wanted}, got {shown(mesh)}")


def group_named(
    mesh: DeviceMesh, name: str, ranks: list[int], *, apart: bool = False
) -> ProcessGroup:
    """Return a group; another model on this mesh may have made it, on all ranks alike."""
    found = mesh.get_group(name)
    return mesh.add_group(name, ranks, apart=apart) if found is None else found


def lines_of_holders(
    scope: ProcessGroup,
    mates: ProcessGroup,
    data: ProcessGroup,
    sets: Iterable[tuple[int, ...]],
    *,
    what: str,
) -> dict[tuple[int, ...], list[Line]]:
    """Return for each set of places which ranks stand there: with their replicas, line by line.

    Collective over `scope`.

    Args:
        scope: All ranks that may be among them.
        mates: The ranks among which this rank has a place, such as its pipeline.
        data: The replicas of this rank.
        sets: Sets of places in `mates`, alike on all ranks.
        what: What they hold, as an error calls it.

    Cost:
        An all-gather of about 20 bytes for each rank.
    """
    everyone: list[list[int]] = agree(
        scope._core, Call(what, scope.name), [mates.ranks[0], data.ranks[0], mates.rank or 0]
    )
    told = dict(zip(scope.ranks, everyone, strict=True))
    # Replicas have one corner: of their first place, the first replica.
    corner = {rank: told[first][1] for rank, (first, _, _) in told.items()}
    found: dict[tuple[int, ...], list[Line]] = {}
    for holders in dict.fromkeys(sets):
        lines: dict[int, list[int]] = {}
        for rank, (_, _, place) in told.items():
            if place in holders:
                lines.setdefault(corner[rank], []).append(rank)
        found[holders] = [tuple(line) for line in lines.values()]
    return found


def groups_of_lines(
    mesh: DeviceMesh,
    lines: Mapping[tuple[int, ...], Sequence[Line]],
    *,
    kind: str,
    apart: bool = False,
) -> dict[tuple[int, ...], ProcessGroup]:
    """Make a group of each line; return those that this rank is in. Collective over the mesh.

    Args:
        mesh: The mesh, which gets the groups.
        lines: What :func:`lines_of_holders` gives.
        kind: The first word of their names.
        apart: Whether their collectives have an order of their own.

    Cost:
        For each line a split of the mesh's communicator, unless there is a group of these ranks.
    """
    found = {}
    for holders, those in lines.items():
        for line in those:
            name = f"{kind} {','.join(map(str, line))}"
            if len(name) > _LONGEST_NAME:
                name = f"{kind} {line[0]},...,{line[-1]} {fingerprint(str(line)):x}"
            made = group_named(mesh, name, list(line), apart=apart)
            if mesh.rank in line:
                found[holders] = made
    return found


def lines_along(mesh: DeviceMesh, dim: str) -> list[Line]:
    """Return the ranks of each line along a dim. Local."""
    axis = mesh.dim_names.index(dim)
    ranks = np.array(mesh.ids).reshape([mesh.dim_size(name) for name in mesh.dim_names])
    lines = np.moveaxis(ranks, axis, -1).reshape(-1, mesh.dim_size(dim))
    return [tuple(line) for line in lines.tolist()]
