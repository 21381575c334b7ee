"""A trainable array and its gradient, which may live in memory of others."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar, cast
from weakref import ref

import numpy as np

from mpimesh.arguments import as_flag, as_int, as_items, check_kind, shape_of, shown
from mpimesh.arrays import DTypeLike
from mpimesh.arrays.dtypes import is_half
from mpimesh.arrays.namespace import Array, DType, namespace, to_numpy
from mpimesh.errors import (
    DTypeError,
    ModuleError,
    ModuleStateError,
    MpimeshError,
    RankError,
    ShapeError,
)
from mpimesh.layout import Box, BoxLayout, Layout
from mpimesh.layout.boxes import extent, whole
from mpimesh.nn.initializers import Initializer, first_values

__all__ = [
    "ELSEWHERE",
    "FLOAT_NAMES",
    "ZERO",
    "Buffer",
    "Parameter",
    "as_parameters",
    "check_buffers",
    "check_shape",
    "check_state",
    "check_values",
    "float_dtype",
    "is_float_dtype",
    "refuse_names",
]

ZERO, ELSEWHERE = 1, 2
"""Bits of the mark of attached memory: it counts as zeros that are not written yet; the gradient
is another array now, or None."""


_FLOAT_DTYPES = (np.dtype(np.float16), np.dtype(np.float32), np.dtype(np.float64))
_BFLOAT16 = "bfloat16"

FLOAT_NAMES = ", ".join([*map(str, _FLOAT_DTYPES), _BFLOAT16])
"""Names of the dtypes in which a model can be materialised; the last one is of ml_dtypes."""


class Parameter:
    """A named array that an optimizer changes, without memory until `materialize`.

    Attributes:
        name: Its name inside its layer, such as ``"weight"``.
        shape: The shape of what this rank holds, known before there is memory.
        global_shape: The shape of the whole parameter, which is `shape` where it is not split.
        layout: Its split over the ranks that its layer is split over; None if each of them has
            all of it, and makes all of its gradient. Ranks that a layout gives the same block
            have equal values, and each makes a part of the block's gradient: the true one is the
            sum over them, which training makes once a step, see
            :func:`mpimesh.parallel.sum_shared_gradients`.
        rank: This rank among those of the layout.
        box: (start, stop) along each axis of what this rank holds of the whole parameter.
        data: The values, C-contiguous, or None before `materialize`.
        grad_dtype: The gradient's; that of the values if None. A wider one loses less in sums.
        requires_grad: False freezes it: layers compute no gradient, and optimizers leave it alone.
        trainer: The optimizer that was made of it last; None if there is none.
        on_ready: Called with it after each `accumulate`, once per use of its layer and microbatch.

    Raises:
        ModuleError: If `name` is no text, `shape` no shape, or `initializer` cannot draw.
    """

    __slots__ = (
        "__weakref__",
        "_attached",
        "_away",
        "_away_dtype",
        "_grad",
        "_marks",
        "_place",
        "box",
        "data",
        "global_shape",
        "grad_dtype",
        "initializer",
        "layout",
        "name",
        "on_ready",
        "rank",
        "requires_grad",
        "shape",
        "trainer",
    )

    takes_wider_grad: ClassVar[bool] = True
    """Whether the gradient may be of a wider dtype than the values."""

    def __init__(
        self,
        name: str,
        shape: tuple[int, ...],
        initializer: Initializer,
        *,
        requires_grad: bool = True,
    ) -> None:
        self.name = check_kind(name, str, "name", ModuleError, wanted="a text")
        extents = as_items(shape, f"shape of parameter {name!r}", ModuleError, wanted="a tuple")
        what = f"each extent of the shape of parameter {name!r}"
        self.shape = tuple(as_int(length, what, ModuleError, least=0) for length in extents)
        self.global_shape = self.shape
        self.layout: Layout | BoxLayout | None = None
        self.rank = 0
        self.box: Box = whole(self.shape)
        if not callable(getattr(initializer, "draw", None)) or isinstance(initializer, type):
            raise ModuleError(
                f"parameter {name!r}: initializer must be an object such as nn.Constant(0.0), got "
                f"{shown(initializer)}"
            )
        self.initializer = initializer
        self.requires_grad = as_flag(requires_grad, "requires_grad", ModuleError)
        self.data: Array = None
        self.trainer: ref[Any] | None = None
        self._away = ""
        self._away_dtype: DType | None = None
        self._attached = False
        self._marks = bytearray(1)
        self._place = 0
        self.grad = None
        self.grad_dtype: DType | None = None
        self.on_ready: Callable[[Parameter], None] | None = None

    @property
    def grad(self) -> Array:
        """The gradient, of the same shape; None when nothing was added and no memory is attached.

        Attached memory is not set to 0 before something is added to it, but when it is read.
        """
        self.write_zeros()
        return self._grad

    @grad.setter
    def grad(self, array: Array) -> None:
        self._marks[self._place] = ELSEWHERE if self._attached else 0
        self._grad = array

    @property
    def _is_zero(self) -> bool:
        """True if the gradient's memory counts as zeros that are not written yet."""
        return bool(self._marks[self._place] & ZERO)

    @_is_zero.setter
    def _is_zero(self, wanted: bool) -> None:
        self._marks[self._place] = self._marks[self._place] & ELSEWHERE | wanted

    @property
    def blocks(self) -> Mapping[Box, tuple[int, ...]]:
        """The blocks of the layout, with the ranks that hold each; none without a layout."""
        return {} if self.layout is None else self.layout.holders(self.global_shape)

    @property
    def holders(self) -> tuple[int, ...]:
        """The ranks of the layout that hold the same block, with this one; none if it is empty."""
        return self.blocks.get(self.box, ())

    @property
    def is_shared(self) -> bool:
        """True if some block of the layout lies on several ranks."""
        return any(len(ranks) > 1 for ranks in self.blocks.values())

    def set_layout(self, layout: Layout | BoxLayout, rank: int) -> None:
        """Hold the block of `rank` from now on, of a parameter that has no memory yet.

        A parameter that several layers share may get the same layout from each.

        Raises:
            ModuleStateError: If it has memory.
            ModuleError: If it has another layout, or this is none.
            LayoutError: If the layout does not fit its shape.
            RankError: If the layout has no such rank.
        """
        check_kind(layout, (Layout, BoxLayout), "layout", ModuleError, wanted="a Layout")
        rank = as_int(rank, "rank", RankError, least=0)
        if self.data is not None:
            raise ModuleStateError(
                f"a layer is split before it has memory, but {self!r} has: split the model first, "
                "then materialise it, or load a state into it"
            )
        if self.layout is not None and (self.layout, self.rank) != (layout, rank):
            raise ModuleError(
                f"parameter {self.name!r} of shape {self.global_shape} lies as {self.layout} "
                f"already, and cannot lie as {layout}, too"
            )
        self.box = layout.box(self.global_shape, rank)
        self.shape = extent(self.box)
        self.layout, self.rank = layout, rank

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def dtype(self) -> DType | None:
        """The dtype of the values; None before `materialize`."""
        return self._away_dtype if self.data is None else np.dtype(self.data.dtype)

    @property
    def is_attached(self) -> bool:
        """Whether the gradient is in memory that `attach_grad` attached."""
        return self._attached

    def materialize(
        self, *, seed: int, dtype: DTypeLike = np.float32, xp: ModuleType = np, index: int = 0
    ) -> None:
        """Allocate the values and give them their first ones; drops any gradient memory.

        This rank's block gets the values that it has in the whole parameter, of which no more is
        drawn or stored than must be; see `first_values`.

        Args:
            seed: The seed of the whole model.
            dtype: float16, float32, float64 or, with NumPy, bfloat16.
            xp: `numpy` or `cupy`, whose memory to use.
            index: Global index of the layer, counted over all pipeline stages.

        Raises:
            DTypeError: If `dtype` is another one, or CuPy's memory is to hold bfloat16.
            ModuleError: If `seed` or `index` is negative.
            ModuleStateError: If it has values that another object owns.
        """
        self._check_here()
        dtype = float_dtype(dtype, xp=xp)
        values = first_values(
            self.initializer,
            self.global_shape,
            dtype,
            seed=seed,
            index=index,
            name=self.name,
            box=self.box,
        )
        if not hasattr(xp, "asarray"):
            raise ModuleError(f"xp must be numpy or cupy, got {shown(xp)}")
        self.data = values if xp is np else xp.asarray(values)
        self.detach_grad()

    def value(self) -> Array:
        """Return the values.

        Raises:
            ModuleStateError: If the parameter has no memory yet.
        """
        if self.data is None:
            self._check_here()
            raise ModuleStateError(
                f"parameter {self.name!r} of shape {self.shape} has no memory yet: call "
                "materialize(seed=..., dtype=...) on its layer, or on the model or stage that "
                "holds it, before it is used"
            )
        return self.data

    def _check_here(self) -> None:
        """Raise if another object owns the values, saying who, and what to do."""
        if self.data is None and self._away:
            raise ModuleStateError(
                f"parameter {self.name!r} of shape {self.shape} has no memory here: {self._away}"
            )

    def put_away(self, why: str) -> None:
        """Drop the values, which another object owns, and remember their dtype.

        Args:
            why: Where they are, and what to do, for the error of :meth:`value`.
        """
        self._away_dtype = self.dtype
        self._away = why
        self.data = None

    def accumulate(self, g: Array, *, owned: bool = False) -> None:
        """Add `g` to the gradient, then call `on_ready`.

        Shapes:
            g: the parameter's shape. Another float dtype is rounded to the
                gradient's.

        Args:
            g: What to add.
            owned: Nobody else holds `g`, so that it may become the gradient
                memory itself instead of being copied.

        Raises:
            ShapeError: If `g` has another shape.
            DTypeError: If `g` is not a float array.
            ModuleStateError: If the parameter has no memory yet.
        """
        self._check("gradient", g)
        data = self.value()
        dtype = data.dtype if self.grad_dtype is None else self.grad_dtype
        if self._marks[self._place] & ZERO:
            self._marks[self._place] &= ELSEWHERE
            self._grad[...] = g
        elif self._grad is not None:
            self._grad += g
        elif owned and isinstance(g, type(data)) and g.dtype == dtype and g.flags.c_contiguous:
            self.grad = g
        else:
            own = namespace(data).empty_like(data, dtype=dtype)
            own[...] = g
            self.grad = own
        if self.on_ready is not None:
            self.on_ready(self)

    def accumulate_rows(self, rows: Array, g: Array) -> None:
        """Add ``g[i]`` to row ``rows[i]`` of the gradient, then call `on_ready`.

        For gradients that are zero in most rows. No row may be named twice.

        Shapes:
            rows: (n,), integers in ``[0, shape[0])``.
            g: ``(n, *shape[1:])``.

        Raises:
            ModuleStateError: If the parameter has no memory yet.
            ShapeError: If `rows` are no row numbers, or `g` has not a row for each.
        """
        places, given = shape_of(rows), shape_of(g)
        if places is None or len(places) != 1 or rows.dtype.kind not in "iu":
            raise ShapeError(
                f"rows of parameter {self.name!r} must be row numbers, got {shown(rows)}"
            )
        if given != (*places, *self.shape[1:]) or g.dtype.kind not in "fiuV":
            raise ShapeError(
                f"g must hold a row of parameter {self.name!r} of shape {self.shape} for each of "
                f"{places[0]} rows, got {shown(g) if given is None else given}"
            )
        if self._grad is None:
            data = self.value()
            self.grad = namespace(data).zeros_like(data, dtype=self.grad_dtype)
        self.grad[rows] += g
        if self.on_ready is not None:
            self.on_ready(self)

    def attach_grad(self, view: Array, marks: bytearray | None = None, place: int = 0) -> None:
        """Let the gradient live in `view`, part of a larger flat memory.

        What was accumulated so far moves there. From now on `grad` is never None: attached memory
        counts as a gradient, of zeros where nothing was added; they are written when
        somebody looks.

        Shapes:
            view: the parameter's shape, and its dtype or a wider one; C-contiguous, writable.

        Args:
            view: The memory.
            marks: Marks of all parts of that memory, of the bits `ZERO` and `ELSEWHERE`, by which
                its owner knows and sets the state of many gradients at once; None for one alone.
            place: Which of them is this one's.

        Raises:
            ShapeError: If `view` has another shape or is not contiguous.
            DTypeError: If `view` has a narrower dtype.
            ModuleStateError: If the parameter has no memory yet.
        """
        self._check("gradient memory", view)
        data = self.value()
        if np.promote_types(view.dtype, data.dtype) != view.dtype:
            raise DTypeError(
                f"gradient memory of parameter {self.name!r} must be {data.dtype} or wider, got "
                f"{view.dtype}"
            )
        if not view.flags.c_contiguous:
            raise ShapeError(f"gradient memory of parameter {self.name!r} must be C-contiguous")
        before = self.grad
        if before is not None:
            view[...] = before
        self.detach_grad()
        if marks is not None:
            self._marks, self._place = marks, place
        self.grad = view
        self._attached = True
        self._is_zero = before is None

    def detach_grad(self) -> None:
        """Give up attached gradient memory; `grad` is None afterwards."""
        self._attached = False
        self._marks, self._place = bytearray(1), 0
        self.grad = None

    def zero_grad(self) -> None:
        """Forget the gradient: zeros in attached memory, otherwise None.

        The zeros are written when :attr:`grad` is read; most often something is added
        before, and takes their place.
        """
        if self._attached and self._grad is not None:
            self._is_zero = True
        else:
            self.grad = None

    def write_zeros(self) -> None:
        """Set attached memory to 0, if nothing was added since the last `zero_grad`.

        For readers of the memory itself.
        """
        if self._marks[self._place] & ZERO:
            self._marks[self._place] &= ELSEWHERE
            self._grad[...] = 0

    def _check(self, what: str, g: Array) -> None:
        shape = shape_of(g)
        if shape != self.shape:
            raise ShapeError(
                f"{what} of parameter {self.name!r} must be an array of its shape {self.shape}, "
                f"got {shown(g) if shape is None else shape}"
            )
        if g.dtype.kind != "f" and not is_half(g.dtype):
            raise DTypeError(
                f"{what} of parameter {self.name!r} must be of a float dtype, got {g.dtype}"
            )

    def __getstate__(self) -> object:
        """Return what a copy holds: all but the tie to those who wait for the gradient."""
        self._check_here()
        own, slots = cast("tuple[object, dict[str, Any]]", super().__getstate__())
        alone = {
            "_attached": False,
            "_marks": bytearray([self._is_zero]),
            "_place": 0,
        }
        return own, {**slots, **alone, "on_ready": None, "grad_dtype": None, "trainer": None}

    def __repr__(self) -> str:
        where = "no memory" if self.data is None else str(self.data.dtype)
        frozen = "" if self.requires_grad else ", frozen"
        return f"Parameter({self.name!r}, {self.shape}, {where}{frozen})"


