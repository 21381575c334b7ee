"""Linear algebra of stacks of matrices: what NumPy gives, and where they stay."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mpimesh as mm
from mpimesh.errors import NoRuleError, ShapeError
from tests.helpers.dtensor_check import agree, numbers, placements_of, split
from tests.helpers.rule_fuzz import check

CLOSE = 1e-8
LINALG: Any = np.linalg


def matrices(*stack):
    """Symmetric ones whose eigenvalues are above 0 and apart."""
    x = np.random.default_rng(3).normal(size=(*stack, 3, 3))
    return x @ np.swapaxes(x, -1, -2) + np.diag([1.0, 3.0, 9.0])


def without_signs(function):
    """Of vectors whose sign is free, take the sizes."""
    return lambda x: tuple(np.abs(one) for one in function(x))


OF_ONE: list[Any] = [
    LINALG.inv,
    LINALG.det,
    LINALG.cholesky,
    without_signs(LINALG.eigh),
    LINALG.eigvalsh,
    without_signs(LINALG.eig),
    LINALG.eigvals,
    without_signs(LINALG.svd),
    lambda x: LINALG.svd(x, compute_uv=False),
    LINALG.svdvals,
    without_signs(LINALG.qr),
    lambda x: np.abs(LINALG.qr(x, "r")),
    LINALG.pinv,
    lambda x: tuple(LINALG.slogdet(x)),
    LINALG.matrix_rank,
    lambda x: LINALG.cond(x, "fro"),
    lambda x: LINALG.matrix_power(x, -2),
    LINALG.trace,
    LINALG.matrix_norm,
    lambda x: LINALG.vector_norm(x, axis=(0, -1), keepdims=True),
    lambda x: LINALG.vector_norm(x, ord=1),
    lambda x: LINALG.vecdot(x, x, axis=0),
    lambda x: np.cross(x, x[..., ::-1], axis=0),
    lambda x: np.cross(x, np.arange(3.0), 2, 0, 0),
    lambda x: LINALG.solve(x, np.ones(3)),
    lambda x: LINALG.solve(x, x),
]


@pytest.mark.thin(3)
@pytest.mark.parametrize("dims", ["a=1", "a=2", "a=3", "a=2,b=2"])
def test_stacks(dims):
    x = matrices(3, 4)
    every = [p for p in placements_of(4, dims.count("=")) if p not in ("S2, S3", "S3, S2")]
    step = 5 if "," in dims else 2
    cases: list[Any] = []
    for number, function in enumerate(OF_ONE):
        cases += [(function, [x], [p]) for p in every[number % step :: step]]
    agree(dims, cases, CLOSE)


def test_real_matrices_with_complex_eigenvalues_on_one_rank_only():
    x = np.zeros((4, 2, 2)) + np.diag([1.0, 2.0])
    x[3] = [[0.0, -1.0], [1.0, 0.0]]
    agree("a=4", [(LINALG.eigvals, [x], [p]) for p in ("R", "S0", "S1")])


@pytest.mark.parametrize("dims", ["a=2", "a=2,b=2"])
def test_right_hand_sides_of_one_matrix_are_split(dims):
    a, b = matrices(), numbers((3, 7), float)
    first = "R" if "," not in dims else "R, R"
    second = "S1" if "," not in dims else "S1, S1"
    agree(dims, [(LINALG.solve, [a, b], [first, second])], CLOSE)

    def main():
        with mm.DeviceMesh(dims) as mesh:
            before = mesh.traffic().snapshot()
            x, y = mm.distribute(a, mesh, first), mm.distribute(b, mesh, second)
            found: Any = np.linalg.solve(x, y)
            assert found.placement == y.placement
            assert (mesh.traffic() - before).received_bytes < 2048  # to agree that none is singular

    mm.run_virtual(2 ** dims.count("="), main)


def test_products_of_chains():
    a, b, c = numbers((4, 5), float), numbers((5, 2), float), numbers((2, 6), float)
    row, column = numbers((4,), float), numbers((6,), float)
    cases: list[Any] = []

    def chain(*x: Any) -> Any:
        return LINALG.multi_dot(x)

    for p in ("R", "S0", "S1", "P"):
        cases += [(chain, [a, b, c], [p, q, p]) for q in ("R", "S0", "S1")]
        cases.append((chain, [row, a, b, c, column], ["S0", p, p, p, "R"]))
    cases.append((lambda x, y: LINALG.matmul(x, y), [a, b], ["S0", "R"]))
    cases.append((lambda x, y: LINALG.outer(x, y), [row, column], ["S0", "R"]))
    cases.append((lambda x, y: LINALG.tensordot(x, y, axes=1), [a, b], ["S1", "S0"]))
    agree("a=3", cases, CLOSE)


def test_matrices_that_are_split_within():
    """They are refused by name, and gathered where that is allowed."""
    a = matrices()

    def main():
        with mm.DeviceMesh("a=2") as mesh:
            for x in (split(a, mesh, "S0"), split(a, mesh, "S1")):
                for function in (LINALG.inv, LINALG.eigvals, LINALG.qr):
                    with pytest.raises(NoRuleError, match=rf"linalg\.{function.__name__}\b"):
                        function(x)
                with pytest.raises(NoRuleError, match="solve"):
                    LINALG.solve(x, np.ones(3))
                with mm.allow_gather():
                    found = LINALG.slogdet(x)
                    inverse, solved = LINALG.inv(x), LINALG.solve(x, np.eye(3))
                    LINALG.eigvals(x)
                np.testing.assert_allclose(float(found.logabsdet), LINALG.slogdet(a)[1])
                np.testing.assert_allclose(solved.full(), inverse.full(), atol=CLOSE)

    mm.run_virtual(2, main)


def test_a_singular_matrix_on_one_rank_is_told_to_all():
    x = matrices(4)
    x[2] = 0.0

    def main():
        with mm.DeviceMesh("a=4") as mesh:
            y = mm.distribute(x, mesh, "S0")
            for function in (LINALG.inv, LINALG.cholesky, lambda z: LINALG.solve(z, z)):
                with pytest.raises(np.linalg.LinAlgError, match=r"[Ss]ingular|positive"):
                    function(y)
            assert float(y.sum()) == pytest.approx(x.sum())  # all are in step

    mm.run_virtual(4, main)


def test_what_are_no_matrices():
    def main():
        with mm.DeviceMesh("a=2") as mesh:
            x = mm.zeros((4, 3, 2), mesh, "S0")
            for function in (LINALG.inv, LINALG.det, LINALG.eig, LINALG.cholesky):
                with pytest.raises(np.linalg.LinAlgError):
                    function(x)
            with pytest.raises(np.linalg.LinAlgError):
                LINALG.qr(x.ravel())
            with pytest.raises(ShapeError):
                LINALG.outer(x, x)
            with pytest.raises(ShapeError):
                LINALG.multi_dot([x])
            with pytest.raises(ShapeError):
                LINALG.cross(x, x)

    mm.run_virtual(2, main)


@pytest.mark.parametrize(
    "text",
    [
        "np.linalg.pinv(x0, rtol=x1)",
        "np.linalg.pinv(x0, x1)",
        "np.linalg.pinv(x0, rcond=x1)",
        "np.linalg.matrix_rank(x0, tol=x1)",
        "np.linalg.matrix_rank(x0, x1)",
        "np.linalg.matrix_rank(x0, rtol=x1)",
        "np.linalg.matrix_rank(x0, tol=x1, rtol=x1)",
        "np.linalg.matrix_rank(x0[0, 0])",
    ],
)
@pytest.mark.parametrize("place", ["S0", "S0(1,0,4)", "R", "P"])
@pytest.mark.parametrize("limits", [(5,), ()])
def test_a_tolerance_for_each_matrix(text, place, limits):
    """Each rank takes those of its matrices."""
    rows = [(place, (5, 2, 3), "float64", 1), ("R", limits, "float64", 4, "positive")]
    check("a=3", text, rows, exact=False)
