"""Methods of NumPy's arrays, each by its function, and conversions of one element to a number."""

from __future__ import annotations

import operator
from math import prod
from operator import index as to_index
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar, cast

import numpy as np

from mpimesh.arrays import DType, DTypeLike
from mpimesh.core.dispatch import SplitArray
from mpimesh.dtensor.consistency import numbered, raise_together, with_float_errors
from mpimesh.dtensor.dispatch import sure_rule_of
from mpimesh.errors import (
    DTypeError,
    IndexOutOfRangeError,
    RankError,
    ShapeError,
    UnknownNameError,
    tell_elsewhere,
)
from mpimesh.layout import Partial, Replicate
from mpimesh.runtime.operands import normal_axis

__all__ = ["Methods", "reduced", "require_member"]

T = TypeVar("T")


class Methods(SplitArray):
    """NumPy's methods of split arrays: ``x.sum(axis=0)`` is ``np.sum(x, axis=0)``.

    Collective where the functions are.
    """

    __slots__ = ()

    _namespace: ClassVar[ModuleType]
    """That of the array API standard, as `array_api.py` says."""

    if TYPE_CHECKING:

        @property
        def dtype(self) -> np.dtype[Any]:
            """The dtype of the elements."""

        @property
        def shape(self) -> tuple[int, ...]:
            """The global shape."""

    # -- comparisons ---------------------------------------------------------------------

    def _compare(self, function: np.ufunc, other: Any) -> Any:
        """Tell where elements are equal, or not; nowhere are they, if their dtypes cannot be.

        Where there is no loop for two dtypes, such as of records, as NumPy's operators do. No
        element is None.
        """
        if other is None:
            return np.full_like(self, function is np.not_equal, dtype=bool)
        try:
            return function(self, other)
        except TypeError:
            sign = operator.eq if function is np.equal else operator.ne
            return sure_rule_of(sign)(self, other)

    __hash__ = None  # type: ignore[assignment]

    # -- reductions --------------------------------------------------------------------

    def sum(self, axis: Any = None, **options: Any) -> Self:
        """See :func:`numpy.sum`."""
        return self._call(np.sum, self, axis=axis, **options)

    def prod(self, axis: Any = None, **options: Any) -> Self:
        """See :func:`numpy.prod`."""
        return self._call(np.prod, self, axis=axis, **options)

    def mean(self, axis: Any = None, **options: Any) -> Self:
        """See :func:`numpy.mean`."""
        return self._call(np.mean, self, axis=axis, **options)

    def std(self, axis: Any = None, **options: Any) -> Self:
        """See :func:`numpy.std`."""
        return self._call(np.std, self, axis=axis, **options)

    def var(self, axis: Any = None, **options: Any) -> Self:
        """See :func:`numpy.var`."""
        return self._call(np.var, self, axis=axis, **options)

    def min(self, axis: Any = None, **options: Any) -> Self:
        """See :func:`numpy.min`."""
        return self._call(np.min, self, axis=axis, **options)

    def max(self, axis: Any = None, **options: Any) -> Self:
        """See :func:`numpy.max`."""
        return self._call(np.max, self, axis=axis, **options)

    def argmin(self, axis: Any = None, **options: Any) -> Self:
        """See :func:`numpy.argmin`."""
        return self._call(np.argmin, self, axis=axis, **options)

    def argmax(self, axis: Any = None, **options: Any) -> Self:
        """See :func:`numpy.argmax`."""
        return self._call(np.argmax, self, axis=axis, **options)

    def any(self, axis: Any = None, **options: Any) -> Self:
        """See :func:`numpy.any`."""
        return self._call(np.any, self, axis=axis, **options)

    def all(self, axis: Any = None, **options: Any) -> Self:
        """See :func:`numpy.all`."""
        return self._call(np.all, self, axis=axis, **options)

    def trace(self, *args: Any, **options: Any) -> Self:
        """See :func:`numpy.trace`."""
        return self._call(np.trace, self, *args, **options)

    def dot(self, other: Any) -> Self:
        """See :func:`numpy.dot`."""
        return self._call(np.dot, self, other)

    # -- along an axis -----------------------------------------------------------------

    def cumsum(self, axis: Any = None, dtype: Any = None) -> Self:
        """See :func:`numpy.cumsum`."""
        return self._call(np.cumsum, self, axis=axis, dtype=dtype)

    def cumprod(self, axis: Any = None, dtype: Any = None) -> Self:
        """See :func:`numpy.cumprod`."""
        return self._call(np.cumprod, self, axis=axis, dtype=dtype)

    def argsort(self, axis: Any = -1, **options: Any) -> Self:
        """See :func:`numpy.argsort`."""
        return self._call(np.argsort, self, axis=axis, **options)

    def sort(self, axis: Any = -1, **options: Any) -> None:
        """Sort in place, as :meth:`numpy.ndarray.sort`."""
        me: Any = self
        which = normal_axis(axis, me.ndim)  # refuses None, as NumPy's method
        self._fill_with(self._call(np.sort, self, axis=which, **options))

    def take(self, indices: Any, axis: Any = None, **options: Any) -> Self:
        """See :func:`numpy.take`."""
        return self._call(np.take, self, indices, axis=axis, **options)

    def repeat(self, repeats: Any, axis: Any = None) -> Self:
        """See :func:`numpy.repeat`."""
        return self._call(np.repeat, self, repeats, axis=axis)

    def compress(self, condition: Any, axis: Any = None) -> Self:
        """See :func:`numpy.compress`."""
        return self._call(np.compress, condition, self, axis=axis)

    def diagonal(self, offset: int = 0, axis1: int = 0, axis2: int = 1) -> Self:
        """See :func:`numpy.diagonal`."""
        return self._call(np.diagonal, self, offset, axis1, axis2)

    def nonzero(self) -> tuple[Self, ...]:
        """See :func:`numpy.nonzero`."""
        me: Any = self
        found: Any = np.nonzero(me)
        return tuple(found)

    # -- shapes ------------------------------------------------------------------------

    def reshape(self, *shape: Any, order: str = "C", copy: bool | None = None) -> Self:
        """See :func:`numpy.reshape`; the lengths may be several arguments."""
        new = shape[0] if len(shape) == 1 else shape
        if order == "C" and copy is None:
            return self._call(np.reshape, self, new)
        return self._call(np.reshape, self, new, order=order, copy=copy)

    def ravel(self, order: str = "C") -> Self:
        """See :func:`numpy.ravel`."""
        return self._call(np.ravel, self, order)

    def flatten(self, order: str = "C") -> Self:
        """Return all elements along one axis, as :meth:`ravel`, which here gives a copy, too."""
        return self.ravel(order)

    def transpose(self, *axes: Any) -> Self:
        """See :func:`numpy.transpose`; the axes may be several arguments."""
        if not axes or axes == (None,):
            return self._call(np.transpose, self)
        return self._call(np.transpose, self, axes[0] if len(axes) == 1 else axes)

    def swapaxes(self, axis1: Any, axis2: Any) -> Self:
        """See :func:`numpy.swapaxes`."""
        return self._call(np.swapaxes, self, axis1, axis2)

    def squeeze(self, axis: Any = None) -> Self:
        """See :func:`numpy.squeeze`."""
        return self._call(np.squeeze, self, axis)

    @property
    def T(self) -> Self:
        """The array with its axes reversed. Local."""
        return self._call(np.transpose, self)

    @property
    def mT(self) -> Self:
        """The array with its last two axes swapped. Local."""
        return self._call(np.matrix_transpose, self)

    # -- the Python array API standard ------------------------------------------------------

    def __array_namespace__(self, *, api_version: str | None = None) -> Any:
        """Return the namespace of the Python array API standard for split arrays.

        Raises:
            UnknownNameError: If it is asked for in a version that it does not follow.
        """
        if api_version not in (None, "2021.12", "2022.12", "2023.12"):
            raise UnknownNameError(
                f"the array namespace follows the standard up to 2023.12, got {api_version!r}"
            )
        return self._namespace

    @property
    def device(self) -> Any:
        """The mesh, which is what the standard's devices are here."""
        me: Any = self
        return me.mesh

    def to_device(self, device: Any, /, *, stream: Any = None) -> Self:
        """Return the array on another mesh; see :meth:`redistribute`.

        In the same placements if the meshes have the same dims, else replicated. Collective.
        """
        if stream is not None:
            raise DTypeError(f"arrays on meshes have no streams, got {stream!r}")
        me: Any = self
        if device is me.mesh:
            return self
        if getattr(device, "dims_text", None) == me.mesh.dims_text:
            return self._call(me.redistribute, mesh=device)
        specs = [Replicate()] * int(getattr(device, "ndim", 0))
        return self._call(me.redistribute, specs, mesh=device)

    # -- one element: collective ---------------------------------------------------------

    def item(self, *index: Any) -> Any:
        """Return an element as a number of Python, as :meth:`numpy.ndarray.item`. Collective.

        Every rank of the mesh calls it and gets the same. So do ``float(x)``, ``int(x)``,
        ``complex(x)`` and ``bool(x)``, and with it ``if x.sum() > 0:``.

        Args:
            index: The element's index: a number for each axis, or one, counted along the row of
                all elements; none for the element of an array that has only one.

        Raises:
            ShapeError: On every rank, if there are more elements, or none, and no index; or if it
                has another number of parts than the array has axes.
            IndexOutOfRangeError: On every rank, if there is no such element.
        """
        me: Any = self
        if not index:
            return _item_of(me, "be a number")
        return _item_of(me[_place_of(index, me.shape)], "be a number")

    def __bool__(self) -> bool:
        return bool(_item_of(self, "be true or false"))

    def __float__(self) -> float:
        return float(_item_of(self, "be a number"))

    def __int__(self) -> int:
        return int(_item_of(self, "be a number"))

    def __complex__(self) -> complex:
        if self.dtype.kind in "SU":  # unlike float() and int(), as NumPy has it
            raise DTypeError(f"an array of {self.dtype} is no complex number; cast it first")
        return complex(_item_of(self, "be a number"))

    def __index__(self) -> int:
        """Return the element of an integer array without axes. Collective."""
        me: Any = self
        if me.shape or me.dtype.kind not in "iu":
            raise TypeError(f"only an integer array without axes can be an index, not {self!r}")
        return int(_item_of(self, "be an index"))

    def __format__(self, spec: str) -> str:
        """Format an array of one element as its number, where `spec` asks for it: collective."""
        return format(_item_of(self, f"be formatted by {spec!r}"), spec) if spec else str(self)

    # -- element by element ------------------------------------------------------------

    def round(self, decimals: int = 0) -> Self:
        """See :func:`numpy.round`."""
        return self._call(np.round, self, decimals)

    def clip(self, min: Any = None, max: Any = None, **options: Any) -> Self:  # noqa: A002
        """See :func:`numpy.clip`."""
        return self._call(np.clip, self, min, max, **options)

    def conj(self) -> Self:
        """See :meth:`numpy.ndarray.conj`: the array itself, if it is real."""
        return self if self.dtype.kind in "biuf" else self._call(np.conjugate, self)

    conjugate = conj

    @property
    def real(self) -> Self:
        """The real parts: a view. Local."""
        return _part(self, np.real)

    @property
    def imag(self) -> Self:
        """The imaginary parts: a view. Local."""
        return _part(self, np.imag)

    def astype(self, dtype: DTypeLike, *, casting: Any = "unsafe", copy: bool = True) -> Self:
        """Return the array with elements of another dtype.

        Local, but for an array that waits for sums, which are worked out first, and for what may be
        refused on one rank and so on all: texts, and numbers where NumPy's errstate is to raise.

        Raises:
            DTypeError: If `casting` does not allow it.
            ValueError: On every rank, if a text cannot be read.
        """
        kind = cast_dtype(self.dtype, dtype)
        if not np.can_cast(self.dtype, kind, casting):
            raise DTypeError(f"{self.dtype} cannot be cast to {kind} with casting={casting!r}")
        me: Any = self
        if kind == self.dtype:
            return self._call(me.copy) if copy else self
        ready = reduced(me)
        block = None
        if ready.is_member:

            def cast() -> Any:
                # A text, or raw bytes, may be no number.
                with raise_together(ready.mesh, "astype", needed=self.dtype.kind in "SUV"):
                    return ready.local.astype(kind)

            block = with_float_errors(ready.mesh, "astype", cast)
        made = self._call(type(me), ready.mesh, ready.layout, ready.shape, kind, block)
        return numbered(made, getattr(self, "_origin", None))

    def fill(self, value: Any) -> None:
        """Write one value everywhere, in place. Local."""
        self[...] = value  # type: ignore[index]

    def tolist(self) -> Any:
        """Return the whole array as lists of Python's numbers. Collective, as :meth:`full`.

        None on ranks that are not in the mesh.
        """
        me: Any = self
        return me.full().tolist() if me.is_member else None

    def _fill_with(self, values: Self) -> None:
        """Take over the values of an array of the same shape, in place. Collective."""
        self[...] = values  # type: ignore[index]


