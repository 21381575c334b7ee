"""Do an operation block by block, with every operand brought where its rule wants it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpimesh.arrays import DType, HostArray
from mpimesh.dtensor.tensor import DTensor, common_mesh
from mpimesh.layout import Layout, Operand, OpRule, PlacementLike

__all__ = ["apply_rule", "operand_of", "placed"]


def operand_of(x: DTensor) -> Operand:
    """Return what a rule has to know of an array."""
    return Operand(x.shape, x.placement, x.itemsize)


def placed(operands: Sequence[DTensor], placements: Sequence[PlacementLike]) -> list[DTensor]:
    """Bring all operands to their placements, at once. Collective."""
    goals = [Layout(x.mesh, to) for x, to in zip(operands, placements, strict=True)]
    started = [
        x if x.layout == goal else x.start_redistribute(goal.placement)
        for x, goal in zip(operands, goals, strict=True)
    ]
    return [one if isinstance(one, DTensor) else one.resolve() for one in started]


def apply_rule(
    function: Callable[..., HostArray],
    operands: Sequence[DTensor],
    rule: OpRule,
    shape: Sequence[int],
    dtype: Any,
) -> DTensor:
    """Call `function` on the blocks of all operands. Collective, if any has to be moved.

    Args:
        function: Takes the operands' blocks and gives the result's.
        operands: The arrays, on one mesh.
        rule: Where they have to be, and where that puts the result.
        shape: The result's global shape.
        dtype: The result's dtype.
    """
    mesh = common_mesh(operands)
    arrays = placed(operands, rule.inputs)
    block = None
    if arrays[0].is_member:
        block = np.asarray(function(*(x.local for x in arrays)))
    kind: DType = np.dtype(dtype) if block is None else block.dtype
    return DTensor(mesh, Layout(mesh, rule.output), shape, kind, block)
