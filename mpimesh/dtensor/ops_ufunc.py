"""NumPy's ufuncs on split arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isfinite
from typing import Any

import numpy as np

from mpimesh.arrays import DType, HostArray, refuse_masked, refuse_objects
from mpimesh.dtensor.alike import raise_together
from mpimesh.dtensor.registry import implements, sure_rule_of
from mpimesh.dtensor.run import Work, checked_out, kept_summands, run, shape_of, store
from mpimesh.dtensor.tensor import DTensor, common_mesh
from mpimesh.errors import DTypeError, NoRuleError, on_all_ranks
from mpimesh.layout.op_rules import (
    Linearity,
    Pattern,
    broadcast_shape,
    elementwise_pattern,
)

__all__ = ["call", "plain", "tried", "ufunc_rule"]

_SUMS = ("sum", "mean")
_FIRST = (Linearity((0,), _SUMS),)
_LINEAR: dict[np.ufunc, tuple[Linearity, ...]] = {
    np.positive: (Linearity((0,), ("sum", "mean", "prod", "min", "max")),),
    np.negative: _FIRST,
    np.conjugate: _FIRST,
    np.add: (Linearity((0, 1), _SUMS),),
    np.subtract: (Linearity((0, 1), _SUMS),),
    np.multiply: (Linearity((0,), _SUMS), Linearity((1,), _SUMS), Linearity((0, 1), ("prod",))),
    np.divide: _FIRST,
    np.minimum: (Linearity((0, 1), ("min",)),),
    np.maximum: (Linearity((0, 1), ("max",)),),
}
"""Which operands may be summands that nobody has summed yet, and the result then is such, too."""


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
    if method == "reduce":
        return sure_rule_of(np.ufunc.reduce)(ufunc, *args, **kwargs)
    if method == "outer":
        return outer(ufunc, *args, **kwargs)
    raise on_all_ranks(
        NoRuleError(
            f"np.{ufunc.__name__}.{method} has no rule for split arrays; call it on x.full(), or "
            "on blocks"
        )
    )


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
    shape = broadcast_shape([shape_of(one) for one in (*operands, *masks)])
    given = [one for one in outs if one is not None]
    if given:
        # NumPy stretches operands to what the result is to go into.
        whole = shape_of(given[0])
        fits = len(shape) <= len(whole) and all(
            n in (1, m) for n, m in zip(reversed(shape), reversed(whole), strict=False)
        )
        shape = whole if fits else shape
        for one in given:
            checked_out(one, shape)
    kinds = tried(ufunc, operands, out=tuple(outs), **kwargs)
    linear = _linear(ufunc, operands, kinds)
    if masks:
        linear = ()
    return _done(ufunc, operands, masks, outs, shape, kinds, linear, kwargs)


def _done(
    ufunc: np.ufunc,
    operands: list[Any],
    masks: list[Any],
    outs: list[Any],
    shape: tuple[int, ...],
    kinds: list[DType],
    linear: tuple[Linearity, ...],
    kwargs: dict[str, Any],
) -> Any:
    given = [one for one in outs if one is not None]
    kept = given if masks else []  # their values stay where the mask is false
    everything = [*operands, *masks, *kept]
    pattern = elementwise_pattern([shape_of(one) for one in everything], shape, linear)
    may_fail = _may_fail(ufunc, operands, shape, kinds)
    mesh = common_mesh([*everything, *outs])
    nin, places = ufunc.nin, [number for number, one in enumerate(outs) if one is not None]

    def work(here: Work) -> None:
        options = dict(kwargs)
        if masks:
            options["where"] = here.blocks[nin]
            for number, block in zip(places, here.blocks[nin + 1 :], strict=True):
                if here.out[number] is not block:
                    here.out[number][...] = block

        with raise_together(mesh, f"np.{ufunc.__name__}", needed=may_fail):
            ufunc(*here.blocks[:nin], out=here.out, **options)

    results = list(run(work, everything, pattern, shape, kinds, outs=outs, into=True))
    for number in places:
        results[number] = store(results[number], outs[number], kwargs.get("casting", "same_kind"))
    return results[0] if ufunc.nout == 1 else tuple(results)


def _may_fail(
    ufunc: np.ufunc, operands: list[Any], shape: tuple[int, ...], kinds: list[DType]
) -> bool:
    """Tell whether some ranks may meet values that NumPy refuses: powers that are below zero."""
    if ufunc is not np.power or kinds[0].kind != "i" or 0 in shape:
        return False
    power = operands[1]
    return isinstance(power, DTensor) or bool(np.any(np.less(power, 0)))


def outer(ufunc: np.ufunc, a: Any, b: Any, **kwargs: Any) -> Any:
    """Do a ufunc on all pairs of elements, as ``np.multiply.outer`` does."""
    # As NumPy has it, a number counts with the dtype that an array of it has.
    a, b = (one if isinstance(one, DTensor) else plain(np.asarray(one)) for one in (a, b))
    first, second = shape_of(a), shape_of(b)
    kinds = tried(ufunc, [a, b], **kwargs)
    letters = tuple(range(len(first) + len(second)))
    linear = tuple(one for one in _linear(ufunc, [a, b], kinds) if len(one.operands) == 1)
    pattern = Pattern((letters[: len(first)], letters[len(first) :]), letters, linear=linear)

    shape = (*first, *second)
    may_fail = _may_fail(ufunc, [a, b], shape, kinds)
    mesh = common_mesh([a, b])

    def work(here: Work) -> None:
        with raise_together(mesh, f"np.{ufunc.__name__}.outer", needed=may_fail):
            ufunc.outer(*here.blocks, out=here.out, **kwargs)

    results = run(work, [a, b], pattern, shape, kinds, into=True)
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
    return made if made.ndim else made[()]


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
        raise on_all_ranks(DTypeError("split arrays do not hold Python objects"))
    return kinds


def _linear(ufunc: np.ufunc, operands: Sequence[Any], kinds: list[DType]) -> tuple[Linearity, ...]:
    linear = _LINEAR.get(ufunc, ())
    if ufunc is np.divide and not _is_number(operands[1], nonzero=True):
        return ()
    if ufunc is np.multiply and any(
        not shape_of(one) and not isinstance(one, DTensor) and not _is_number(one)
        for one in operands
    ):
        return ()
    for one in operands:
        linear = kept_summands(one, kinds[0], linear)
    return linear


def _is_number(x: Any, *, nonzero: bool = False) -> bool:
    """Tell whether `x` is a number by which summands can be multiplied or divided one by one."""
    if isinstance(x, DTensor) or shape_of(x) or np.asarray(x).dtype.kind not in "biufc":
        return False
    value = complex(x)
    return isfinite(value.real) and isfinite(value.imag) and (value != 0 or not nonzero)
