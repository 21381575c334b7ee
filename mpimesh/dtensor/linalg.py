"""Linear algebra of split arrays: traces, norms, stacks of matrices, functions of whole lines.

Each matrix or line is brought whole to a rank; the stack of them is split. A tall matrix that is
split by rows is factorised by the triangles of its blocks (TSQR: Demmel, Grigori, Hoemmen and
Langou, "Communication-optimal parallel and sequential QR and LU factorizations", SIAM J. Sci.
Comput. 34, 2012).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np
from numpy.linalg import LinAlgError

from mpimesh.dtensor.consistency import raise_together
from mpimesh.dtensor.contract import dot, matmul, outer, refuse_spans, tensordot
from mpimesh.dtensor.dispatch import implements, may_gather, name_of, sure_rule_of
from mpimesh.dtensor.dtensor import DTensor, are_whole, gathered, whole_of
from mpimesh.dtensor.elementwise import call
from mpimesh.dtensor.methods import reduced
from mpimesh.dtensor.reduce import reduce, reduce_blocks
from mpimesh.dtensor.reshape import expand_dims, moveaxis, reshape, row_along, squeeze
from mpimesh.dtensor.run import (
    Work,
    are_in_reach,
    as_tensor,
    as_tensors,
    axes_of,
    implements_by_name,
    on_stacks,
    reduced_anywhere,
)
from mpimesh.errors import NoRuleError, ShapeError
from mpimesh.layout import Layout, Placement, Shard
from mpimesh.runtime.operands import normal_axis

__all__: list[str] = []


@implements_by_name(np.trace)
def trace(
    a: DTensor, offset: int = 0, axis1: int = 0, axis2: int = 1, dtype: Any = None
) -> DTensor:
    """Return the sum along a diagonal: each block's part of it is a diagonal of the block."""
    row, column = axes_of((axis1, axis2), a.ndim)
    kind = np.trace(np.ones((1,) * a.ndim, a.dtype), dtype=dtype).dtype if a.ndim > 1 else a.dtype

    def work(here: Work) -> Any:
        (block,), (box,) = here.blocks, here.boxes
        here_offset = offset + box[row][0] - box[column][0]
        return np.trace(block, here_offset, row, column, dtype=dtype)

    axes, op = tuple(sorted((row, column))), "sum" if kind.kind in "iufc" else ""
    return reduce_blocks(work, [reduced_anywhere(a)], axes, op, kind, refuses=False)


@implements(np.linalg.norm)
def norm(x: DTensor, ord: Any = None, axis: Any = None, keepdims: bool = False) -> DTensor:  # noqa: A002
    """Return the norm of vectors or matrices, as :func:`numpy.linalg.norm`.

    The spectral and the nuclear norm bring the two axes whole.

    Raises:
        ShapeError: If there is no such norm of so many axes.
    """
    axes = tuple(range(x.ndim)) if axis is None else axes_of(axis, x.ndim, lists=False)
    if axis is not None and len(axes) not in (1, 2):
        raise ShapeError.everywhere(f"a norm is over one axis or two, got {axis}")
    if x.dtype.kind not in "fc":
        x = x.astype(np.float64)
    if ord is None or (ord in ("f", "fro") and len(axes) == 2) or (ord == 2 and len(axes) == 1):
        return _root_of_squares(x, axes, keepdims)
    if len(axes) == 1 and not isinstance(ord, str):
        return _vector_norm(x, ord, axes, keepdims)
    if len(axes) == 2 and ord in (1, -1, np.inf, -np.inf):
        summed = axes[0] if abs(ord) == 1 else axes[1]
        kept = axes[1] if abs(ord) == 1 else axes[0]
        sums = reduce(np.add, call(np.absolute, (x,)), summed, keepdims=True)
        best = _best(sums, ord, (kept,), keepdims=True)
        return best if keepdims else reduce(np.add, best, axes)
    if len(axes) == 2 and ord in (2, -2, "nuc"):
        kind = np.linalg.norm(np.ones((1, 1), x.dtype), ord).dtype

        def work(here: Work) -> Any:
            return np.linalg.norm(here.blocks[0], ord, axes, keepdims)

        return reduce_blocks(work, [x], tuple(sorted(axes)), "", kind, keepdims=keepdims)
    raise ShapeError.everywhere(f"there is no norm of order {ord!r} over axes {axes}")


