"""`Halo` and `shift`: elements around a rank's block, read where their owners have them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from operator import index
from typing import Any, SupportsIndex

import numpy as np

from mpimesh.arguments import as_flag, as_shape, shown
from mpimesh.arrays import DType, DTypeLike, HostArray
from mpimesh.arrays.dtypes import as_dtype
from mpimesh.comm import Request, Steps
from mpimesh.comm.regions import copy_own
from mpimesh.core.call import PlanRecord
from mpimesh.core.node import Boxes
from mpimesh.dtensor.consistency import compare_call, number_text, numbered
from mpimesh.dtensor.defaults import as_live
from mpimesh.dtensor.dtensor import DTensor
from mpimesh.dtensor.redistribute import window_exchange
from mpimesh.errors import DTypeError, LayoutError, RankError, ShapeError
from mpimesh.layout import Box, HaloPlan, Layout, PlacementLike, Regions, plan_halo
from mpimesh.layout.boxes import slices, view, volume
from mpimesh.layout.reads import Reads, shift_reads
from mpimesh.runtime import CollectiveTensor, DeviceMesh, ProcessGroup
from mpimesh.runtime.operands import normal_axis
from mpimesh.runtime.persistent import PersistentCollective, plan_exchange
from mpimesh.runtime.traffic import sparse

__all__ = ["Halo", "HaloField", "Reading", "shift"]


@dataclass(frozen=True, slots=True, eq=False)
class Reading:
    """The elements that one rank takes and gives, prepared once and moved any number of times.

    Attributes:
        regions: What this rank takes and gives.
        moves: Whether any rank gets anything from another.
        sent: How many elements others get from this rank.
        received: The place of a rank, and how many elements come from there, for each that any do.
    """

    regions: Regions
    moves: bool
    sent: int
    received: tuple[tuple[int, int], ...]

    @classmethod
    def prepare(cls, rank: int, reads: Reads, block_of: Callable[[int], Box]) -> Reading:
        """Prepare what a rank has to do.

        Args:
            rank: The rank; nothing if it is not in the mesh.
            reads: Who reads what.
            block_of: Gives the box of the whole array that the array has in which a rank holds its
                block.
        """
        mesh = reads.tiling.mesh
        if not mesh.contains_rank(rank):
            return cls(Regions(), False, 0, ())
        regions = reads.regions(rank, block_of)
        received: dict[int, int] = {}
        for take in regions.takes:
            place = take.parts[0].rank
            if place != mesh.offset_of(rank):
                received[place] = received.get(place, 0) + volume(take.box)
        sent = sum(volume(give.box) for give in regions.gives)
        return cls(regions, reads.moves, sent, tuple(received.items()))

    def planned(
        self, mesh: DeviceMesh, rule: str, padded: HostArray | None, lock: HostArray | None
    ) -> PersistentCollective:
        """Plan to read the halo of one padded array, to be started many times. Local.

        Args:
            mesh: The live mesh.
            rule: What must agree over ranks.
            padded: The array; None on a rank that is not in the mesh, which takes no part.
            lock: The caller's block, which must not change meanwhile.
        """
        group, options = self._options(mesh, rule, padded)

        def prepare() -> Callable[[], Request | Steps]:
            if not self.moves or group.size == 1:
                return partial(self._alone, padded, padded)
            return group.communicator.prepare("exchange_regions", (padded, padded, self.regions))

        return plan_exchange(
            group._core, "halo", prepare, value=padded, lock=lock, out=padded, **options
        )

    def once(
        self,
        mesh: DeviceMesh,
        name: str,
        rule: str,
        source: HostArray | None,
        target: HostArray | None,
    ) -> None:
        """Read from one array into another, once. Collective, and waits; arguments as above."""
        group, options = self._options(mesh, rule, source)
        begin: Callable[[], Request | Steps] = partial(self._alone, source, target)
        if self.moves and group.size > 1:
            arguments = (source, target, self.regions)
            begin = group.communicator.prepare("exchange_regions", arguments)
        group._core.compose(name, begin, **options).resolve()

    def _options(
        self, mesh: DeviceMesh, rule: str, source: HostArray | None
    ) -> tuple[ProcessGroup, dict[str, Any]]:
        """Return who takes part, and what is compared and counted."""
        group = mesh._core.everyone.alone() if source is None else mesh.group()
        size = 0 if source is None else source.itemsize
        received = [(place, count * size, 1) for place, count in self.received]
        receives = (sparse, tuple(chain.from_iterable(received))) if received else None
        return group, {"rule": rule, "nbytes": self.sent * size, "receives": receives}

    def _alone(self, source: HostArray | None, target: HostArray | None) -> Steps:
        if source is not None and target is not None:
            copy_own(self.regions, source, target)
        yield from ()


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
        width: Elements on each side, or (before, after), for all axes, also those that no dim
            splits; or a mapping by axis, in which the others have none. It may be wider than the
            array, as long as a rank reads no more than a million boxes: then each period of an
            axis is one for each block, and each mirrored or repeated element.
        boundary: What stands beyond the ends of the array: ``"periodic"``, ``"edge"``,
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
        dtype: DTypeLike = float,
    ) -> Halo:
        """Prepare one for arrays of a shape and `placements`, before there are any. Local.

        Errors as of the class.
        """
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
        if planned is None or not planned.is_ready:  # a plan has one start under way
            lock = None if padded is None else field.local
            planned = self._reading.planned(self.mesh, field._rule, padded, lock)
            field._planned = planned
        return planned.start()

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

    __slots__ = ("_padded", "_planned", "_rule", "halo", "tensor")

    def __init__(self, halo: Halo, x: DTensor | None = None) -> None:
        if not isinstance(halo, Halo):
            raise LayoutError(f"halo must be a Halo, got {shown(halo)}")
        plan, mesh = halo.plan, halo.mesh
        self.halo = halo
        self._padded: HostArray | None = None
        self._planned: PersistentCollective | None = None
        block = None
        if halo._is_member:
            self._padded = mesh.shared_empty(plan.padded_shape(mesh.rank), halo.dtype)
            self._padded.reshape(-1).view(np.uint8)[...] = 0
            block = view(self._padded, plan.interior(mesh.rank))
        self.tensor = DTensor(mesh, plan.layout, plan.shape, halo.dtype, block)
        if x is not None:
            self._fill(x)
        self._rule = halo._rule + number_text(x)

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
        numbered(mine, getattr(x, "_origin", None))

    def __repr__(self) -> str:
        """Show what it is of. Local."""
        return f"<HaloField of {self.tensor!r}, width {self.halo.plan.width}>"


def shift(
    x: DTensor,
    steps: SupportsIndex | Sequence[SupportsIndex],
    axis: SupportsIndex | Sequence[SupportsIndex],
    *,
    wrap: bool = True,
    fill: Any = 0,
) -> DTensor:
    """Return the array whose element i along an axis is element ``i - steps`` of `x`.

    Collective over the mesh, and waits. With `wrap` it is :func:`numpy.roll`.

    Args:
        x: The array.
        steps: How far; negative for towards the beginning. One for each axis if there are several.
        axis: Along which axis; or several.
        wrap: Whether what leaves an end comes back at the other.
        fill: What else comes in there.

    Returns:
        An array in the layout of `x`.

    Raises:
        ShapeError: If `x` has no such axis, or there is not one step for each.
        LayoutError: If `x` holds summands and does not wrap.

    Cost:
        A rank gets `steps` elements along the axis, as wide as its block, and nothing
        along axes that are not split.

    Example:
        >>> with mm.DeviceMesh("dp=-1") as mesh:
        ...     x = mm.distribute(np.arange(6), mesh, "dp=S0")
        ...     print(mm.shift(x, 1, 0).full(), mm.shift(x, -2, 0, wrap=False, fill=9).full())
        [5 0 1 2 3 4] [2 3 4 5 9 9]
    """
    if not isinstance(x, DTensor):
        raise LayoutError(f"shift moves the elements of a DTensor, got {shown(x)} as x")
    wrap = as_flag(wrap, "wrap", LayoutError)
    moved = _steps_of(steps, axis, x.ndim)
    filling = None if wrap else _element(fill, x.dtype)
    if x.layout.partial_op and not wrap:
        raise LayoutError(
            f"{x!r} holds summands, and what comes in at an end would count once for each: shift "
            f"x.redistribute(...) without Partial"
        )
    mesh = x.mesh
    number = compare_call(mesh, "shift", (x, moved, wrap, filling))
    block: HostArray | None = None
    source: HostArray | None = None
    if x.is_member:
        source = np.ascontiguousarray(x.local).reshape(x.local.shape)
        block = mesh.shared_empty(source.shape, x.dtype)
        if filling is not None:
            _fill_ends(block, filling, x, moved)
    key = x._spec, "shift", moved, wrap
    known: _Shift | None = mesh._core.moves.get(key)
    if known is None:
        known = mesh._core.moves[key] = _Shift(x, moved, wrap=wrap)
    made = DTensor._of_block(mesh, x.layout, x.shape, x.dtype, block)
    known.do(mesh, source, block)
    return numbered(made, number)


class _Shift:
    """One rank's part in shifts of arrays of one spec by the same steps."""

    __slots__ = ("_exchange", "_reading", "_rule")

    def __init__(self, x: DTensor, steps: tuple[int, ...], *, wrap: bool) -> None:
        mesh, layout, shape = x.mesh, x.layout, x.shape
        self._rule = f"shape {shape}, {x.dtype}, {layout}, steps {steps}, wrap {wrap}"
        reads = shift_reads(layout, shape, steps, wrap)
        self._reading = reading = Reading.prepare(
            mesh.rank, reads, lambda other: layout.box(shape, other)
        )
        self._exchange: tuple[PlanRecord, Boxes] | None = None
        if not reading.moves or not x.is_member:
            return
        core, kind = mesh.group()._core, (x.local.shape, x.dtype)
        received = [(place, count * x.itemsize, 1) for place, count in reading.received]
        counts = reading.sent * x.itemsize, tuple(chain.from_iterable(received))
        self._exchange = window_exchange(
            core, "shift", self._rule, reading.regions, kind, kind, *counts
        )

    def do(self, mesh: DeviceMesh, source: HostArray | None, block: HostArray | None) -> None:
        """Shift a block into another one. Collective, and waits."""
        if self._exchange is not None:
            started = mesh.group()._core.exchange(*self._exchange, source, block, block)
            if started is not None:
                started.resolve()
                return
        self._reading.once(mesh, "shift", self._rule, source, block)


