"""Groups of ranks that have the same parameters, and the comparison of these over the ranks.

A group is along a dim, which a mesh may lack, or of all ranks with one part of a model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations, zip_longest

import numpy as np

from mpimesh.arguments import digest_text, shown
from mpimesh.arrays import Array, to_numpy
from mpimesh.errors import MeshError, MismatchError, UnknownNameError, on_all_ranks
from mpimesh.nn import Parameter
from mpimesh.parallel.header import fingerprint
from mpimesh.runtime import DeviceMesh, ProcessGroup
from mpimesh.runtime.agreement import agree
from mpimesh.runtime.call import Call

__all__ = [
    "agree_texts",
    "agree_together",
    "agree_touched",
    "agree_values",
    "check_dims",
    "describe",
    "difference",
    "digest",
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


def group_along(mesh: DeviceMesh, dim: object, usual: str, option: str = "") -> ProcessGroup:
    """Return the group along `dim`; this rank alone where the mesh has not the usual dim.

    Args:
        mesh: The mesh.
        dim: The dim.
        usual: Its usual name.
        option: What it is given as; ``dim``, or ``data_dim`` where ``dp`` is usual, if empty.

    Raises:
        UnknownNameError: If there is no such dim, and it is not the usual one.
        MeshError: If it is no live mesh.
    """
    live_mesh(mesh)
    if isinstance(dim, str) and mesh.contains_dim(dim):
        return mesh.group(dim)
    if not isinstance(dim, str) or dim != usual:
        raise no_dim(mesh, dim, option or ("data_dim" if usual == "dp" else "dim"))
    return mesh.group().alone()


def check_dims(
    mesh: DeviceMesh, *, stages: ProcessGroup, replicas: ProcessGroup, parts: ProcessGroup | None
) -> None:
    """Refuse ranks that are to be stages, replicas or the parts of split layers at once. Local.

    Raises:
        MeshError: If any two of the groups have more than this rank in common.
    """
    uses = [("the stages of a pipeline", stages), ("replicas", replicas)]
    if parts is not None:
        uses.append(("the parts of split layers", parts))
    for (what, group), (another, other) in combinations(uses, 2):
        if len(set(group.ranks) & set(other.ranks)) > 1:
            raise MeshError(
                f"along {group.name!r} lie {what}, and along {other.name!r} {another}, which need "
                f"ranks of their own: give each another dim of the mesh ({mesh.dims_text})"
            )


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
        scope, Call(what, scope.name), [mates.ranks[0], data.ranks[0], mates.rank or 0]
    )
    answers = dict(zip(scope.ranks, everyone, strict=True))
    # Replicas have one corner: of their first place, the first replica.
    corner = {rank: answers[first][1] for rank, (first, _, _) in answers.items()}
    found: dict[tuple[int, ...], list[Line]] = {}
    for holders in dict.fromkeys(sets):
        lines: dict[int, list[int]] = {}
        for rank, (_, _, place) in answers.items():
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
    ranks = mesh.ids.reshape(mesh.shape)
    lines = np.moveaxis(ranks, axis, -1).reshape(-1, mesh.dim_size(dim))
    return [tuple(line) for line in lines.tolist()]


def describe(parameter: Parameter, name: str) -> str:
    """Return the text by which two ranks compare a parameter: name, shape, dtype."""
    return f"{name} {parameter.shape} {parameter.dtype}"


def agree_texts(texts: list[str], group: ProcessGroup, rule: str, cure: str = "") -> None:
    """Return if all ranks of `group` describe their parameters alike. Collective.

    Args:
        texts: What this rank says of each, in its order, such as :func:`describe` gives.
        group: The replicas.
        rule: What else must agree.
        cure: What to do where they do not.

    Raises:
        MismatchError: On every rank, naming the first parameter that differs.

    Cost:
        One all-reduce of 40 bytes.
    """
    differs = difference(texts, group, Call("parameters", group.name, rule=rule))
    if differs is not None:
        place, rows = differs
        advice = f"\n{cure}" if cure else ""
        raise on_all_ranks(
            MismatchError(
                f"the ranks of group {group.name!r} must have the same parameters, but "
                f"parameter {place} is\n{rows}{advice}"
            )
        )


def agree_values(
    named: Sequence[tuple[str, Parameter | Array]], group: ProcessGroup, *, cure: str = ""
) -> None:
    """Return if all ranks of `group` hold the same values, bit for bit; see :func:`agree_texts`.

    Cost:
        One all-reduce of 40 bytes, and reading all parameters once.
    """
    texts = [f"{name} with values {digest(one)}" for name, one in named]
    agree_texts(texts, group, "same values", cure)


def agree_together(scope: ProcessGroup, questions: Sequence[Callable[[], None]]) -> None:
    """Ask several collective questions, and return if no rank of `scope` got a no. Collective.

    Each question goes among ranks of its own, which alone hear the answer. If it raised there at
    once, the other ranks would go on, and wait for them.

    Args:
        scope: The ranks of all groups together.
        questions: Raise a MismatchError on all ranks that they are asked of.

    Raises:
        MismatchError: On every rank, with what the ranks have heard.

    Cost:
        Beside the questions, an all-reduce of 40 bytes.
    """
    problem: MismatchError | None = None
    for question in questions:
        try:
            question()
        except MismatchError as error:
            problem = problem or error
    agree(scope, "comparison of replicas", problem=problem)


def agree_touched(untouched: Sequence[str], group: ProcessGroup) -> None:
    """Return if the same parameters got a gradient on all ranks of `group`. Collective.

    Args:
        untouched: The names of those that got none on this rank.
        group: The replicas.

    Raises:
        MismatchError: On every rank, naming parameters and ranks.
    """
    everyone: list[list[str]] = agree(group, "parameters without a gradient", list(untouched))
    everywhere = set(everyone[0]).intersection(*everyone)
    uneven = {name for names in everyone for name in names} - everywhere
    if not uneven:
        return
    rows = "\n".join(
        f"  {name}: not on ranks {[r for r, names in enumerate(everyone) if name in names]}"
        for name in sorted(uneven)
    )
    raise on_all_ranks(
        MismatchError(
            f"these parameters got a gradient on some ranks of group {group.name!r} only:\n{rows}"
        )
    )


def difference(
    texts: Sequence[str], group: ProcessGroup, what: Call | str
) -> tuple[int, str] | None:
    """Return the first of these texts that is not alike on all ranks of `group`. Collective.

    Args:
        texts: This rank's.
        group: The ranks.
        what: What they compare.

    Returns:
        On every rank the text's number and a row for each rank; None if all are alike.

    Cost:
        One all-reduce of 40 bytes; where texts differ, an all-gather of them.
    """
    if group.size == 1:
        return None
    everyone = agree(group, what, list(texts))
    for place, row in enumerate(zip_longest(*everyone, fillvalue="none")):
        if len(set(row)) > 1:
            ranks = zip(group.ranks, row, strict=True)
            return place, "\n".join(f"  rank {rank}: {text}" for rank, text in ranks)
    return None


def digest(x: Parameter | Array) -> str:
    """Return a text by which two ranks compare the values of a parameter or an array."""
    values = to_numpy(x.value() if isinstance(x, Parameter) else x)
    return digest_text(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)