def reduced(x: T) -> T:
    """Return `x` with all sums worked out that it waits for. Collective, if there are any."""
    me: Any = x
    if me.layout.partial_op:
        whole = [Replicate() if isinstance(spec, Partial) else spec for spec in me.placement]
        me = me.redistribute(whole)
    found: T = me
    return found


def cast_dtype(source: DType, dtype: DTypeLike) -> DType:
    """Return the dtype that elements of `source` have once they are cast to `dtype`.

    Raises:
        DTypeError: If it depends on the elements: dates and spans without a unit, of text.
    """
    kind = np.dtype(dtype)
    if (
        kind.kind in "mM"
        and source.kind in "SU"
        and np.datetime_data(cast(Any, kind))[0] == "generic"
    ):
        raise DTypeError.everywhere(
            f"the unit of {kind} would be that of each text; give it, as in {kind.str[1:]}[s]"
        )
    # What has no length or unit gets that of the source.
    return np.empty(0, source).astype(kind).dtype if kind.kind in "SUVmM" else kind


def _part(x: T, function: Any) -> T:
    """Return a real part: of sums that are waited for, too, which stay so.

    It is a view. Of complex products that are waited for it cannot be one, and cannot be written.
    """
    me: Any = x
    op = me.layout.partial_op
    if op not in ("", "sum", "mean") and (me.dtype.kind == "c" or function is not np.real):
        me = reduced(me)
    block = function(me.local) if me.is_member else None
    if block is not None and me is not x:
        block.flags.writeable = False
    kind = function(np.empty(0, me.dtype)).dtype if block is None else block.dtype
    part: T = type(me)(me.mesh, me.layout, me.shape, kind, block)
    return numbered(part, getattr(x, "_origin", None))


