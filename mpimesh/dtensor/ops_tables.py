"""Functions that look each element up: in tables that all ranks have, or among several arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpimesh.dtensor.alike import raise_together
from mpimesh.dtensor.arguments import as_tensor, refuse_given, whole_key
from mpimesh.dtensor.ops_elementwise import blockwise
from mpimesh.dtensor.ops_ufunc import plain, tried
from mpimesh.dtensor.registry import implements, sure_rule_of
from mpimesh.dtensor.run import Work, resolved, run, shape_of, store
from mpimesh.dtensor.tensor import DTensor, are_whole, common_mesh
from mpimesh.errors import ShapeError, on_all_ranks
from mpimesh.layout.op_rules import KEEP, Pattern, broadcast_shape, elementwise_pattern

__all__: list[str] = []


def _checked(
    name: str, function: Callable[..., Any], operands: Sequence[Any], *, may_fail: bool = True
) -> list[DTensor]:
    """Do a function element by element that may refuse values: then all ranks do. Collective."""
    operands = [plain(one) for one in operands]
    shapes = [shape_of(one) for one in operands]
    shape = broadcast_shape(shapes)
    kinds = tried(function, operands)
    mesh = common_mesh(operands)
    may_differ = may_fail and not are_whole(operands)

    def work(here: Work) -> Any:
        with raise_together(mesh, name, needed=may_differ):
            made = function(*here.blocks)
        return made

    pattern = elementwise_pattern(shapes, shape)
    return list(run(work, operands, pattern, shape, kinds))


def _on_mesh(x: Any, *others: Any) -> DTensor:
    """Return a plain array on the mesh of the split ones that go with it."""
    return as_tensor(x, common_mesh([x, *others]))


# -- in tables -------------------------------------------------------------------------------


@implements(np.digitize)
def digitize(x: Any, bins: Any, right: bool = False) -> Any:
    """Return in which bin each element is, laid out as `x`. Split bins are gathered."""
    edges = whole_key(bins)
    return blockwise(lambda block: np.digitize(block, edges, right), [_on_mesh(x, bins)])


@implements(np.interp)
def interp(
    x: Any, xp: Any, fp: Any, left: Any = None, right: Any = None, period: Any = None
) -> Any:
    """Interpolate between the points of a table, laid out as `x`. A split table is gathered."""
    known, values = whole_key(xp), whole_key(fp)
    return blockwise(
        lambda block: np.interp(block, known, values, left, right, period), [_on_mesh(x, xp, fp)]
    )


@implements(np.polyval)
def polyval(p: Any, x: Any) -> Any:
    """Return the values of a polynomial, laid out as `x`. Split coefficients are gathered."""
    coefficients = whole_key(p)
    return blockwise(lambda block: np.polyval(coefficients, block), [_on_mesh(x, p)])


@implements(np.unravel_index)
def unravel_index(indices: Any, shape: Any, order: Any = "C") -> tuple[DTensor, ...]:
    """Return the indices along all axes of places that are counted in one row.

    Raises:
        ValueError: On every rank, if one is out of bounds.
    """
    return tuple(
        _checked("unravel_index", lambda one: np.unravel_index(one, shape, order), [indices])
    )


@implements(np.ravel_multi_index)
def ravel_multi_index(
    multi_index: Any, dims: Any, mode: Any = "raise", order: Any = "C"
) -> DTensor:
    """Return the places, counted in one row, of indices along all axes.

    Raises:
        ValueError: On every rank, if one is out of bounds.
    """

    def work(*rows: Any) -> Any:
        return np.ravel_multi_index(rows, dims, mode, order)

    return _checked("ravel_multi_index", work, multi_index)[0]


# -- among several arrays ----------------------------------------------------------------------


@implements(np.select)
def select(condlist: Any, choicelist: Any, default: Any = 0) -> Any:
    """Choose for each element from the first array whose condition holds."""
    conditions, choices = list(condlist), list(choicelist)
    if len(conditions) != len(choices) or not conditions:
        raise on_all_ranks(
            ShapeError(
                f"np.select takes a condition for each choice, and at least one; got "
                f"{len(conditions)} and {len(choices)}"
            )
        )
    half = len(conditions)

    def work(*blocks: Any) -> Any:
        rows = [np.asarray(one) for one in blocks[:half]]
        return np.select(rows, list(blocks[half:-1]), blocks[-1])

    return blockwise(work, [*conditions, *choices, default])


@implements(np.choose)
def choose(a: Any, choices: Any, out: Any = None, mode: Any = "raise") -> DTensor:
    """Choose for each element from the array that its number says.

    Raises:
        ValueError: On every rank, if there is no such array, unless `mode` says what to do.
    """

    def work(number: Any, *blocks: Any) -> Any:
        return np.choose(number, list(blocks), mode=mode)

    (made,) = _checked("choose", work, [a, *choices], may_fail=mode == "raise")
    return made if out is None else store(made, out)


@implements(np.piecewise)
def piecewise(x: Any, condlist: Any, funclist: Any, *args: Any, **kw: Any) -> Any:
    """Call each function on the elements for which its condition holds.

    The functions get elements of one block, and work element by element.
    """
    # As NumPy has it, what holds no arrays is one condition.
    several = len(condlist) > 0 and isinstance(condlist[0], DTensor | np.ndarray | list)
    rows = list(condlist) if several or not x.ndim else [condlist]

    def work(block: Any, *conditions: Any) -> Any:
        return np.piecewise(block, [np.asarray(one) for one in conditions], funclist, *args, **kw)

    return blockwise(work, [x, *rows])


@implements(np.real_if_close)
def real_if_close(a: DTensor, tol: float = 100) -> DTensor:
    """Return the real parts, if no imaginary part is larger than `tol` says. Collective."""
    if a.dtype.kind != "c":
        return a
    x = resolved(a)
    limit = tol * np.finfo(a.dtype).eps if tol > 1 else tol
    near = bool(np.all(np.less(np.absolute(np.imag(x)), limit)))
    found: DTensor = sure_rule_of(np.real)(x) if near else x
    return found


# -- one element becomes a row -------------------------------------------------------------------


@implements(np.vander)
def vander(x: DTensor, N: Any = None, increasing: bool = False) -> DTensor:
    """Return the powers of each element as a row, which is where the element is."""
    if x.ndim != 1:
        raise on_all_ranks(ShapeError(f"np.vander takes one axis, got shape {x.shape}"))
    count = x.shape[0] if N is None else int(N)
    kind = np.vander(np.ones(1, x.dtype), count).dtype

    def work(here: Work) -> Any:
        return np.vander(here.blocks[0], count, increasing)

    pattern = Pattern(((0,),), (0, KEEP))
    return run(work, [resolved(x)], pattern, (x.shape[0], count), [kind])[0]


def _spread(function: Callable[..., Any]) -> None:
    """Register a function that makes numbers from each element of one array to that of another."""

    @implements(function)
    def do(start: Any, stop: Any, num: int = 50, *args: Any, axis: int = 0, **options: Any) -> Any:
        refuse_given(function.__name__, retstep=options.pop("retstep", None) or None)
        first, last = plain(start), plain(stop)
        shapes = [shape_of(first), shape_of(last)]
        stack = broadcast_shape(shapes)
        probe = [np.ones((), one.dtype) if hasattr(one, "dtype") else one for one in (first, last)]
        kind = function(*probe, 1, *args, **options).dtype
        pattern = elementwise_pattern(shapes, stack)

        mesh = common_mesh([first, last])

        def work(here: Work) -> Any:
            # np.geomspace refuses zeros.
            with raise_together(mesh, "geomspace", needed=function is np.geomspace):
                return function(*here.blocks, num, *args, **options)

        wanted = Pattern(pattern.inputs, (KEEP, *pattern.output))
        (made,) = run(work, [first, last], wanted, (num, *stack), [kind])
        return sure_rule_of(np.moveaxis)(made, 0, axis)


for _function in (np.linspace, np.logspace, np.geomspace):
    _spread(_function)