@dataclass(frozen=True, slots=True, eq=False)
class Buffer:
    """An array of a layer's state that no optimizer changes, such as a mean of what it has seen.

    Attributes:
        owner: The layer that has it.
        name: The attribute that it is; forward may put another array there.
    """

    owner: Any
    name: str

    @property
    def key(self) -> tuple[int, str]:
        """The same for one attribute of one layer, wherever that stands."""
        return id(self.owner), self.name

    def value(self) -> Array:
        """Return the array that is there now: live memory.

        Raises:
            ModuleStateError: If something else is there.
        """
        value = getattr(self.owner, self.name)
        if isinstance(value, int | float | np.generic):  # as sums of arrays of shape () are
            value = np.array(value)
            setattr(self.owner, self.name, value)
        if not hasattr(value, "shape") or not isinstance(getattr(value, "dtype", None), np.dtype):
            raise ModuleStateError(
                f"buffer {self.name!r} of {self.owner!r} must stay an array, which is saved with "
                f"the parameters; it is {shown(value)} now"
            )
        return value

    def problem(self) -> str:
        """Say why it cannot be saved; empty if it can."""
        try:
            self.value()
        except MpimeshError as error:
            return str(error)
        return ""


def as_parameters(given: object, name: str) -> tuple[Parameter, ...]:
    """Return parameters, which an argument called `name` gives.

    Raises:
        ModuleError: If it gives something else.
    """
    wanted = "Parameter objects, as model.parameters() gives"
    parameters = as_items(given, name, ModuleError, wanted=wanted)
    for one in parameters:
        check_kind(one, Parameter, name, ModuleError, wanted=wanted)
    return parameters