def _place_of(index: tuple[Any, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the index of one element in all axes, as :meth:`numpy.ndarray.item` reads it.

    Raises:
        ShapeError: If there are other than one number, and not one for each axis.
        IndexOutOfRangeError: If the array has no such element.
    """
    if len(index) == 1 and isinstance(index[0], tuple):
        (index,) = index
    places = tuple(map(to_index, index))
    if len(places) == 1 and len(shape) != 1:
        size = prod(shape)
        if not -size <= places[0] < size:
            raise IndexOutOfRangeError.everywhere(
                f"index {places[0]} is out of bounds for {size} elements"
            )
        return tuple(map(int, np.unravel_index(places[0] % size, shape)))
    if len(places) != len(shape):
        raise ShapeError.everywhere(
            f"{len(places)} numbers are no index into an array of shape {shape}"
        )
    return places


def require_member(x: Any) -> None:
    """Refuse what depends on values of `x` on a rank that has none.

    Raises:
        RankError: If this rank is not in the mesh.
    """
    if not x.is_member:
        raise RankError(
            f"rank {x.mesh.rank} is not in the mesh of {x!r} and has no value of it: leave the "
            "call to the ranks of the mesh"
        )


_WHOLE = "x.full() is the whole array on all ranks, x.local this rank's block"
tell_elsewhere(
    Methods,
    {
        "numpy": _WHOLE,
        "compute": f"nothing is lazy: {_WHOLE}",
        "persist": "nothing is lazy: x is computed",
        "chunks": "each rank has one block: x.layout says which, x.local is this rank's",
        "rechunk": "use redistribute()",
        "map_blocks": "use mm.local_map(f, placements)(x)",
        "map_overlap": "use mm.Halo(x, width)",
    },
)


def _item_of(x: Any, what: str) -> Any:
    """Return the element of an array that has one. Collective, unless all ranks have it.

    Args:
        x: The array.
        what: What it is to become, for messages.

    Raises:
        ShapeError: On every rank, if it has another number of elements.
        RankError: If this rank is not in the mesh.
    """
    if x.size != 1:
        raise ShapeError.everywhere(
            f"{x!r} has {x.size} elements, and only an array of one can {what}; reduce it "
            "first, with x.any(), x.all() or x.sum(), or take x.full() for the whole array"
        )
    require_member(x)
    whole = x.local if x.layout.is_replicated else x.full()
    return whole.item()
