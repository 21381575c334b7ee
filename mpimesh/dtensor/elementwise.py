"""NumPy's ufuncs on split arrays, and its other functions that work element by element."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from mpimesh.arrays import DType, HostArray, refuse_masked, refuse_objects
from mpimesh.core.dispatch import MADE, Entry
from mpimesh.dtensor import creation
from mpimesh.dtensor.dispatch import implements, plans, sure_rule_of
from mpimesh.dtensor.dtensor import DTensor
from mpimesh.dtensor.linear import linear_for
from mpimesh.dtensor.methods import cast_dtype
from mpimesh.dtensor.run import (
    Work,
    checked_out,
    implements_by_name,
    planned,
    run,
    shape_of,
    split_out,
    store,
)
from mpimesh.errors import DTypeError, NoRuleError, ShapeError
from mpimesh.layout import Partial, PlacementSpec, Replicate, Shard
from mpimesh.layout.op_rules import (
    Pattern,
    broadcast_shape,
    elementwise_pattern,
)

__all__ = ["blockwise", "call", "plain", "tried", "ufunc_rule"]


@implements(np.ufunc)
def ufunc_rule(ufunc: np.ufunc, method: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Do ``ufunc(*args)`` or one of its methods.

    Raises:
        NoRuleError: If there is no rule for it.
    """
    if method == "__call__":
        if ufunc.signature is not None:
            return sure_rule_of(ufunc)(*args, **kwargs)
        return call(ufunc, args, **kwargs)
    if method in ("reduce", "accumulate"):
        out = kwargs.pop("out", None)
        made = sure_rule_of(getattr(np.ufunc, method))(ufunc, *args, **kwargs)
        return made if out is None else store(made, out)
    if method == "outer":
        return outer(ufunc, *args, **kwargs)
    raise NoRuleError.everywhere(f"np.{ufunc.__name__}.{method} has no rule for split arrays")


def call(
    ufunc: np.ufunc,
    args: Sequence[Any],
    out: Any = None,
    where: Any = True,
    **kwargs: Any,
) -> Any:
    """Do a ufunc element by element; the result is placed so that the fewest bytes move.

    Args:
        ufunc: The ufunc.
        args: Its operands, and after them, perhaps, what its results go into.
        out: Split arrays to write the results into, in the layouts that they have.
        where: Where to do it; elsewhere `out` stays as it is.
        kwargs: NumPy's other options, such as `dtype` and `casting`.

    Raises:
        ShapeError: If the operands do not broadcast.
        TypeError: If the ufunc does not have the dtypes.
        ValueError: On every rank, if a rank has an integer to take to a power below zero.
    """
    operands = [plain(one) for one in args[: ufunc.nin]]
    outs = list(args[ufunc.nin :]) or list(out if isinstance(out, tuple) else (out,))
    outs += [None] * (ufunc.nout - len(outs))
    masks = [] if where is True else [plain(where)]
    outputs = [split_out(one) for one in outs if one is not None]
    kinds = tried(ufunc, operands, out=tuple(outs), **kwargs)  # as NumPy, before the shapes
    shape = broadcast_shape([shape_of(one) for one in (*operands, *masks)])
    if outputs:
        # NumPy stretches operands to what the result is to go into.
        whole = shape_of(outputs[0])
        fits = len(shape) <= len(whole) and all(
            n in (1, m) for n, m in zip(reversed(shape), reversed(whole), strict=False)
        )
        shape = whole if fits else shape
        for one in outputs:
            checked_out(one, shape)
    # What `out` holds stays where the mask is false.
    everything = [*operands, *masks, *(outputs if masks else [])]
    linear = () if masks else linear_for(ufunc, operands, kinds[0], **kwargs)
    pattern = elementwise_pattern([shape_of(one) for one in everything], shape, linear)
    nin, places = ufunc.nin, [number for number, one in enumerate(outs) if one is not None]

    def work(here: Work) -> None:
        options = dict(kwargs)
        if masks:
            options["where"] = here.blocks[nin]
            for number, block in zip(places, here.blocks[nin + 1 :], strict=True):
                if here.out[number] is not block:
                    here.out[number][...] = block

        ufunc(*here.blocks[:nin], out=here.out, **options)

    refuses = refuses_values(ufunc, operands, kinds)
    results = list(
        run(work, everything, pattern, shape, kinds, outs=outs, into=True, refuses=refuses)
    )
    for number in places:
        results[number] = store(results[number], outs[number], kwargs.get("casting", "same_kind"))
    return results[0] if ufunc.nout == 1 else tuple(results)