def is_float_dtype(dtype: Any) -> bool:
    """Tell whether `dtype`, one of NumPy's, is one in which a model can be materialised."""
    # By its name, for ml_dtypes may be missing; the dtypes of other libraries have none.
    return dtype in _FLOAT_DTYPES or getattr(dtype, "name", "") == _BFLOAT16


def float_dtype(
    dtype: Any, *, what: str = "parameters are kept", xp: ModuleType | None = None
) -> DType:
    """Return `dtype` as a NumPy dtype in which a model can be materialised.

    Args:
        dtype: What names it.
        what: What the message of an error is about.
        xp: The library that is to have arrays of it; None for either.

    Raises:
        DTypeError: If it is not float16, float32, float64 or bfloat16; or if it is bfloat16, and
            `xp` does not have it or ml_dtypes is not installed.
    """
    try:
        if isinstance(dtype, str) and dtype == _BFLOAT16:
            import ml_dtypes

            dtype = ml_dtypes.bfloat16
        found: DType | None = None if dtype is None else np.dtype(dtype)  # NumPy's is float64
    except ImportError:
        raise DTypeError(
            "NumPy has bfloat16 from the package ml_dtypes: pip install ml_dtypes, or take float32"
        ) from None
    except TypeError:
        found = None
    if found is None or not is_float_dtype(found):
        raise DTypeError(f"{what} in one of {FLOAT_NAMES}, got dtype {shown(dtype)}")
    if found.name == _BFLOAT16 and xp is not None and xp is not np:
        raise DTypeError(f"{what} in bfloat16 in NumPy's memory only; take float16")
    return found


