"""`Halo`: the elements around a rank's block, read where their owners have them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpimesh.arguments import as_shape, shown
from mpimesh.arrays import DType, HostArray
from mpimesh.arrays.dtypes import as_dtype
from mpimesh.dtensor.defaults import as_live
from mpimesh.dtensor.reading import Reading
from mpimesh.dtensor.tensor import DTensor
from mpimesh.errors import DTypeError, LayoutError, RankError
from mpimesh.layout import HaloPlan, Layout, PlacementLike, plan_halo
from mpimesh.layout.boxes import slices, view
from mpimesh.runtime import CollectiveTensor, DeviceMesh
from mpimesh.runtime.persistent import PersistentExchange

__all__ = ["Halo", "HaloField"]


class Halo:
    """A halo of one width around the blocks of arrays of one shape and layout, prepared once.

    A :class:`HaloField` is a padded array of which the inside is this rank's block, so nothing is
    copied but the halo itself, and ranks of a node read it from each other's blocks in place::

        halo = mm.Halo(x, width=1, boundary="periodic")
        now, then = halo.field(x), halo.field()
        for _ in range(steps):
            coming = halo.start(now)              # edges travel
            update(now, then, halo.inner)         # what needs no neighbour
            coming.resolve()
            for box in halo.rim:
                update(now, then, box)
            now, then = then, now
        x = now.tensor

    Args:
        x: An array; its mesh, layout, shape and dtype count, not its values.
        width: Elements on each side, or (before, after), for all axes, also those that nobody
            splits; or a mapping by axis, in which the others have none. It may be wider than the
            array, as long as a rank reads no more than a million boxes: then each period of an
            axis is one for each block, and each mirrored or repeated element.
        boundary: What lies beyond the ends of the array: ``"periodic"``, ``"edge"``,
            ``"reflect"``, ``"symmetric"``, as :func:`numpy.pad` has them (periodic is its wrap);
            a number; or ``"none"``: then these elements are left alone, first 0. A pair is for
            the lower and the upper end; a mapping is by axis, and its other axes are periodic.
            Beyond the ends of several axes a fixed value counts, that of the last of them.

    Raises:
        LayoutError: If `x` is no :class:`DTensor`, or holds summands, or the values break a rule.
        DTypeError: If a fixed value is none of the dtype.

    Attributes:
        mesh: The live mesh.
        dtype: The dtype of the elements.
        plan: What moves, as a value.
    """

    __slots__ = ("_fills", "_reading", "_rule", "dtype", "mesh", "plan")

    def __init__(self, x: DTensor, width: Any = 1, boundary: Any = "periodic") -> None:
        if not isinstance(x, DTensor):
            raise LayoutError(
                f"a halo is around the blocks of a DTensor, got {type(x).__name__}; make one with "
                "mm.distribute(...), or use mm.Halo.of_shape(shape, mesh, placements)"
            )
        self._prepare(x.mesh, plan_halo(x.layout, x.shape, width, boundary), x.dtype)

    @classmethod
    def of_shape(
        cls,
        shape: Sequence[int],
        mesh: DeviceMesh,
        placements: PlacementLike,
        width: Any = 1,
        boundary: Any = "periodic",
        *,
        dtype: Any = float,
    ) -> Halo:
        """Prepare one for arrays that there are none of yet. Local. Errors as of the class."""
        halo = cls.__new__(cls)
        plan = plan_halo(Layout(as_live(mesh), placements), as_shape(shape), width, boundary)
        halo._prepare(mesh, plan, as_dtype(dtype))
        return halo

    def _prepare(self, mesh: DeviceMesh, plan: HaloPlan, dtype: DType) -> None:
        self.mesh = mesh
        self.plan = plan
        self.dtype = dtype
        self._rule = (
            f"shape {plan.shape}, {dtype}, {plan.layout}, width {plan.width}, ends {plan.ends}"
        )
        self._reading = Reading.prepare(mesh.rank, plan.reads, plan.padded_box)
        self._fills: list[tuple[tuple[slice, ...], HostArray]] = []
        for value in {end for pair in plan.ends for end in pair if not isinstance(end, str)}:
            _fixed(value, dtype)  # refuses what does not fit on every rank, wherever the ends are
        if self._is_member:
            for box, value in plan.fills(mesh.rank):
                self._fills.append((slices(box), _fixed(value, dtype)))

    # -- fields ------------------------------------------------------------------------

    def field(self, x: DTensor | None = None) -> HaloField:
        """Return a padded array in shared memory. Local.

        Args:
            x: What its block is to hold; zeros if None.

        Raises:
            LayoutError: If `x` has another shape, dtype, mesh or layout than this halo is for.
        """
        return HaloField(self, x)

    def start(self, field: HaloField) -> CollectiveTensor:
        """Start to read the halo of a field. Collective over the mesh.

        Until ``resolve()``, which returns the padded array, the block may be read and not written.
        Afterwards no other rank reads it any more.

        Raises:
            LayoutError: If the field is of another halo.
        """
        if type(field) is not HaloField or field.halo is not self:
            raise LayoutError(
                f"a halo exchanges its own fields, made by halo.field(); got {shown(field)}"
            )
        planned, padded = field._planned, field._padded
        if padded is not None and self._fills:
            for index, value in self._fills:
                padded[index] = value
        if planned is not None and planned.is_ready:
            return planned.start()
        lock = None if padded is None else field.local
        if planned is None:
            mesh, rule = self.mesh, self._rule
            planned = self._reading.planned("halo", mesh, rule, padded, padded, lock)
            handle = planned.start()
            field._planned = planned
            return handle
        # Once more before the last one is over, which the plan does not allow.
        return self._reading.start(
            "halo", self.mesh, self._rule, padded, padded, lambda: padded, lock
        )

    def exchange(self, x: HaloField | DTensor) -> Any:
        """Read the halo, and wait for it. Collective over the mesh.

        Args:
            x: A field of this halo; or an array, whose block is then copied into a new field.

        Returns:
            The padded array; None on a rank that is not in the mesh.
        """
        field = self.field(x) if isinstance(x, DTensor) else x
        return self.start(field).resolve()

    # -- where in a padded array: local --------------------------------------------------

    @property
    def interior(self) -> tuple[slice, ...]:
        """The index of this rank's block in its padded array."""
        return slices(self.plan.interior(self.mesh.rank))

    @property
    def inner(self) -> tuple[slice, ...]:
        """The index of what can be worked out without the halo."""
        return slices(self.plan.inner(self.mesh.rank))

    @property
    def rim(self) -> list[tuple[slice, ...]]:
        """The indices of the rest of the block."""
        return [slices(box) for box in self.plan.rim(self.mesh.rank)]

    @property
    def received_bytes(self) -> int:
        """Bytes that this rank gets from others in an exchange."""
        if not self._is_member:
            return 0
        return self.plan.received_bytes(self.mesh.rank, self.dtype.itemsize)

    @property
    def _is_member(self) -> bool:
        return self.plan.layout.mesh.contains_rank(self.mesh.rank)

    def __repr__(self) -> str:
        """Show what it is for. Local."""
        plan = self.plan
        return f"Halo(shape={plan.shape}, {plan.layout}, width={plan.width}, ends={plan.ends})"