@plans(np.ufunc)
def _planned(
    ufunc: np.ufunc, args: tuple[Any, ...], _: dict[str, Any], into: DTensor | None
) -> Entry | None:
    """Decide on a ufunc without options, of arrays and numbers."""
    if ufunc.nout != 1:
        return None
    (kind,) = tried(ufunc, args, out=(into,))
    if _are_powers(ufunc, args, [kind]):
        return None
    shape = broadcast_shape([shape_of(one) for one in args])
    linear = linear_for(ufunc, args, kind)
    pattern = elementwise_pattern([shape_of(one) for one in args], shape, linear)
    refuses = refuses_values(ufunc, args, [kind])
    return planned(ufunc, args, pattern, shape, kind, into=into, refuses=refuses)


_NUMPYS = {one for one in vars(np).values() if isinstance(one, np.ufunc)}


def refuses_values(ufunc: np.ufunc, operands: Sequence[Any], kinds: Sequence[DType]) -> bool:
    """Tell whether a ufunc may raise for numbers that only some ranks have.

    NumPy's own do so for integers to powers below zero; those of other packages may always.
    """
    if not _are_powers(ufunc, operands, kinds):
        return ufunc not in _NUMPYS
    power = operands[-1]
    return isinstance(power, DTensor) or bool(np.any(np.less(power, 0)))


def _are_powers(ufunc: np.ufunc, operands: Sequence[Any], kinds: Sequence[DType]) -> bool:
    """Tell whether a call is of powers of integers, for which it counts whether one is negative."""
    return ufunc is np.power and (
        kinds[0].kind in "iu"
        or all(
            np.result_type(one if shape_of(one) == () else one.dtype).kind in "biu"
            for one in operands
        )
    )


def outer(ufunc: np.ufunc, a: Any, b: Any, **kwargs: Any) -> Any:
    """Do a ufunc on all pairs of elements, as ``np.multiply.outer`` does."""
    # As NumPy has it, a number counts with the dtype that an array of it has.
    a, b = (one if isinstance(one, DTensor) else plain(np.asarray(one)) for one in (a, b))
    first, second = shape_of(a), shape_of(b)
    kinds = tried(ufunc, [a, b], **kwargs)
    letters = tuple(range(len(first) + len(second)))
    linear = linear_for(ufunc, [a, b], kinds[0], **kwargs)
    linear = tuple(one for one in linear if len(one.operands) == 1)
    pattern = Pattern((letters[: len(first)], letters[len(first) :]), letters, linear=linear)

    shape = (*first, *second)

    def work(here: Work) -> None:
        ufunc.outer(*here.blocks, out=here.out, **kwargs)

    refuses = refuses_values(ufunc, [a, b], kinds)
    results = run(work, [a, b], pattern, shape, kinds, into=True, refuses=refuses)
    return results[0] if ufunc.nout == 1 else results


def plain(x: Any) -> Any:
    """Return an operand as it is, but lists and the like as arrays: the same on all ranks.

    Raises:
        DTypeError: If it holds Python objects, or has a mask.
    """
    if isinstance(x, DTensor | bool | int | float | complex):
        return x
    refuse_masked(x)
    made: HostArray = np.asarray(x)
    refuse_objects(made.dtype)
    return made if made.ndim or made.dtype.kind in "SU" else made[()]  # of texts it has the length