def _root_of_squares(x: DTensor, axes: tuple[int, ...], keepdims: bool) -> DTensor:
    made: DTensor = call(np.sqrt, (_squares(x, axes, keepdims),))
    return made


def _squares(x: DTensor, axes: tuple[int, ...], keepdims: bool = False) -> DTensor:
    """Return the sums of the squared sizes of elements along `axes`."""

    def work(here: Work) -> None:
        block = here.blocks[0]
        squares = block * block if block.dtype.kind != "c" else block.real**2 + block.imag**2
        np.add.reduce(squares, axis=axes, keepdims=keepdims, out=here.out[0])

    kind = np.zeros((), x.dtype).real.dtype
    axes = tuple(sorted(axes))
    return reduce_blocks(work, [x], axes, "sum", kind, keepdims=keepdims, into=True, refuses=False)


def _best(x: DTensor, order: float, axes: tuple[int, ...], *, keepdims: bool) -> DTensor:
    """Return the largest values, of none 0, or if the order is below 0 the smallest ones."""
    if order > 0:
        return reduce(np.maximum, x, axes, keepdims=keepdims, initial=0)
    return reduce(np.minimum, x, axes, keepdims=keepdims)


def _vector_norm(x: DTensor, order: float, axes: tuple[int, ...], keepdims: bool) -> DTensor:
    if order == 0:
        made = reduce(np.add, call(np.not_equal, (x, 0)), axes, np.float64, keepdims=keepdims)
        kind = np.zeros((), x.dtype).real.dtype
        return (
            made if made.dtype == kind else call(np.positive, (made,), dtype=kind, casting="unsafe")
        )
    size = call(np.absolute, (x,))
    if np.isinf(order):
        return _best(size, order, axes, keepdims=keepdims)
    if order == 1:
        return reduce(np.add, size, axes, keepdims=keepdims)
    total = reduce(np.add, call(np.power, (size, order)), axes, keepdims=keepdims)
    root: DTensor = call(np.power, (total, 1.0 / order))
    return root


def _stacked(
    function: Callable[..., Any],
    operands: Sequence[Any],
    cores: Sequence[str],
    args: Sequence[Any],
    options: dict[str, Any],
    *,
    free: str = "",
    out: str = "",
) -> list[DTensor] | None:
    """Do a function of matrices; None if it has to be done on whole arrays, and may be.

    Raises:
        NoRuleError: If a matrix itself is split, there are fewer of them than ranks, and gathering
            is not allowed.
        LinAlgError: On every rank, if NumPy raises it on one.
    """
    name = name_of(function)
    for x, core in zip(operands, cores, strict=True):
        if x.ndim < len(core):
            raise LinAlgError(f"{name} takes matrices, got shape {x.shape}")
        # Where no column is split, each rank may have its own columns.
        split = {spec.axis for spec in x.placement if isinstance(spec, Shard)}
        whole = free and free in core and x.ndim - 2 not in split
        if whole or are_in_reach(x, len(core)):
            continue
        if may_gather():
            return None
        advice = "split an axis before the last two, or call it" if x.ndim > 2 else "call it"
        raise NoRuleError(
            f"{name} works on whole matrices, and has no rule for {x!r}, which is split within "
            f"them; {advice} within `with mm.allow_gather():`, where every rank gets the whole "
            "arrays"
        )
    work = _with_options(function, args, options)
    return on_stacks(work, operands, cores, free=free, out=out)


def _with_options(
    function: Callable[..., Any], args: Sequence[Any], options: dict[str, Any]
) -> Callable[..., Any]:
    args = [_plain(one) for one in args]
    options = {key: _plain(one) for key, one in options.items()}
    return lambda *blocks: function(*blocks, *args, **options)


def _plain(x: Any) -> Any:
    return whole_of(x) if isinstance(x, DTensor) else x


# -- one matrix ------------------------------------------------------------------------------


def _of_matrices(function: Callable[..., Any], a: DTensor, *args: Any, **options: Any) -> Any:
    found = _stacked(function, [a], ["mn"], args, options)
    if found is None:
        return gathered(function, (a, *args), options)
    if len(found) == 1:
        return found[0]
    kind = type(_with_options(function, args, options)(np.empty((0, *a.shape[-2:]), a.dtype)))
    return kind(*found) if hasattr(kind, "_fields") else tuple(found)


