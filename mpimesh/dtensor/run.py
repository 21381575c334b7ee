"""Carry an operation out that is said by letters: bring the operands there, work on the blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from mpimesh.arrays import DType, HostArray
from mpimesh.dtensor.alike import raise_together
from mpimesh.dtensor.redistribute import moves_between_ranks
from mpimesh.dtensor.tensor import DTensor, common_mesh
from mpimesh.errors import DTypeError, ShapeError, on_all_ranks
from mpimesh.layout import Box, Layout, Operand, Partial, Placement, Replicate
from mpimesh.layout.op_rules import Linearity, Pattern, reduction_pattern, rule_for
from mpimesh.mesh import Mesh
from mpimesh.runtime import CollectiveTensor, DeviceMesh

__all__ = [
    "Work",
    "checked_out",
    "kept_summands",
    "resolved",
    "run",
    "shape_of",
    "store",
]


@dataclass(frozen=True, slots=True)
class Work:
    """The operands and result of one rank's work.

    Attributes:
        blocks: Its block of each operand.
        boxes: Where they lie.
        shape: The shape of its block of the result.
        out: Memory for its block of the result, if that was asked for.
    """

    blocks: tuple[Any, ...]
    boxes: tuple[Box, ...]
    shape: tuple[int, ...]
    out: tuple[HostArray, ...] = ()


def run(
    function: Callable[[Work], Any],
    operands: Sequence[Any],
    pattern: Pattern,
    shape: Sequence[int],
    dtypes: Sequence[Any],
    *,
    outs: Sequence[DTensor | None] = (),
    into: bool = False,
) -> tuple[DTensor, ...]:
    """Do an operation on split arrays. Collective, if anything has to be moved.

    Args:
        function: Gets what this rank has, and gives its block of the result, or a tuple of them.
        operands: Split arrays, at least one; what is none is the same on all ranks.
        pattern: The operation.
        shape: The global shape of all results.
        dtypes: Their dtypes.
        outs: Where results are to go. Their memory is used if the result lies as they do; else
            :func:`store` has to bring it there.
        into: Whether the function writes its results into ``Work.out``.
    """
    everything = [*operands, *outs]
    mesh = common_mesh(everything)
    split = next(one for one in everything if isinstance(one, DTensor))
    place = split.layout.mesh
    whole = Placement([Replicate()] * place.ndim)
    known = tuple(
        Operand(one.shape, one.placement, one.itemsize)
        if isinstance(one, DTensor)
        else Operand(shape_of(one), whole)
        for one in operands
    )
    shape = tuple(shape)
    kinds = [np.dtype(dtype) for dtype in dtypes]
    goal = next((one.placement for one in outs if one is not None), None)
    way = _way(place, known, pattern, shape, max(kind.itemsize for kind in kinds), goal)
    layout = way.output
    if not place.contains_rank(mesh.rank):
        return tuple(DTensor(mesh, layout, shape, kind, None) for kind in kinds)
    blocks = _brought(operands, way.inputs, mesh.rank)
    boxes = tuple(to.box(one.shape, mesh.rank) for one, to in zip(known, way.inputs, strict=True))
    local = layout.local_shape(shape, mesh.rank)
    out: tuple[HostArray, ...] = ()
    if into:
        out = tuple(
            mesh.shared_empty(local, kind)
            if one is None or one.layout != layout or one.dtype != kind
            else one.local
            for kind, one in zip(kinds, outs or [None] * len(kinds), strict=True)
        )
    made = _carefully(function, Work(blocks, boxes, local, out), mesh)
    results = out or (made if isinstance(made, tuple) else (made,))
    return tuple(
        DTensor(mesh, layout, shape, kind, np.asarray(block, kind))
        for kind, block in zip(kinds, results, strict=True)
    )


def _carefully(function: Callable[[Work], Any], here: Work, mesh: DeviceMesh) -> Any:
    """Do the work on the blocks; if NumPy is to raise for what is in them, all ranks do.

    Collective, if so.
    """
    needed = "raise" in np.geterr().values()
    with raise_together(mesh, "np.errstate", needed=needed, caught=(FloatingPointError,)):
        return function(here)


@dataclass(frozen=True, slots=True)
class _Way:
    """A rule as layouts."""

    inputs: tuple[Layout, ...]
    output: Layout


@lru_cache(maxsize=4096)
def _way(
    place: Mesh,
    known: tuple[Operand, ...],
    pattern: Pattern,
    shape: tuple[int, ...],
    itemsize: int,
    goal: Placement | None,
) -> _Way:
    rule = rule_for(place, known, pattern, shape, itemsize, goal)
    return _Way(tuple(Layout(place, to) for to in rule.inputs), Layout(place, rule.output))


def _brought(operands: Sequence[Any], goals: Sequence[Layout], rank: int) -> tuple[Any, ...]:
    """Return this rank's blocks of all operands, in the layouts that are wanted. Collective.

    What needs no other rank is cut out of what is here, without a copy.
    """
    started = [
        _cut_or_start(one, goal) if isinstance(one, DTensor) else _whole_value(one, goal, rank)
        for one, goal in zip(operands, goals, strict=True)
    ]
    return tuple(
        found.resolve().local if isinstance(found, CollectiveTensor) else found for found in started
    )


def _cut_or_start(x: DTensor, goal: Layout) -> Any:
    """Return a part of this rank's block, or the started move that brings it."""
    if x.layout == goal:
        return x.local
    if (
        goal.partial_op
        or x.layout.partial_op
        or moves_between_ranks(x.mesh, x.layout, goal, x.shape, x.itemsize)
    ):
        return x.start_redistribute(goal.placement)
    return _cut(x.local, goal.box(x.shape, x.mesh.rank), x.layout.box(x.shape, x.mesh.rank))