def tried(function: Callable[..., Any], operands: Sequence[Any], **kwargs: Any) -> list[DType]:
    """Return the dtypes of what `function` gives, from a call on arrays without elements.

    So what NumPy refuses is refused on all ranks, before anything moves.
    """
    empties = [
        np.empty(0, one.dtype) if isinstance(one, DTensor | np.ndarray) else one for one in operands
    ]
    outs = kwargs.pop("out", (None,))
    if any(one is not None for one in outs):
        kwargs["out"] = tuple(None if one is None else np.empty(0, one.dtype) for one in outs)
    with np.errstate(all="ignore"):
        found = function(*empties, **kwargs)
    rows = found if isinstance(found, tuple) else (found,)
    kinds = [np.asarray(one).dtype for one in rows]
    if any(kind.hasobject for kind in kinds):
        raise DTypeError.everywhere("split arrays do not hold Python objects")
    return kinds


def blockwise(
    function: Callable[..., Any],
    operands: Sequence[Any],
    *,
    rule: Any = None,
    refuses: bool = True,
) -> DTensor:
    """Do a function that works element by element on blocks. Collective, if any is moved.

    Args:
        function: Takes blocks that broadcast, and gives one array.
        operands: Its operands.
        rule: The function that it does for :func:`linear_for`, if operands may be summands.
        refuses: Whether the function may raise for some numbers; see :func:`run`.
    """
    operands = [plain(one) for one in operands]
    shapes = [shape_of(one) for one in operands]
    shape = broadcast_shape(shapes)
    (kind,) = tried(function, operands)
    pattern = elementwise_pattern(shapes, shape, linear_for(rule, operands, kind))

    def work(here: Work) -> Any:
        return function(*here.blocks)

    return run(work, operands, pattern, shape, [kind], refuses=refuses)[0]


@implements(np.where)
def where(condition: Any, *choices: Any) -> Any:
    """Choose between two arrays; of a condition alone it is :func:`numpy.nonzero`.

    Raises:
        ShapeError: If there is one array to choose from.
    """
    if not choices:
        return sure_rule_of(np.nonzero)(condition)
    if len(choices) != 2:
        raise ShapeError.everywhere("np.where takes two arrays to choose from, or none; got 1")
    return blockwise(np.where, [condition, *choices], rule=np.where, refuses=False)


@plans(np.where, operands=3)
def _planned_where(
    _: Any, args: tuple[Any, ...], options: dict[str, Any], into: None
) -> Entry | None:
    """Decide on a choice between arrays and numbers."""
    if len(args) != 3 or options:
        return None
    (kind,) = tried(np.where, args)
    shape = broadcast_shape([shape_of(one) for one in args])
    linear = linear_for(np.where, args, kind)
    pattern = elementwise_pattern([shape_of(one) for one in args], shape, linear)
    return planned(np.where, args, pattern, shape, kind, way=MADE, options=(), names=())


@implements(np.clip)
def clip(
    a: Any,
    a_min: Any = None,
    a_max: Any = None,
    out: Any = None,
    *,
    min: Any = None,  # noqa: A002
    max: Any = None,  # noqa: A002
    **kwargs: Any,
) -> Any:
    """Limit values from below and above."""
    a = plain(a)
    low = min if a_min is None else a_min
    high = max if a_max is None else a_max
    kind = a.dtype if hasattr(a, "dtype") else np.dtype(type(a))
    if kind.kind in "iu":
        # A limit beyond what the dtype holds is none, as NumPy has it.
        low = None if type(low) is int and low <= np.iinfo(kind).min else low
        high = None if type(high) is int and high >= np.iinfo(kind).max else high
    if low is None and high is None:
        return call(np.positive, (a,), out=out, **kwargs)
    if low is None:
        return call(np.minimum, (a, high), out=out, **kwargs)
    if high is None:
        return call(np.maximum, (a, low), out=out, **kwargs)
    made = blockwise(lambda *blocks: np.clip(*blocks, **kwargs), [a, low, high], refuses=False)
    return made if out is None else store(made, out)