for _name in (
    "cholesky",
    "cond",
    "det",
    "eigh",
    "eigvalsh",
    "inv",
    "matrix_power",
    "slogdet",
):
    _function = getattr(np.linalg, _name)
    implements(_function)(partial(_of_matrices, _function))


def _by_tolerance(
    function: Callable[..., Any], a: Any, limits: dict[str, Any], **options: Any
) -> Any:
    """Do a function that takes a tolerance: one for all matrices, or each."""
    limits = {key: one for key, one in limits.items() if one is not None}
    x, *rows = as_tensors([a, *limits.values()])
    if x.ndim < 2 and function is np.linalg.matrix_rank:
        return np.any(np.not_equal(x, 0)).astype(int)

    def work(block: Any, *blocks: Any) -> Any:
        return function(block, **dict(zip(limits, blocks, strict=True)), **options)

    cores = ["mn", *[""] * len(rows)]
    found = _stacked(work_named(work, function), [x, *rows], cores, (), {})
    return gathered(function, (x,), limits | options) if found is None else found[0]


@implements(np.linalg.matrix_rank)
def matrix_rank(A: Any, tol: Any = None, hermitian: bool = False, *, rtol: Any = None) -> Any:
    """Return the ranks of matrices."""
    return _by_tolerance(np.linalg.matrix_rank, A, {"tol": tol, "rtol": rtol}, hermitian=hermitian)


def _eigen(function: Callable[..., Any]) -> None:
    """Register a function whose results are complex if any of them is, on any rank."""

    @implements(function)
    def do(a: Any) -> Any:
        def work(block: Any) -> Any:
            found = function(block)
            rows = found if isinstance(found, tuple) else (found,)
            return tuple(one.astype(np.result_type(one.dtype, np.complex64)) for one in rows)

        found = _stacked(work_named(work, function), [a], ["mm"], (), {})
        if found is None:
            return gathered(function, (a,), {})
        if a.dtype.kind != "c" and not bool(np.any(np.not_equal(np.imag(found[0]), 0))):
            found = [sure_rule_of(np.real)(one) for one in found]
        return found[0] if len(found) == 1 else _EigResult(*found)


_EigResult: Any = type(np.linalg.eig(np.eye(1)))