def _steps_of(steps: Any, axis: Any, ndim: int) -> tuple[int, ...]:
    """Return the steps for each axis of an array."""
    axes: list[Any] = list(axis) if isinstance(axis, Sequence) else [axis]
    counts = list(steps) if isinstance(steps, Sequence) else [steps] * len(axes)
    if len(counts) != len(axes):
        raise ShapeError(f"there must be one step for each axis, got {steps!r} and {axis!r}")
    found = [0] * ndim
    for count, one in zip(counts, axes, strict=True):
        which = normal_axis(one, ndim)
        try:
            found[which] += index(count)
        except TypeError:
            raise ShapeError(f"steps must be whole numbers, got {count!r}") from None
    return tuple(found)


def _fill_ends(block: HostArray, fill: HostArray, x: DTensor, steps: tuple[int, ...]) -> None:
    """Write `fill` where no element of the array comes to."""
    box = x.layout.box(x.shape, x.mesh.rank)
    for axis, ((start, stop), length, step) in enumerate(zip(box, x.shape, steps, strict=True)):
        size = stop - start
        low = min(max(step - start, 0), size)
        high = min(max(length + step - start, 0), size)
        before = (slice(None),) * axis
        block[(*before, slice(0, low))] = fill
        block[(*before, slice(high, size))] = fill


def _element(fill: Any, dtype: DType) -> HostArray:
    """Return what comes in at an end as an element, or a row of them.

    Raises:
        DTypeError: If it is none.
    """
    try:
        element: HostArray = np.asarray(fill).astype(dtype)
    except (TypeError, ValueError) as error:
        raise DTypeError(
            f"fill must be an element of dtype {dtype}, got {shown(fill)}: {error}"
        ) from None
    return element
