"""Gradients of which several ranks of a tensor-parallel group have parts, and who sums them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from mpimesh.arrays import Array, namespace
from mpimesh.layout.boxes import volume
from mpimesh.nn import Parameter
from mpimesh.parallel.groups import groups_of_lines, lines_of_holders
from mpimesh.runtime import DeviceMesh, ProcessGroup

__all__ = ["shared_groups", "shared_parameters", "sum_shared_gradients"]


def sum_shared_gradients(parameters: Iterable[Parameter], group: ProcessGroup) -> None:
    """Sum the gradients of which several ranks of a group have parts: norms', biases', and such.

    Collective over `group`. Training by :class:`~mpimesh.DataParallel` or
    :class:`~mpimesh.PipelineParallel` does this once a step; a loop of one's own calls it
    after backward, once, on all parameters of the model.

    Args:
        parameters: Those of the model, in the same order on every rank.
        group: The ranks over which its layers are split.

    Cost:
        One all-reduce for each dtype, if anything is shared.
    """
    pieces: dict[Any, list[tuple[Array, int]]] = {}
    sizes: dict[Any, int] = {}
    for one in shared_parameters(parameters):
        if not one.requires_grad:
            continue
        if one.grad is None:
            one.grad = namespace(one.value()).zeros_like(one.data)
        # What other ranks hold has its place, too, and gets zeros from here.
        for box in one.blocks:
            start = sizes.get(one.dtype, 0)
            sizes[one.dtype] = start + volume(box)
            if box == one.box:
                pieces.setdefault(one.dtype, []).append((one.grad, start))
    for dtype, size in sizes.items():
        mine = pieces[dtype]
        flat = namespace(mine[0][0]).zeros(size, dtype)
        for grad, start in mine:
            flat[start : start + grad.size] = grad.reshape(-1)
        summed = group.all_reduce(flat, out=flat, label="shared gradients").resolve()
        for grad, start in mine:
            grad[...] = summed[start : start + grad.size].reshape(grad.shape)


def shared_parameters(parameters: Iterable[Parameter]) -> list[Parameter]:
    """Return those of which several ranks have the same part, whichever ranks. Local."""
    return [one for one in parameters if one.is_shared]


def shared_groups(
    mesh: DeviceMesh,
    scope: ProcessGroup,
    data: ProcessGroup,
    group: ProcessGroup,
    sets: Sequence[tuple[int, ...]],
) -> dict[tuple[int, ...], ProcessGroup]:
    """Return this rank's groups of ranks that have the same part, with their replicas.

    Collective over the mesh.

    Args:
        mesh: The mesh, which gets a group for each set and stage.
        scope: The ranks that step together.
        data: The replicas of this rank's stages.
        group: The ranks over which the layers are split.
        sets: The places in `group` of the ranks that have something in common, alike on all ranks.

    Cost:
        An all-gather of some 20 bytes for each rank, and for each set and stage a split of the
        mesh's communicator, unless there is a group of these ranks.
    """
    lines = lines_of_holders(scope, group, data, sets, what="shared parameters")
    return groups_of_lines(mesh, lines, kind="shared by")