def work_named(work: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `work` with the name that `function` has, for messages."""
    work.__name__, work.__module__ = function.__name__, function.__module__
    return work


_eigen(np.linalg.eig)
_eigen(np.linalg.eigvals)


# -- a tall matrix whose rows are split ----------------------------------------------------------


@implements(np.linalg.qr)
def qr(a: DTensor, mode: str = "reduced") -> Any:
    """Return the QR factorisation of matrices: Q laid out as `a`, R on all ranks.

    One matrix whose rows are split must be tall: each rank factorises its block, gathers the
    triangles of all blocks, and factorises these (TSQR). Collective then.

    Args:
        a: A tall matrix, or a stack of matrices that are whole.
        mode: As NumPy's; of a tall split matrix "reduced" or "r".

    Raises:
        NoRuleError: If a matrix is split in another way, or `mode` is another.

    Cost:
        Every rank gets min(rows, n) rows of n elements of each block with n columns.
    """
    problem = "" if mode in ("reduced", "r") else "of mode 'reduced' or 'r' alone: Q is as tall"
    if not _is_split_and_tall(np.linalg.qr, a, problem):
        return _of_matrices(np.linalg.qr, a, mode)
    return _of_blocks(np.linalg.qr, a, with_rows=mode == "reduced", mode=mode)


@implements(np.linalg.svd)
def svd(
    a: DTensor, full_matrices: bool = True, compute_uv: bool = True, hermitian: bool = False
) -> Any:
    """Return the singular values of matrices, and the vectors: U laid out as `a`, V on all ranks.

    A tall matrix whose rows are split is decomposed as in :func:`qr`, with its errors and cost;
    only with ``full_matrices=False``, or without U and V.
    """
    options = {"full_matrices": full_matrices, "compute_uv": compute_uv}
    problem = "with full_matrices=False alone" if full_matrices and compute_uv else ""
    if not _is_split_and_tall(np.linalg.svd, a, problem):
        return _of_matrices(np.linalg.svd, a, hermitian=hermitian, **options)
    if hermitian and a.shape[0] != a.shape[1]:
        raise LinAlgError(f"a hermitian matrix is square, got shape {a.shape}")
    return _of_blocks(np.linalg.svd, a, with_rows=compute_uv, **options)


@implements(np.linalg.svdvals)
def svdvals(x: DTensor, /) -> Any:
    """Return the singular values of matrices; of a tall split one as :func:`svd`."""
    if not _is_split_and_tall(np.linalg.svdvals, x):
        return _of_matrices(np.linalg.svdvals, x)
    return _of_blocks(np.linalg.svdvals, x, with_rows=False)


def _is_split_and_tall(function: Callable[..., Any], x: DTensor, problem: str = "") -> bool:
    """Tell whether `x` is one matrix for :func:`_of_blocks`; False for what is whole or gathered.

    Raises:
        NoRuleError: If it is one split matrix, but wide, or its columns are split, or there is
            another `problem`, and gathering is not allowed.
    """
    if x.ndim != 2 or are_in_reach(x, 2):
        return False
    rows = ["S0" if isinstance(spec, Shard) else str(spec) for spec in x.placement]
    by_rows = f"x.redistribute({Placement(rows).named(x.layout.mesh.dim_names)!r})"
    if x.shape[0] < x.shape[1]:
        problem = "of tall ones, and this one is wide: decompose its transpose, by rows"
        problem += f", {by_rows.replace('x.', 'x.T.', 1)}"
    elif any(isinstance(spec, Shard) and spec.axis == 1 for spec in x.placement):
        problem = f"split by rows, and the columns of this one are split: take {by_rows}"
    if problem and not may_gather():
        raise NoRuleError.everywhere(
            f"{name_of(function)} works on split matrices {problem}; got {x!r}. Or call it "
            "within `with mm.allow_gather():`, where every rank gets the whole matrix"
        )
    return not problem


def _of_blocks(function: Callable[..., Any], x: DTensor, *, with_rows: bool, **options: Any) -> Any:
    """Do `function` of a tall matrix by the triangles of its blocks. Collective.

    With blocks A_i = Q_i R_i, and the R_i below each other = U B, the matrix is the Q_i U_i below
    each other times B: all but U is the same for the matrix and for the R_i.

    Args:
        function: NumPy's.
        x: The matrix.
        with_rows: Whether the first result is U, as tall as the matrix.
        options: Those of `function`.
    """
    x, columns = reduced(x), x.shape[1]
    heights = np.diff(x.layout.tiling(x.shape).bounds[0])
    specs = [Shard(0) if isinstance(spec, Shard) else spec for spec in x.placement]
    padded = Layout(x.layout.mesh, specs)  # all triangles with as many rows
    shape = (len(heights) * columns, columns)
    block, triangles = None, np.eye(columns, dtype=x.dtype)  # on ranks that the mesh leaves out
    if x.is_member:
        left, triangle = np.linalg.qr(x.local)
        own = x.mesh.shared_empty((columns, columns), triangle.dtype)
        own[: len(triangle)], own[len(triangle) :] = triangle, 0
        every = DTensor(x.mesh, padded, shape, own.dtype, own).full()
        used = (np.arange(columns) < heights[:, None]).reshape(-1)
        triangles = every[used]
    with raise_together(x.mesh, name_of(function), needed=x.is_member):
        made = function(triangles, **options)
    results = list(made) if isinstance(made, tuple) else [made]
    if x.is_member and with_rows:
        first = int(used[: padded.box(shape, x.mesh.rank)[0][0]].sum())
        upper = results[0][first : first + len(triangle)]
        block = x.mesh.shared_empty(x.local.shape, upper.dtype)
        np.matmul(left, upper, out=block)
    alike = Layout.replicated(x.layout.mesh)
    found = [
        DTensor(x.mesh, x.layout, x.shape, one.dtype, block)
        if with_rows and one is results[0]
        else DTensor(x.mesh, alike, one.shape, one.dtype, one if x.is_member else None)
        for one in results
    ]
    return type(made)(*found) if isinstance(made, tuple) else found[0]


@implements(np.linalg.pinv)
def pinv(a: Any, rcond: Any = None, hermitian: bool = False, *, rtol: Any = np._NoValue) -> Any:
    """Return the pseudoinverses of matrices; of a tall split one as :func:`svd`, at its cost.

    Its columns are split as the rows of `a`.

    Raises:
        ShapeError: If `rcond` and `rtol` are both there.
    """
    if rcond is not None and rtol is not np._NoValue:
        raise ShapeError.everywhere("numpy.linalg.pinv takes rcond= or rtol=, not both")
    limit = 1e-15 if rcond is None and rtol is np._NoValue else rtol if rcond is None else rcond
    x = as_tensors([a, limit] if isinstance(limit, DTensor) else [a])[0]
    if limit is None:
        limit = max(x.shape[-2:]) * np.finfo(x.dtype).eps
    if not _is_split_and_tall(np.linalg.pinv, x):
        return _by_tolerance(np.linalg.pinv, x, {"rcond": limit}, hermitian=hermitian)
    probe = np.ones(np.minimum(x.shape, 1), x.dtype)
    columns, rows, _, _ = _inverted(x, limit, hermitian)
    return matmul(columns, rows).astype(np.linalg.pinv(probe).dtype, copy=False)


@implements(np.linalg.lstsq)
def lstsq(a: Any, b: Any, rcond: Any = None) -> tuple[DTensor, DTensor, np.int32, DTensor]:
    """Solve least squares, of a tall matrix whose rows are split as :func:`svd`. Collective.

    Args:
        a: A tall matrix whose rows are split, or any that is whole.
        b: A right-hand side, or one in each column.
        rcond: Singular values up to `rcond` times the largest one count as 0.

    Returns:
        The solutions, the sums of the squared residuals, the rank, and the singular values.

    Raises:
        NoRuleError: If `a` is split in another way, and gathering is not allowed.
        LinAlgError: If `a` is no matrix, or `b` has not as many rows.

    Cost:
        That of :func:`svd`, and an all-reduce of the solutions and of the sums.
    """
    x, y = as_tensors([a, b])
    if x.ndim != 2 or y.ndim not in (1, 2) or x.shape[0] != y.shape[0]:
        raise LinAlgError(
            "numpy.linalg.lstsq takes a matrix and right-hand sides of as many rows, got shapes "
            f"{x.shape} and {y.shape}"
        )
    if not are_whole(x) and not _is_split_and_tall(np.linalg.lstsq, x):
        found: tuple[DTensor, DTensor, np.int32, DTensor] = gathered(
            np.linalg.lstsq, (x, y, rcond), {}
        )
        return found
    known = np.linalg.lstsq(np.ones((1, 1), x.dtype), np.ones(1, y.dtype))  # refuses some dtypes
    kind, real = known[0].dtype, known[3].dtype
    eps = np.finfo(float).eps
    limit = max(x.shape) * eps if rcond is None else float(rcond)
    # LAPACK takes the precision for a limit that says nothing.
    columns, rows, s, used = _inverted(x, limit if 0 < limit < 1 else eps / 2)
    sides = expand_dims(y, 1) if y.ndim == 1 else y
    solution = reduced(matmul(columns, matmul(rows, sides)))
    rank = type(known[2])(int(np.count_nonzero(used)))
    if rank == x.shape[1] < x.shape[0]:
        squares = reduced(_squares(call(np.subtract, (sides, matmul(x, solution))), (0,)))
    else:
        squares = as_tensor(np.empty(0), x.mesh)
    solution = squeeze(solution, -1) if y.ndim == 1 else solution
    return solution.astype(kind), squares.astype(real), rank, s.astype(real)


def _inverted(
    x: DTensor, limit: Any, hermitian: bool = False
) -> tuple[DTensor, DTensor, DTensor, DTensor]:
    """Return two factors of the pseudoinverse, the singular values, and which of them count.

    As NumPy does, in double precision: of matrices of single precision, too.
    """
    exact = x.astype(np.result_type(x.dtype, float), copy=False)
    u, s, vh = svd(exact, full_matrices=False, hermitian=hermitian)
    used = s > limit * s[:1]
    weights = np.where(used, 1 / np.where(used, s, 1), 0)
    return np.conj(vh.T) * weights, np.conj(u.T), s, used


# -- two ---------------------------------------------------------------------------------------


@implements(np.linalg.solve)
def solve(a: Any, b: Any) -> Any:
    """Solve systems of equations: of a stack each rank its own, and its own right-hand sides.

    Raises:
        NoRuleError: If the rows of a matrix are split, and there is no stack to split instead.
        LinAlgError: On every rank, if a matrix is singular.
    """
    x, y = as_tensors([a, b])
    columns = expand_dims(y, 1) if y.ndim == 1 else y  # a row of numbers is one right-hand side
    found = _stacked(np.linalg.solve, [x, columns], ["mn", "mk"], (), {}, free="k", out="nk")
    if found is None:
        return gathered(np.linalg.solve, (x, y), {})
    return squeeze(found[0], -1) if y.ndim == 1 else found[0]


@implements(np.cross)
def cross(
    a: Any, b: Any, axisa: int = -1, axisb: int = -1, axisc: int = -1, axis: Any = None
) -> DTensor:
    """Return the cross products of vectors. Collective, if the vectors themselves are split."""
    x, y = as_tensors([a, b])
    if axis is not None:
        axisa = axisb = axisc = axis
    x = moveaxis(x, normal_axis(axisa, x.ndim, "axisa"), -1)
    y = moveaxis(y, normal_axis(axisb, y.ndim, "axisb"), -1)
    (found,) = on_stacks(np.cross, [x, y], ["u", "v"], refuses=False)
    if 3 not in (x.shape[-1], y.shape[-1]):
        return found
    return moveaxis(found, -1, normal_axis(axisc, found.ndim, "axisc"))


# -- the same functions by other names ---------------------------------------------------------


implements(np.linalg.matmul)(matmul)
implements(np.linalg.tensordot)(tensordot)


@implements(np.linalg.outer)
def vector_outer(x1: Any, x2: Any, /) -> DTensor:
    """Return the products of all elements of one vector with all of the other."""
    shapes = [np.shape(one) if np.isscalar(one) else one.shape for one in (x1, x2)]
    if any(len(shape) != 1 for shape in shapes):
        raise ShapeError.everywhere(f"np.linalg.outer takes vectors, got shapes {shapes}")
    return outer(x1, x2)


@implements(np.linalg.cross)
def vector_cross(x1: Any, x2: Any, /, *, axis: int = -1) -> DTensor:
    """Return the cross products of vectors of three elements."""
    if {x1.shape[axis], x2.shape[axis]} != {3}:
        raise ShapeError.everywhere(
            f"np.linalg.cross takes vectors of 3, got {x1.shape} and {x2.shape}"
        )
    return cross(x1, x2, axis=axis)


@implements(np.linalg.trace)
def matrix_trace(x: Any, /, *, offset: int = 0, dtype: Any = None) -> DTensor:
    """Return the sums along the diagonals of the last two axes."""
    return trace(x, offset, -2, -1, dtype)


@implements(np.linalg.vecdot)
def vecdot(x1: Any, x2: Any, /, *, axis: int = -1) -> DTensor:
    """Return the products of vectors along an axis."""
    x, y = (moveaxis(one, normal_axis(axis, one.ndim), -1) for one in as_tensors([x1, x2]))
    found: DTensor = sure_rule_of(np.vecdot)(x, y)
    return found


@implements(np.linalg.matrix_norm)
def matrix_norm(x: Any, /, *, keepdims: bool = False, ord: Any = "fro") -> DTensor:  # noqa: A002
    """Return the norms of matrices."""
    return norm(x, ord, (-2, -1), keepdims)


@implements(np.linalg.vector_norm)
def vector_norm(x: Any, /, *, axis: Any = None, keepdims: bool = False, ord: Any = 2) -> DTensor:  # noqa: A002
    """Return the norms of vectors: of all elements, or along one axis or several."""
    axes = tuple(range(x.ndim)) if axis is None else axes_of(axis, x.ndim, lists=False)
    rest = [one for one in range(x.ndim) if one not in axes]
    turned = moveaxis(x, axes, range(x.ndim - len(axes), x.ndim))
    length = prod(x.shape[one] for one in axes)
    row = reshape(turned, (*(x.shape[one] for one in rest), length))
    found = norm(row, ord, -1)
    if not keepdims:
        return found
    return reshape(found, [1 if one in axes else x.shape[one] for one in range(x.ndim)])


@implements_by_name(np.linalg.multi_dot)
def multi_dot(arrays: Any) -> DTensor:
    """Return the product of a chain of matrices, in the order that takes the fewest steps.

    Raises:
        ShapeError: If there is one alone, or their lengths do not fit.
        LinAlgError: If one of three or more is no matrix; the first and the last may be vectors.
    """
    chain: list[Any] = as_tensors(arrays)
    refuse_spans(chain)
    if len(chain) < 2:
        raise ShapeError.everywhere(f"np.linalg.multi_dot takes 2 arrays or more, got {chain}")
    if len(chain) == 2:  # of any shapes, as NumPy has it
        return dot(*chain)
    shapes = [one.shape for one in chain]
    if {len(shapes[0]), len(shapes[-1])} - {1, 2} or {*map(len, shapes[1:-1])} != {2}:
        raise LinAlgError(
            "np.linalg.multi_dot takes matrices, of which the first and the last may be vectors, "
            f"got shapes {shapes}"
        )
    if any(one[-1] != other[0] for one, other in pairwise(shapes)):
        raise ShapeError.everywhere(f"a product of shapes {shapes} needs axes of one length")
    sizes = [one[0] for one in shapes] + [shapes[-1][-1]]
    if len(shapes[0]) == 1:
        sizes[0] = 1
    if len(shapes[-1]) == 1:
        sizes[-1] = 1
    best: dict[tuple[int, int], tuple[int, int]] = {}
    for first in reversed(range(len(chain))):
        best[first, first] = (0, first)
        for last in range(first + 1, len(chain)):
            best[first, last] = min(
                (
                    best[first, k][0]
                    + best[k + 1, last][0]
                    + sizes[first] * sizes[k + 1] * sizes[last + 1],
                    k,
                )
                for k in range(first, last)
            )

    def product(first: int, last: int) -> Any:
        if first == last:
            return chain[first]
        k = best[first, last][1]
        return matmul(product(first, k), product(k + 1, last))

    found: DTensor = product(0, len(chain) - 1)
    return found


@implements(np.lexsort)
def lexsort(keys: Any, axis: int = -1) -> DTensor:
    """Return the indices that sort lines by several keys, of which the last one counts first."""
    rows = as_tensors(sure_rule_of(np.unstack)(keys) if isinstance(keys, DTensor) else keys)
    if rows[0].ndim == 0 or len({one.shape for one in rows}) > 1:
        raise ShapeError.everywhere(
            f"np.lexsort takes keys of one shape, got {[one.shape for one in rows]}"
        )
    which = normal_axis(axis, rows[0].ndim)
    turned = [moveaxis(one, which, -1) for one in rows]
    (found,) = on_stacks(
        lambda *blocks: np.lexsort(blocks, -1), turned, ["n"] * len(rows), refuses=False
    )
    return moveaxis(found, -1, which)


def _bits(function: Callable[..., Any]) -> None:
    @implements(function)
    def do(a: Any, /, axis: Any = None, **options: Any) -> DTensor:
        x, which = row_along(a, axis)
        turned = moveaxis(x, which, -1)
        (found,) = on_stacks(
            lambda one: function(one, -1, **options), [turned], ["n"], refuses=False
        )
        return moveaxis(found, -1, which)


_bits(np.packbits)
_bits(np.unpackbits)


def _nan_argument(function: Callable[..., Any], plainly: Callable[..., Any], worst: float) -> None:
    """Register a search that passes NaN over.

    It raises a `ValueError` on every rank if a line has nothing else.
    """

    @implements_by_name(function)
    def do(a: DTensor, axis: Any = None, *, keepdims: bool = False) -> Any:
        x: Any = reduced_anywhere(a)
        if x.dtype.kind in "fc":
            gone = np.isnan(x)
            if bool(np.any(np.all(gone, axis=axis))):
                raise ShapeError.everywhere(f"np.{function.__name__} of a line of nothing but NaN")
            x = sure_rule_of(np.where)(gone, x.dtype.type(worst), x)
        return plainly(x, axis, keepdims=keepdims)


_nan_argument(np.nanargmin, np.argmin, np.inf)
_nan_argument(np.nanargmax, np.argmax, -np.inf)
