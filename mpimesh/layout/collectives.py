"""Redistributions that a collective of one group does: what it is called there, and its time.

A small all-gather or reduce-scatter of MPI takes about ``log2(n)`` messages one after the other,
where each rank from each takes ``n - 1``. An all-to-all has as many messages as there are pairs, in
both MPIs, but starts them from C: with 64 KiB and less for each pair it took 0.2 to 0.75 of the
time of ordered pairs under Open MPI and as long under MPICH; with 1 MiB 0.85 to 1.2 of it under
both, on 4 and 8 ranks of 2 cores. Against that stands packing: ranks of a node read boxes where
they lie, and only what goes by an all-to-all is packed on both sides.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log2, prod
from typing import TYPE_CHECKING

import numpy as np

from mpimesh.layout.layout import Layout
from mpimesh.layout.spec import Partial, Replicate, Shard

if TYPE_CHECKING:
    from mpimesh.layout.tiling import Integers, Tiling

__all__ = ["Collective", "collective_of"]


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective over the ranks along some dims of a mesh, at each place of the others.

    Attributes:
        kind: ``"all_reduce"``, ``"all_gather"``, ``"reduce_scatter"`` or ``"all_to_all"``.
        dims: The names of the dims along which there are several ranks.
        size: How many ranks take part in one of them.
        axis: The array axis that is gathered or scattered; 0 for none.
        op: The reduction; empty for none.
        joined_axis: The axis that an all-to-all makes whole, while it cuts `axis`.
    """

    kind: str
    dims: tuple[str, ...]
    size: int
    axis: int = 0
    op: str = ""
    joined_axis: int = 0

    @property
    def steps(self) -> float:
        """Number of messages that a rank waits for one after the other, if they are short.

        Those of an all-to-all count half, as they were measured.
        """
        if self.kind == "all_to_all":
            return (self.size - 1) / 2
        return ceil(log2(self.size)) * (2 if self.kind == "all_reduce" else 1)

    @property
    def packs(self) -> bool:
        """Whether all that moves is packed and unpacked."""
        return self.kind == "all_to_all"

    def __str__(self) -> str:
        """Say it as a person does: ``by all_gather over dp``."""
        return f"by {self.kind} over {', '.join(self.dims)}"


def collective_of(source: Layout, target: Layout, shape: tuple[int, ...]) -> Collective | None:
    """Return the collective that is all there is to do between layouts of one mesh, if there is.

    Every rank has the same blocks before and after, whichever way is taken.
    """
    mesh = source.mesh
    changed = [
        dim
        for dim, pair in enumerate(zip(source.placement, target.placement, strict=True))
        if pair[0] != pair[1]
    ]
    long = [dim for dim in changed if mesh.dims[dim].size > 1]
    names = tuple(mesh.dims[dim].name for dim in long)
    size = prod(mesh.dims[dim].size for dim in long)
    pairs = [(source.placement[dim], target.placement[dim]) for dim in changed]
    if not long:
        return None
    if all(isinstance(old, Partial) and isinstance(new, Replicate) for old, new in pairs):
        everyone = [dim for dim in range(mesh.ndim) if mesh.dims[dim].size > 1]
        whole = len(long) == 1 or long == everyone
        return Collective("all_reduce", names, size, op=source.partial_op) if whole else None
    if len(changed) != 1:
        return None
    (old, new), dim = pairs[0], changed[0]
    if isinstance(old, Shard) and isinstance(new, Replicate):
        cut, uncut = source.tiling(shape), target.tiling(shape)
        if _only_cut(cut, uncut, old.axis, dim):
            return Collective("all_gather", names, size, old.axis)
    if isinstance(old, Partial) and isinstance(new, Shard):
        cut, uncut = target.tiling(shape), source.tiling(shape)
        if _only_cut(cut, uncut, new.axis, dim):
            return Collective("reduce_scatter", names, size, new.axis, old.op)
    if isinstance(old, Shard) and isinstance(new, Shard) and old.axis != new.axis:
        whole_there = list(source.placement)
        whole_there[dim] = Replicate()
        uncut = Layout(mesh, whole_there).tiling(shape)
        before, after = source.tiling(shape), target.tiling(shape)
        if _only_cut(before, uncut, old.axis, dim) and _only_cut(after, uncut, new.axis, dim):
            return Collective("all_to_all", names, size, new.axis, joined_axis=old.axis)
    return None


def _only_cut(cut: Tiling, uncut: Tiling, axis: int, dim: int) -> bool:
    """Tell whether the blocks along `dim` lie one after the other in the block that is not cut."""
    size = cut.mesh.dims[dim].size
    bounds: Integers = cut.bounds[axis][::size]
    return cut.axis_dims[axis][-1] == dim and np.array_equal(bounds, uncut.bounds[axis])