@implements(np.isclose)
def isclose(
    a: Any, b: Any, rtol: Any = 1e-05, atol: Any = 1e-08, equal_nan: bool = False
) -> DTensor:
    """Tell which elements are about equal."""

    def close(*blocks: Any) -> Any:
        x, y, relative, absolute = blocks
        return np.isclose(x, y, relative, absolute, equal_nan=equal_nan)

    return blockwise(close, [a, b, rtol, atol], refuses=False)


@implements(np.allclose)
def allclose(a: Any, b: Any, rtol: Any = 1e-05, atol: Any = 1e-08, equal_nan: bool = False) -> bool:
    """Tell on every rank whether all elements are about equal. Collective."""
    return bool(np.all(isclose(a, b, rtol, atol, equal_nan)))


@implements(np.array_equal)
def array_equal(a: Any, b: Any, equal_nan: bool = False) -> bool:
    """Tell on every rank whether shapes and values are the same. Collective."""
    a, b = plain(a), plain(b)
    return shape_of(a) == shape_of(b) and _same(a, b, equal_nan=equal_nan)


@implements(np.array_equiv)
def array_equiv(a: Any, b: Any) -> bool:
    """Tell on every rank whether values are the same once they are broadcast. Collective."""
    a, b = plain(a), plain(b)
    try:
        shape = np.broadcast_shapes(shape_of(a), shape_of(b))
    except ValueError:
        return False
    return shape in (shape_of(a), shape_of(b)) and _same(a, b, equal_nan=False)


def _same(a: Any, b: Any, *, equal_nan: bool) -> bool:
    def equal(one: Any, other: Any) -> Any:
        one, other = np.asarray(one), np.asarray(other)
        found = one == other  # unlike np.equal, it says so of dtypes that cannot be equal
        if not equal_nan:
            return found
        # What is not itself is NaN.
        return found | (np.not_equal(one, one) & np.not_equal(other, other))

    return bool(np.all(blockwise(equal, [a, b], refuses=False)))


@implements(operator.eq)
def equal(a: Any, b: Any) -> DTensor:
    """Tell which elements are equal, of records and other data, too, that ``np.equal`` refuses."""
    return blockwise(operator.eq, [a, b])


@implements(operator.ne)
def not_equal(a: Any, b: Any) -> DTensor:
    """Tell which elements differ."""
    return blockwise(operator.ne, [a, b])


@implements(np.real)
def real(val: DTensor) -> DTensor:
    """Return the real parts: a view, as `val.real`."""
    return val.real


@implements(np.imag)
def imag(val: DTensor) -> DTensor:
    """Return the imaginary parts: a view, as `val.imag`."""
    return val.imag


@implements(np.angle)
def angle(z: DTensor, deg: bool = False) -> DTensor:
    """Return the angles of complex numbers."""
    return blockwise(lambda block: np.angle(block, deg=deg), [z], refuses=False)


@implements(np.nan_to_num)
def nan_to_num(
    x: DTensor,
    copy: bool = True,
    nan: Any = 0.0,
    posinf: Any = None,
    neginf: Any = None,
) -> DTensor:
    """Put numbers in place of NaN and infinities."""

    def numbers(block: Any) -> Any:
        return np.nan_to_num(block, nan=nan, posinf=posinf, neginf=neginf)

    made = blockwise(numbers, [x], refuses=False)
    return made if copy else store(made, x)


@implements_by_name(np.round, np.around)
def round_(a: DTensor, decimals: int = 0) -> DTensor:
    """Round to `decimals`."""
    return blockwise(lambda block: np.round(block, decimals), [a], refuses=False)


def _each(function: Callable[..., Any], x: DTensor) -> DTensor:
    return blockwise(function, [x], refuses=False)


for _function in (np.iscomplex, np.isreal, np.isposinf, np.isneginf, np.i0, np.sinc, np.fix):
    implements(_function)(partial(_each, _function))


@implements_by_name(np.copy)
def copy(a: DTensor, **memory: Any) -> DTensor:
    """Return a tensor with a block of its own. Local."""
    return a.copy()