_VOID = np.dtype("V2")


def check_shape(name: str, shape: tuple[int, ...], value: Array) -> None:
    """Check that `value` can be that of a parameter of this shape.

    Raises:
        ShapeError: If its shape differs.
    """
    if np.shape(value) != shape:
        raise ShapeError(
            f"state of parameter {name!r} must have its shape {shape}, got {np.shape(value)}"
        )


def check_state(state: object) -> None:
    """Check that `state` is a dict, or a file of arrays that is like one.

    Raises:
        ModuleError: If it is not.
    """
    if not isinstance(state, Mapping):
        raise ModuleError(
            "state must be a dict of arrays by the names of parameters, or what np.load gives of "
            f"such a file, got {shown(state)}"
        )


def check_values(
    parameters: Mapping[str, Parameter], state: Mapping[str, Array]
) -> list[tuple[Array, Array]]:
    """Return the memory of each parameter and what is to be copied there.

    Raises:
        ShapeError: If a shape differs.
        DTypeError: If values are no real numbers.
        ModuleStateError: If a parameter has no memory yet.
    """
    ready: list[tuple[Array, Array]] = []
    for name, parameter in parameters.items():
        data = parameter.value()
        check_shape(name, parameter.shape, state[name])
        values = np.asarray(to_numpy(state[name]))
        if values.dtype == _VOID and is_half(data.dtype):
            values = values.view(data.dtype)  # np.load knows no bfloat16
        if values.dtype.kind not in "biuf" and not is_half(values.dtype):
            raise DTypeError(
                f"state of parameter {name!r} must be real numbers, as its dtype is {data.dtype}, "
                f"got {values.dtype}"
            )
        ready.append((data, namespace(data).asarray(values.astype(data.dtype, copy=False))))
    return ready