def _cut(block: Any, box: Box, inside: Box) -> Any:
    """Return the part `box` of a block that lies at `inside`, and has it."""
    part = block[
        tuple(
            slice(max(start - first, 0), max(stop - first, 0))
            for (start, stop), (first, _) in zip(box, inside, strict=True)
        )
    ]
    shape = tuple(stop - start for start, stop in box)
    # Without elements a box may lie outside, and be longer than the block along other axes.
    return part if part.shape == shape else np.empty(shape, block.dtype)


def _whole_value(value: Any, layout: Layout, rank: int) -> Any:
    """Return the block of a value that all ranks have, such as a number or an ordinary array."""
    if layout.partial_op in ("sum", "prod"):
        coords = layout.mesh.coords_of(rank)
        first = not any(
            coord
            for coord, spec in zip(coords, layout.placement, strict=True)
            if isinstance(spec, Partial)
        )
        if not first:
            neutral = int(layout.partial_op == "prod")
            value = (
                np.full_like(value, neutral)
                if isinstance(value, np.ndarray | np.generic)
                else type(value)(neutral)
            )
    shape = shape_of(value)
    if not shape:
        return value
    return _cut(np.asarray(value), layout.box(shape, rank), tuple((0, n) for n in shape))


def resolved(x: DTensor) -> DTensor:
    """Return `x` without summands, brought where that moves least. Collective if it has any."""
    if not x.layout.partial_op:
        return x
    pattern = reduction_pattern(x.shape, (), "")
    rule = rule_for(
        x.layout.mesh, (Operand(x.shape, x.placement, x.itemsize),), pattern, x.shape, x.itemsize
    )
    return x.redistribute(rule.output)


def store(result: DTensor, out: Any, casting: Any = "same_kind") -> DTensor:
    """Write a result into `out`, in the layout and the memory that it has. Collective.

    Raises:
        ShapeError: If it has another shape.
        DTypeError: If it may not be cast so.
    """
    if isinstance(out, tuple):
        (out,) = out
    target = checked_out(out, result.shape)
    if not np.can_cast(result.dtype, target.dtype, casting):
        raise on_all_ranks(
            DTypeError(
                f"a result of {result.dtype} cannot be written into {target!r} "
                f"by casting={casting!r}"
            )
        )
    common_mesh([result, target])
    moved = result.redistribute(target.placement)
    if target.is_member and moved.local is not target.local:
        np.copyto(target.local, moved.local, casting=casting)
    return target


def checked_out(out: Any, shape: tuple[int, ...]) -> DTensor:
    """Return `out`, if a result of `shape` can be written into it.

    Raises:
        DTypeError: If it is no split array.
        ShapeError: If it has another shape.
    """
    if not isinstance(out, DTensor):
        raise on_all_ranks(
            DTypeError(
                f"the result of an operation on split arrays is one, too, and cannot be written "
                f"into a {type(out).__name__}; give a DTensor as out="
            )
        )
    if out.shape != shape:
        raise on_all_ranks(
            ShapeError(f"out= has shape {out.shape}, but the result has shape {shape}")
        )
    return out


def kept_summands(x: Any, kind: DType, linear: tuple[Linearity, ...]) -> tuple[Linearity, ...]:
    """Return `linear` if summands of `x` may be worked on in `kind`, else nothing.

    Integers may have wrapped around, which shows only when they are summed; so they are summed in
    the dtype that they have.
    """
    if not isinstance(x, DTensor) or not x.layout.partial_op or x.dtype == kind:
        return linear
    if x.layout.partial_op in ("min", "max"):
        return linear if np.can_cast(x.dtype, kind) else ()
    return linear if x.dtype.kind in "fc" and np.can_cast(x.dtype, kind) else ()


def shape_of(x: Any) -> tuple[int, ...]:
    """Return the shape of an operand; a number has none."""
    shape: tuple[int, ...] = getattr(x, "shape", ())
    return shape