@implements(np.astype)
def astype(x: DTensor, dtype: Any, /, *, copy: bool = True, device: Any = None) -> DTensor:
    """Return `x` in another dtype. Summands stay summands where that loses nothing.

    Raises:
        DTypeError: If the dtype holds Python objects.
    """
    if np.dtype(dtype).hasobject:
        raise DTypeError.everywhere("split arrays do not hold Python objects")
    kind = cast_dtype(x.dtype, dtype)
    if kind == x.dtype:
        return x.copy() if copy else x
    if x.dtype.kind in "SUV":
        return x.astype(kind, copy=False)
    return blockwise(lambda block: block.astype(kind), [x], rule=np.positive, refuses=False)


@implements(np.copyto)
def copyto(dst: DTensor, src: Any, casting: Any = "same_kind", where: Any = True) -> None:
    """Write `src` into `dst`, in the layout that it has.

    Raises:
        TypeError: If it may not be cast so.
    """
    src = plain(src)
    more = len(shape_of(src)) - dst.ndim
    if more > 0 and set(shape_of(src)[:more]) == {1}:
        # Axes of length 1 that come first are none here, as NumPy has it.
        src = src.reshape(shape_of(src)[more:])
    masks = [] if where is True else [plain(where)]
    shape = broadcast_shape([shape_of(src), *map(shape_of, masks)])
    checked_out(dst, broadcast_shape([shape, shape_of(dst)]))
    empty = np.empty(0, src.dtype) if isinstance(src, DTensor | np.ndarray) else src
    np.copyto(np.empty(0, dst.dtype), empty, casting=casting)  # refuses what it may not cast
    operands = [src, *masks, *([dst] if masks else [])]
    linear = () if masks else linear_for(np.positive, [src], dst.dtype)
    pattern = elementwise_pattern([shape_of(one) for one in operands], dst.shape, linear)

    def work(here: Work) -> None:
        if masks:
            here.out[0][...] = here.blocks[2]
        mask = here.blocks[1] if masks else True
        np.copyto(here.out[0], here.blocks[0], casting=casting, where=mask)

    made = run(
        work, operands, pattern, dst.shape, [dst.dtype], outs=[dst], into=True, refuses=False
    )
    store(made[0], dst)


@implements_by_name(np.full_like)
def full_like(
    a: DTensor, fill_value: Any, dtype: Any = None, shape: Any = None, **memory: Any
) -> DTensor:
    """Return an array in the layout of `a`, with `fill_value` everywhere."""
    made = empty_like(a, dtype, shape=shape)
    copyto(made, fill_value, casting="unsafe")
    return made


@implements_by_name(np.zeros_like)
def zeros_like(a: DTensor, dtype: Any = None, shape: Any = None, **memory: Any) -> DTensor:
    """Return an array in the layout of `a`, of zeros; of text they are empty."""
    zero = np.zeros((), a.dtype if dtype is None else dtype)[()]
    return full_like(a, zero, dtype, shape, **memory)


implements_by_name(np.ones_like)(partial(full_like, fill_value=1))


@implements(np.empty_like)
def empty_like(
    prototype: DTensor, dtype: Any = None, *memory: Any, shape: Any = None, **more: Any
) -> DTensor:
    """Return an array in the layout of `prototype`, uninitialised.

    One of another `shape` is split along the same axes, as far as it has them.
    """
    kind = prototype.dtype if dtype is None else np.dtype(dtype)
    # Truth values, for example, cannot be summands.
    op = prototype.layout.partial_op
    reduces = kind.kind in {"min": "biuf", "max": "biuf", "mean": "fc"}.get(op or "", "iufc")
    specs: list[PlacementSpec] = [
        Replicate() if isinstance(spec, Partial) and not reduces else spec
        for spec in prototype.placement
    ]
    sizes = prototype.shape
    if shape is not None:
        sizes = (shape,) if isinstance(shape, int) else tuple(shape)
        specs = [
            (Shard(spec.axis) if spec.axis < len(sizes) else Replicate())
            if isinstance(spec, Shard)
            else spec
            for spec in specs
        ]
    return creation.empty(sizes, prototype.mesh, specs, dtype=kind)
