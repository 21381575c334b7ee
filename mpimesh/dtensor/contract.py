"""Products summed over common axes: one rule, by letters, for all of NumPy's spellings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import prod
from operator import index
from typing import Any

import numpy as np

from mpimesh.arrays import DType
from mpimesh.core.dispatch import Entry
from mpimesh.dtensor.dispatch import implements, plans, sure_rule_of
from mpimesh.dtensor.dtensor import DTensor
from mpimesh.dtensor.elementwise import call, plain, ufunc_rule
from mpimesh.dtensor.linear import linear_for
from mpimesh.dtensor.run import (
    Work,
    axes_of,
    checked_out,
    implements_by_name,
    planned,
    run,
    shape_of,
    store,
)
from mpimesh.errors import DTypeError, NoRuleError, ShapeError
from mpimesh.layout.op_rules import (
    Contraction,
    contraction,
    einsum_pattern,
    matmul_pattern,
)
from mpimesh.runtime.operands import MissingAxisError, normal_axis

__all__ = ["refuse_spans"]


@implements(np.matmul)
def matmul(a: Any, b: Any, /, out: Any = None, **kwargs: Any) -> DTensor:
    """Return the matrix product, of all shapes that NumPy takes. Collective, if anything moves.

    Raises:
        ShapeError: If they do not fit.
    """
    if kwargs.get("axes") is not None:
        cores = [min(len(shape_of(plain(one))), 2) for one in (a, b)]
        rows = [(0, 1)[:count] for count in cores]
        output = tuple(range(sum(cores) - 2))
        return _with_axes(np.matmul, a, b, rows, output, out, kwargs)
    kwargs.pop("axes", None)
    a, b = plain(a), plain(b)
    found, kind = _product(a, b, kwargs)
    return _contracted(
        lambda left, right, into: np.matmul(left, right, out=into, **kwargs),
        [a, b],
        found,
        kind,
        out,
    )


def _product(a: Any, b: Any, options: dict[str, Any]) -> tuple[Contraction, DType]:
    """Return the matrix product of two arrays as a contraction, and its dtype."""
    matmul_pattern(shape_of(a), shape_of(b))  # refuses shapes that do not fit
    kind = _kind(lambda *ones: np.matmul(*ones, **options), [a, b], 2)
    op, linear = _reduction([a, b], kind)
    return matmul_pattern(shape_of(a), shape_of(b), op=op, linear=linear), kind


@plans(np.matmul)
def _planned(
    ufunc: np.ufunc, args: tuple[Any, ...], _: dict[str, Any], into: DTensor | None
) -> Entry | None:
    """Decide on a matrix product without options."""
    a, b = args
    found, kind = _product(a, b, {})
    return planned(ufunc, args, found.pattern, found.shape, kind, into=into)


@implements(np.einsum)
def einsum(*operands: Any, out: Any = None, optimize: Any = True, **kwargs: Any) -> DTensor:
    """Return the sum of products that the subscripts say. Collective, if anything moves.

    A letter that stands twice in one operand is brought whole.

    Raises:
        ShapeError: If the subscripts cannot be read, or do not fit the operands.
        NoRuleError: If the subscripts are lists of numbers, not text.
    """
    if not operands or not isinstance(operands[0], str):
        raise NoRuleError.everywhere("einsum of split arrays takes its subscripts as text first")
    subscripts, arrays = operands[0], [plain(one) for one in operands[1:]]
    shapes = [shape_of(one) for one in arrays]
    einsum_pattern(subscripts, shapes)  # refuses what cannot be read
    ones = [
        np.ones((1,) * len(shape), one.dtype) if hasattr(one, "dtype") else one
        for one, shape in zip(arrays, shapes, strict=True)
    ]
    kind = np.asarray(np.einsum(subscripts, *ones, optimize=optimize, **kwargs)).dtype
    op, linear = _reduction(arrays, kind)
    found = einsum_pattern(subscripts, shapes, op=op, linear=linear)

    def work(*blocks: Any) -> Any:
        *sources, into = blocks
        # Of one operand it may be a view, whatever its dtype is to be: as NumPy has it.
        if len(sources) == 1 or any(np.may_share_memory(one, into) for one in sources):
            into[...] = np.einsum(subscripts, *sources, optimize=optimize, **kwargs)
            return into
        return np.einsum(subscripts, *sources, out=into, optimize=optimize, **kwargs)

    return _contracted(work, arrays, found, kind, out)


@implements(np.tensordot)
def tensordot(a: Any, b: Any, axes: Any = 2) -> DTensor:
    """Return the sum of products over pairs of axes. Collective, if anything moves.

    Raises:
        ShapeError: If the axes do not fit.
    """
    a, b = plain(a), plain(b)
    first, second = shape_of(a), shape_of(b)
    if not isinstance(axes, Iterable):
        count = index(axes)
        if not 0 <= count <= min(len(first), len(second)):
            raise MissingAxisError.everywhere(
                f"tensordot over {count} axes needs arrays of as many: {first}, {second}"
            )
        left = tuple(range(len(first) - count, len(first)))
        right = tuple(range(count))
    else:
        left, right = (
            axes_of(one, len(shape), "axes")
            for one, shape in zip(axes, (first, second), strict=True)
        )
    if [first[i] for i in left] != [second[i] for i in right]:
        raise ShapeError.everywhere(
            f"tensordot of shapes {first} and {second} needs axes of one length in pairs, got "
            f"axes {left} and {right}"
        )
    rows = [[*range(len(first))], [*range(len(first), len(first) + len(second))]]
    for i, j in zip(left, right, strict=True):
        rows[1][j] = rows[0][i]
    output = [rows[0][i] for i in range(len(first)) if i not in left] + [
        rows[1][j] for j in range(len(second)) if j not in right
    ]
    return _by_letters(rows, output, [a, b], lambda x, y: np.tensordot(x, y, axes=(left, right)))


@implements(np.dot)
def dot(a: Any, b: Any, out: Any = None) -> DTensor:
    """Return the product over the last axis of `a` and the last but one of `b`."""
    a, b = plain(a), plain(b)
    if not shape_of(a) or not shape_of(b):
        made = _scaled(np.dot, a, b)
    elif len(shape_of(a)) <= 2 and len(shape_of(b)) <= 2 and not _has_own_product(a, b):
        refuse_spans([a, b])
        made = matmul(a, b)
    else:
        made = tensordot(a, b, axes=([-1], [-2 if len(shape_of(b)) > 1 else -1]))
    return made if out is None else store(made, out, "no")


@implements(np.inner)
def inner(a: Any, b: Any, /) -> DTensor:
    """Return the sum of products over the last axes."""
    a, b = plain(a), plain(b)
    if not shape_of(a) or not shape_of(b):
        return _scaled(np.inner, a, b)
    return tensordot(a, b, axes=([-1], [-1]))


def _scaled(function: Callable[..., Any], a: Any, b: Any) -> DTensor:
    """Return an array times a number, which counts with the dtype that an array of it has."""
    kind = _kind(function, [a, b], 0)
    operands = [one if isinstance(one, DTensor) else np.asarray(one)[()] for one in (a, b)]
    made: DTensor = call(np.multiply, operands)
    return made if made.dtype == kind else call(np.positive, (made,), dtype=kind)


@implements(np.vdot)
def vdot(a: Any, b: Any, /) -> DTensor:
    """Return the sum of the products of all elements, those of `a` conjugated."""
    a, b = plain(a), plain(b)
    if prod(shape_of(a)) != prod(shape_of(b)):
        raise ShapeError.everywhere(
            f"vdot needs arrays of one size, got shapes {shape_of(a)} and {shape_of(b)}"
        )
    if shape_of(a) != shape_of(b):
        a, b = _flat(a), _flat(b)
    row = [*range(len(shape_of(a)))]
    return _by_letters([row, row], [], [a, b], np.vdot)


@implements_by_name(np.outer)
def outer(a: Any, b: Any) -> DTensor:
    """Return the products of all elements of `a` with all of `b`."""
    made: DTensor = ufunc_rule(np.multiply, "outer", (_flat(plain(a)), _flat(plain(b))), {})
    return made


def _gufunc(
    name: str,
    rows: tuple[tuple[int, ...], tuple[int, ...]],
    output: tuple[int, ...],
) -> None:
    """Register a ufunc that works on the last axes: ``np.vecdot``, ``np.matvec``, ``np.vecmat``.

    Their letters are 0, 1, ...; those of the axes before them follow.
    """
    function = getattr(np, name, None)
    if function is None:  # NumPy before 2.2 lacks some
        return

    @implements(function)
    def do(a: Any, b: Any, /, out: Any = None, **kwargs: Any) -> DTensor:
        if "axis" in kwargs and function.__name__ == "vecdot":
            axis = kwargs.pop("axis")
            kwargs["axes"] = [normal_axis(axis, np.ndim(one)) for one in (a, b)]
        if kwargs.get("axes") is not None:
            return _with_axes(function, a, b, rows, output, out, kwargs)
        kwargs.pop("axes", None)
        operands = [plain(a), plain(b)]
        if any(len(shape_of(one)) < len(row) for one, row in zip(operands, rows, strict=True)):
            raise ShapeError.everywhere(f"np.{name} of shapes {[*map(shape_of, operands)]}")
        extra = [len(shape_of(one)) - len(row) for one, row in zip(operands, rows, strict=True)]
        most = max(extra)
        letters = [
            [*range(3 + most - count, 3 + most), *row]
            for count, row in zip(extra, rows, strict=True)
        ]
        lengths: dict[int, set[int]] = {}
        for one, line in zip(operands, letters, strict=True):
            for letter, length in list(zip(line, shape_of(one), strict=True))[-2:]:
                lengths.setdefault(letter, set()).add(length)
        if any(len(lengths[letter]) > 1 for letter in range(3) if letter in lengths):
            raise ShapeError.everywhere(f"np.{name} of shapes {[*map(shape_of, operands)]}")
        cores = [
            np.ones((1,) * len(row), one.dtype) for one, row in zip(operands, rows, strict=True)
        ]
        kind = np.asarray(function(*cores, **kwargs)).dtype

        def work(left: Any, right: Any) -> Any:
            return function(left, right, **kwargs)

        made = _by_letters(letters, [*range(3, 3 + most), *output], operands, work, kind)
        return made if out is None else store(made, out[0] if isinstance(out, tuple) else out)


_gufunc("vecdot", ((0,), (0,)), ())
_gufunc("matvec", ((0, 1), (1,)), (0,))
_gufunc("vecmat", ((0,), (0, 1)), (1,))


def _with_axes(
    function: np.ufunc,
    a: Any,
    b: Any,
    rows: Sequence[tuple[int, ...]],
    output: tuple[int, ...],
    out: Any,
    kwargs: dict[str, Any],
) -> DTensor:
    """Do a ufunc on other than the last axes: turned, so that these come last, and back.

    Args:
        function: The ufunc.
        a: Its first operand.
        b: Its second one.
        rows: The letters of the axes of each that it works on.
        output: Those of the result.
        out: What the result is written into, or None.
        kwargs: Its options, with `axes`.

    Raises:
        AxisError: If there is no such axis.
        ShapeError: If `axes` has not an entry for each operand.
    """
    options = dict(kwargs)
    axes = options.pop("axes")
    counts = [len(row) for row in (*rows, output)]
    if not isinstance(axes, list):
        raise DTypeError.everywhere(f"axes= of np.{function.__name__} is a list, got {axes!r}")
    if len(axes) not in ((3,) if output else (2, 3)):
        raise ShapeError.everywhere(
            f"axes= of np.{function.__name__} has an entry for each operand: {axes}"
        )
    turned = []
    chosen = [one if isinstance(one, tuple) else (one,) for one in (*axes, ())[:3]]
    for x, which, count in zip((plain(a), plain(b)), chosen, counts, strict=False):
        if len(shape_of(x)) < count or len(which) != count:
            raise MissingAxisError.everywhere(
                f"np.{function.__name__} works on {count} axes of an operand, got {which} of "
                f"shape {shape_of(x)}"
            )
        axes_of(which, len(shape_of(x)), "axes")
        last = tuple(range(-count, 0))
        turn = sure_rule_of(np.moveaxis) if isinstance(x, DTensor) else np.moveaxis
        turned.append(turn(x, which, last) if count else x)
    found = sure_rule_of(function)(*turned, **options)
    if output:
        if len(chosen[2]) != len(output):
            raise ShapeError.everywhere(
                f"the result of np.{function.__name__} has other axes than {chosen[2]}"
            )
        found = sure_rule_of(np.moveaxis)(found, tuple(range(-len(output), 0)), chosen[2])
    made: DTensor = found
    return made if out is None else store(made, out)


def _by_letters(
    rows: Sequence[Sequence[int]],
    output: Sequence[int],
    operands: list[Any],
    function: Callable[..., Any],
    kind: DType | None = None,
) -> DTensor:
    """Contract operands whose axes have letters that are numbers; `function` works on blocks."""
    refuse_spans(operands)
    kind = _kind(np.dot, operands, 1) if kind is None else kind
    op, linear = _reduction(operands, kind)
    shapes = [shape_of(one) for one in operands]
    found = contraction(shapes, rows, output, what="a product", op=op, linear=linear)

    def work(*blocks: Any) -> Any:
        *sources, into = blocks
        into[...] = function(*sources)

    return _contracted(work, operands, found, kind, None)


def _contracted(
    function: Callable[..., Any],
    operands: list[Any],
    found: Contraction,
    kind: DType,
    out: Any,
) -> DTensor:
    """Carry a contraction out; `function` takes the blocks and what it writes the result into."""
    if isinstance(out, tuple):
        (out,) = out
    outs = [] if out is None else [checked_out(out, found.shape)]

    def work(here: Work) -> None:
        function(*here.blocks, here.out[0])

    (made,) = run(
        work, operands, found.pattern, found.shape, [kind], outs=outs, into=True, refuses=False
    )
    return made if out is None else store(made, out)


def _has_own_product(*operands: Any) -> bool:
    """Tell whether np.dot is not np.matmul, as of bfloat16, of which the latter gives float32."""
    return any(getattr(one, "dtype", np.dtype(int)).isbuiltin == 2 for one in operands)


def refuse_spans(operands: Sequence[Any]) -> None:
    """Refuse products of spans of time, which NumPy takes in some functions as integers."""
    if any(getattr(one, "dtype", np.dtype(int)).kind == "m" for one in operands):
        raise NoRuleError.everywhere(
            "sums of products of timedelta64 have no rule for split arrays; take x.astype(int)"
        )


def _kind(function: Callable[..., Any], operands: Sequence[Any], ndim: int) -> DType:
    """Return the dtype that `function` gives, tried on one element of each operand's dtype."""
    ones: list[Any] = [
        np.ones((1,) * ndim, one.dtype) if hasattr(one, "dtype") else one for one in operands
    ]
    kind: DType = np.asarray(function(*ones)).dtype
    return kind


def _reduction(operands: Sequence[Any], kind: DType) -> tuple[str, bool]:
    """Return how parts of a split letter go together, and whether summands stay summands.

    Of truth values a product is "and", and a sum "or".
    """
    if kind.kind == "b":
        return "max", False
    return "sum", bool(linear_for(np.matmul, operands, kind))


def _flat(x: Any) -> Any:
    if len(shape_of(x)) == 1:
        return x
    return sure_rule_of(np.ravel)(x) if isinstance(x, DTensor) else np.ravel(x)