def check_buffers(
    buffers: Mapping[str, Buffer], state: Mapping[str, Array]
) -> list[tuple[Array, Array]]:
    """Return the memory of each buffer and what is to be copied there.

    Raises:
        ShapeError: If a shape differs.
        DTypeError: If values would change by more than the rounding of floats.
    """
    ready: list[tuple[Array, Array]] = []
    for name, buffer in buffers.items():
        data, values = buffer.value(), np.asarray(to_numpy(state[name]))
        if values.shape != data.shape:
            raise ShapeError(
                f"state of buffer {name!r} must have its shape {data.shape}, got {values.shape}"
            )
        if values.dtype == _VOID and is_half(data.dtype):
            values = values.view(data.dtype)
        floats = all(map(is_float_dtype, (values.dtype, data.dtype)))
        if not floats and not np.can_cast(values.dtype, data.dtype, "safe"):
            raise DTypeError(
                f"state of buffer {name!r} must be {data.dtype}, got {values.dtype}: only floats "
                "are rounded"
            )
        ready.append((data, namespace(data).asarray(values.astype(data.dtype, copy=False))))
    return ready


def refuse_names(
    what: str,
    missing: Collection[str],
    unknown: Collection[str],
    buffers: Collection[str],
    cure: str,
) -> None:
    """Return if nothing is missing in a state, and nothing unknown.

    Args:
        what: What must have the names, and which.
        missing: What it lacks.
        unknown: What it has beside that.
        buffers: The names of buffers, which states of before they were saved lack.
        cure: What to do.

    Raises:
        ModuleError: If something is.
    """
    if not missing and not unknown:
        return
    only_buffers = missing and not unknown and set(missing) <= set(buffers)
    old = " (buffers, which states of before they were saved lack)" if only_buffers else ""
    raise ModuleError(
        f"{what}; missing: {sorted(missing) or 'none'}{old}, unknown: {sorted(unknown) or 'none'}"
        f"{cure}"
    )
