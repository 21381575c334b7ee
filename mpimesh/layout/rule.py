"""Layouts of the operands of an operation on split arrays, and the way that costs least."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from mpimesh.errors import LayoutError
from mpimesh.layout.layout import Layout
from mpimesh.layout.placement import Placement
from mpimesh.layout.plan import plan_redistribution
from mpimesh.mesh import Mesh

__all__ = ["OpRule", "Operand", "cheapest"]


@dataclass(frozen=True, slots=True)
class Operand:
    """An array that an operation is to work on, without its values.

    Attributes:
        shape: Its global shape.
        placement: How it lies on the mesh that all operands share.
        itemsize: Bytes of an element.
    """

    shape: tuple[int, ...]
    placement: Placement
    itemsize: int = 8

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)


@dataclass(frozen=True, slots=True)
class OpRule:
    """One way to do an operation block by block.

    With the operands placed as `inputs`, every rank calls the function on its own blocks, and what
    comes out are the blocks of a result that is placed as `output`.

    Attributes:
        inputs: One placement for each operand.
        output: The placement of the result.
    """

    inputs: tuple[Placement, ...]
    output: Placement


def cheapest(mesh: Mesh, operands: Sequence[Operand], rules: Iterable[OpRule]) -> OpRule:
    """Return the rule for which the fewest bytes move to bring the operands where it wants them.

    The first one of equals, so all ranks choose alike.

    Raises:
        LayoutError: If there are no rules.
    """
    best, least = None, -1
    for rule in rules:
        moved = sum(
            _moved(mesh, operand, placement)
            for operand, placement in zip(operands, rule.inputs, strict=True)
        )
        if best is None or moved < least:
            best, least = rule, moved
        if moved == 0:
            break
    if best is None:
        raise LayoutError(f"no way is known to do this with operands {list(operands)}")
    return best


@lru_cache(maxsize=4096)
def _moved(mesh: Mesh, operand: Operand, placement: Placement) -> int:
    if placement == operand.placement:
        return 0
    before, after = Layout(mesh, operand.placement), Layout(mesh, placement)
    return plan_redistribution(before, after, operand.shape, operand.itemsize).total_bytes
