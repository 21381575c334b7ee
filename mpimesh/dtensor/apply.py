"""Do an operation block by block, with every operand brought where its rule wants it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpimesh.arrays import DType, HostArray
from mpimesh.dtensor.tensor import DTensor
from mpimesh.errors import LayoutError, NoRuleError
from mpimesh.layout import Layout, Operand, OpRule, PlacementLike
from mpimesh.runtime import DeviceMesh

__all__ = ["apply_rule", "are_whole", "common_mesh", "gathered", "operand_of", "placed"]


_IN_PLACE = (np.place,)


def common_mesh(operands: Sequence[Any]) -> DeviceMesh:
    """Return the mesh that all split arrays among `operands` are on.

    Raises:
        LayoutError: If they are on different ones.
    """
    tensors = [one for one in operands if isinstance(one, DTensor)]
    mesh = tensors[0].mesh
    for other in tensors[1:]:
        if other.mesh is not mesh:
            raise LayoutError(
                f"operands must be on one mesh, but {tensors[0]!r} and {other!r} are on two; bring "
                "one over with x.redistribute(placements, mesh=...)"
            )
    return mesh


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


def gathered(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call `function` with whole arrays in place of split ones. Collective.

    Arrays in the result are replicated over the mesh.

    Raises:
        NoRuleError: If `function` writes into its argument.
    """
    if function in _IN_PLACE:
        raise NoRuleError(
            f"numpy.{function.__name__} writes into its argument, and what is gathered is a copy; "
            "write by a key instead, as in x[index] = value"
        )
    found: list[DTensor] = []
    whole_args, whole_kwargs = _replaced(args, found), _replaced(kwargs, found)
    mesh = common_mesh(found)
    if not found[0].is_member:
        raise LayoutError(f"rank {mesh.rank} is not in the mesh, and gathers nothing")
    return _split(function(*whole_args, **whole_kwargs), mesh)


def are_whole(tree: Any) -> bool:
    """Tell whether every rank has all of each split array in `tree`: then nothing need move."""
    if isinstance(tree, DTensor):
        return tree.layout.is_replicated
    if isinstance(tree, dict):
        return all(are_whole(one) for one in tree.values())
    return not isinstance(tree, list | tuple) or all(are_whole(one) for one in tree)


def _replaced(tree: Any, found: list[DTensor]) -> Any:
    if isinstance(tree, DTensor):
        found.append(tree)
        return tree.full()
    if isinstance(tree, list | tuple):
        return type(tree)(_replaced(one, found) for one in tree)
    if isinstance(tree, dict):
        return {key: _replaced(one, found) for key, one in tree.items()}
    return tree


def _split(tree: Any, mesh: DeviceMesh) -> Any:
    if isinstance(tree, np.ndarray):
        return DTensor(mesh, Layout.replicated(mesh), tree.shape, tree.dtype, tree)
    if isinstance(tree, list | tuple):
        row = [_split(one, mesh) for one in tree]
        return type(tree)(*row) if hasattr(tree, "_fields") else type(tree)(row)
    return tree
