"""Functions of whole lines or matrices, of which the other axes make a stack that stays split."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpimesh.dtensor.alike import raise_together
from mpimesh.dtensor.methods import settled
from mpimesh.dtensor.run import Work, run, shape_of
from mpimesh.dtensor.tensor import DTensor, are_whole, common_mesh
from mpimesh.layout.axis_rules import lines_placement
from mpimesh.layout.op_rules import KEEP, Pattern, broadcast_axes, broadcast_shape

__all__ = ["are_in_reach", "on_stacks"]


def on_stacks(
    function: Callable[..., Any],
    operands: Sequence[Any],
    cores: Sequence[str],
    *,
    free: str = "",
    out: str = "",
    name: str = "",
) -> list[DTensor]:
    """Do a function of the last axes, which are brought whole; the axes before them broadcast.

    Nothing moves where the last axes are whole. Else the cheapest layout is taken in which
    they are: a stack is split by another of its axes.

    Args:
        function: Takes blocks and gives an array or a tuple of arrays, with the axes of the stack
            first. What it gives of a stack of no members says what the results are.
        operands: Split arrays, and what all ranks have alike.
        cores: For each operand the letters of its last axes.
        free: Letters that may be split: the function does the same for each index of them.
        out: The letters of the last axes of the result, if some of `free` are among them.
        name: What is called, if `function` may refuse values with a `ValueError`. Then all ranks
            of the mesh do.

    Returns:
        The results; all are split as the stack is.
    """
    operands = [settled(one) if isinstance(one, DTensor) else one for one in operands]
    shapes = [shape_of(one) for one in operands]
    edges = [len(shape) - len(core) for shape, core in zip(shapes, cores, strict=True)]
    stacks = [shape[:edge] for shape, edge in zip(shapes, edges, strict=True)]
    stack = broadcast_shape(stacks)
    # A stack without members shows what NumPy makes of these, or what it refuses, on all ranks.
    probes = [
        np.empty((0, *shape[edge:]), one.dtype)
        for one, shape, edge in zip(operands, shapes, edges, strict=True)
    ]
    known = _row(function(*probes))
    letters = {letter: len(stack) + n for n, letter in enumerate(dict.fromkeys("".join(cores)))}
    inputs = tuple(
        (*broadcast_axes(one, stack), *(letters[letter] for letter in core))
        for one, core in zip(stacks, cores, strict=True)
    )
    last = [letters[letter] if letter in free else KEEP for letter in out]
    last = last or [KEEP] * (known[0].ndim - 1)
    pattern = Pattern(inputs, (*range(len(stack)), *last))
    mesh, made = common_mesh(operands), []
    may_differ = bool(name) and not are_whole(tuple(operands))

    def work(here: Work) -> Any:
        with raise_together(mesh, name, needed=may_differ):
            made.extend(_row(function(*here.blocks)))
        return made[0]

    shape = (*stack, *known[0].shape[1:])
    (first,) = run(work, operands, pattern, shape, [known[0].dtype])
    rest = made[1:] or [None] * (len(known) - 1)
    return [first] + [
        DTensor(mesh, first.layout, (*stack, *one.shape[1:]), one.dtype, block)
        for one, block in zip(known[1:], rest, strict=True)
    ]


def are_in_reach(x: Any, count: int) -> bool:
    """Tell whether each rank can have its own of the whole last axes, be they split now or not."""
    if not isinstance(x, DTensor):
        return True
    last = range(x.ndim - count, x.ndim)
    return lines_placement(x.layout.mesh, x.placement, x.shape, *last) is not None


def _row(found: Any) -> list[Any]:
    return [np.asarray(one) for one in (found if isinstance(found, tuple) else (found,))]