def _fixed(value: complex, dtype: DType) -> HostArray:
    """Return a fixed value as an element.

    Raises:
        DTypeError: If there is no such element.
    """
    found = np.asarray(value)
    plain = found if dtype.kind == "c" else found.real
    with np.errstate(invalid="ignore"):
        element: HostArray = plain.astype(dtype)
    if (dtype.kind in "biu" and element != plain) or (dtype.kind != "c" and found.imag):
        raise DTypeError(f"the ends of an array of {dtype} cannot be fixed at {value!r}")
    return element


class HaloField:
    """A rank's block with its halo around it, made by :meth:`Halo.field`.

    Attributes:
        halo: The halo.
        tensor: The whole array, whose block on this rank is the inside of `padded`: what is
            written into one is in the other.
    """

    __slots__ = ("_padded", "_planned", "halo", "tensor")

    def __init__(self, halo: Halo, x: DTensor | None = None) -> None:
        if not isinstance(halo, Halo):
            raise LayoutError(f"halo must be a Halo, got {shown(halo)}")
        plan, mesh = halo.plan, halo.mesh
        self.halo = halo
        self._padded: HostArray | None = None
        self._planned: PersistentExchange | None = None
        block = None
        if halo._is_member:
            self._padded = mesh.shared_empty(plan.padded_shape(mesh.rank), halo.dtype)
            self._padded.reshape(-1).view(np.uint8)[...] = 0
            block = view(self._padded, plan.interior(mesh.rank))
        self.tensor = DTensor(mesh, plan.layout, plan.shape, halo.dtype, block)
        if x is not None:
            self._fill(x)

    @property
    def padded(self) -> HostArray:
        """The block with its halo.

        Raises:
            RankError: If this rank is not in the mesh.
        """
        if self._padded is None:
            raise RankError(
                f"rank {self.halo.mesh.rank} holds no block: it is not in mesh "
                f"{self.halo.mesh.dims_text}"
            )
        return self._padded

    @property
    def local(self) -> HostArray:
        """The block alone, in the same memory. Errors as of `padded`."""
        return self.tensor.local

    def _fill(self, x: DTensor) -> None:
        mine = self.tensor
        if not isinstance(x, DTensor):
            raise LayoutError(f"a halo field is filled from a DTensor, got {shown(x)}")
        if x.mesh is not mine.mesh or (x.layout, x.shape, x.dtype) != (
            mine.layout,
            mine.shape,
            mine.dtype,
        ):
            raise LayoutError(f"{x!r} is not of the kind that {self.halo!r} was prepared for")
        if mine.is_member:
            self.local[...] = x.local

    def __repr__(self) -> str:
        """Show what it is of. Local."""
        return f"<HaloField of {self.tensor!r}, width {self.halo.plan.width}>"
