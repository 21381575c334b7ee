"""Linear algebra of stacks of matrices: what NumPy gives, and where they stay."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import mpimesh as mm
from mpimesh.arguments import digest_text
from mpimesh.dtensor.consistency import gather_facts
from mpimesh.errors import AxisError, NoRuleError, ShapeError
from tests.helpers.depth import deep, examples
from tests.helpers.dtensor_check import agree, layouts, numbers, on, placements_of, split
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


@pytest.mark.parametrize("dims", [*deep("a=1", "a=2"), "a=3", "a=2,b=2"])
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
                for function in (LINALG.inv, LINALG.eigvals):
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


def rough(shape, dtype, seed=0):
    """Normal numbers, or whole ones; complex ones in both parts."""
    x = 4 * np.random.default_rng(seed).normal(size=(2, *shape))
    return (x[0] + 1j * x[1] if np.dtype(dtype).kind == "c" else x[0]).astype(dtype)


def check_factors(mesh, a, x):
    """See that the factors of a tall split matrix are factors of it, and laid out as promised."""
    kind = np.linalg.qr(a[:0])[1].dtype
    close = 200 * np.finfo(kind).eps * (1 + np.abs(a).max(initial=0.0)) * (1 + sum(a.shape))
    eye = np.eye(a.shape[1])
    q, r = LINALG.qr(x)
    u, s, vh = LINALG.svd(x, full_matrices=False)
    for tall in (q, u):
        assert tall.placement == x.redistribute(q.placement).placement
        assert tall.dtype == kind
        np.testing.assert_allclose(tall.full().conj().T @ tall.full(), eye, atol=close)
    for small in (r, s, vh, LINALG.qr(x, mode="r"), LINALG.svd(x, compute_uv=False)):
        assert small.layout.is_replicated
        assert len(set(gather_facts(mesh, "bits", digest_text(small.local.tobytes())))) == 1
    np.testing.assert_array_equal(r.local, np.triu(r.local))
    np.testing.assert_allclose(q.full() @ r.local, a, atol=close)
    np.testing.assert_allclose((u.full() * s.local) @ vh.local, a, atol=close)
    expected = np.linalg.svd(a, compute_uv=False)
    for values in (s, LINALG.svd(x, compute_uv=False), LINALG.svdvals(x)):
        assert values.dtype == expected.dtype
        np.testing.assert_allclose(values.local, expected, atol=close)


@settings(max_examples=examples(12))
@given(st.data())
def test_tall_matrices_whose_rows_are_split(data):
    """Also blocks of fewer rows than columns, or none, and no columns."""
    columns = data.draw(st.integers(0, 4))
    shape = (columns + data.draw(st.integers(0, 12)), columns)
    ranks = data.draw(st.sampled_from((2, 3, 4)))
    place = data.draw(layouts(shape, ranks).filter(lambda text: text[1:2] != "1"))
    a = rough(shape, data.draw(st.sampled_from(("f4", "f8", "c8", "c16", "i4"))), columns)
    a[:, : data.draw(st.sampled_from((0, 0, 1, 2)))] = data.draw(st.sampled_from((0, 1)))
    on(f"a={ranks}", lambda mesh: check_factors(mesh, a, split(a, mesh, place)))


@pytest.mark.parametrize("place", ["S0, S0", "S0, R", "P, S0", "R, S0", "S0(5,2), R"])
def test_tall_matrices_on_several_dims(place):
    a = rough((7, 3), float)
    on("a=2,b=2", lambda mesh: check_factors(mesh, a, split(a, mesh, place)))


def test_tall_matrices_move_their_triangles_alone():
    def main(mesh):
        x = mm.from_callback((4000, 4), mesh, "S0", lambda index: np.ones((1000, 4)))
        before = mesh.traffic().snapshot()
        LINALG.qr(x)
        assert (mesh.traffic() - before).received_bytes < 3 * 4 * 4 * 8 + 1024

    on("a=4", main)


def test_the_cures_of_matrices_that_are_not_tall_by_rows():
    tall, wide = rough((6, 2), float), rough((2, 6), float)

    def main(mesh):
        for function in (LINALG.qr, lambda x: LINALG.svd(x, full_matrices=False)):
            with pytest.raises(NoRuleError, match=r"x\.redistribute\('a=S0'\)"):
                function(split(tall, mesh, "S1"))
            with pytest.raises(NoRuleError, match=r"wide.*x\.T\.redistribute\('a=S0'\)"):
                function(split(wide, mesh, "S0"))
        with pytest.raises(NoRuleError, match="full_matrices=False"):
            LINALG.svd(split(tall, mesh, "S0"))
        with pytest.raises(NoRuleError, match="reduced"):
            LINALG.qr(split(tall, mesh, "S0"), "complete")
        check_factors(mesh, tall, split(wide, mesh, "S1").T.redistribute("a=S0") * 0 + tall)
        with mm.allow_gather():
            u, s, _ = LINALG.svd(split(wide, mesh, "S0"))
        assert (u.shape, s.shape) == ((2, 2), (2,))
        x = split(np.full_like(tall, np.nan), mesh, "S0")
        with pytest.raises(np.linalg.LinAlgError):
            LINALG.svd(x, full_matrices=False)

    on("a=2", main)


@settings(max_examples=examples(12))
@given(st.data())
def test_least_squares_of_tall_matrices_whose_rows_are_split(data):
    """Also of a lower rank, with no columns, no right-hand side, and of a matrix that is whole."""
    columns, sides = (
        data.draw(st.integers(0, 4)),
        data.draw(st.sampled_from(((), (1,), (3,), (0,)))),
    )
    rows, ranks = columns + data.draw(st.integers(0, 9)), data.draw(st.sampled_from((1, 2, 3, 4)))
    kinds = st.sampled_from(("f4", "f8", "c8", "c16", "i4"))
    a, b = rough((rows, columns), data.draw(kinds)), rough((rows, *sides), data.draw(kinds), 1)
    a[:, : data.draw(st.sampled_from((0, 0, 1, 2)))] = data.draw(st.sampled_from((0, 1)))
    places = [data.draw(layouts(one.shape, ranks)) for one in (a, b)]
    places[0] = places[0] if places[0][1:2] != "1" else "S0"
    limit = data.draw(st.sampled_from((None, 1e-10, 0.3)))
    expected, inverse = LINALG.lstsq(a, b, limit), LINALG.pinv(a, limit or 1e-12)
    eps = max(np.finfo(np.result_type(one, np.float32)).eps for one in (a, b))

    def main(mesh):
        x, y = (split(one, mesh, place) for one, place in zip((a, b), places, strict=True))
        solution, squares, rank, values = LINALG.lstsq(x, y, limit)
        turned = LINALG.pinv(x, limit or 1e-12)
        assert (rank, type(rank)) == (expected[2], type(expected[2]))
        assert values.layout.is_replicated
        for found, other in (
            (solution, expected[0]),
            (squares, expected[1]),
            (values, expected[3]),
            (turned, inverse),
        ):
            assert (found.shape, found.dtype) == (other.shape, other.dtype)
            close = 5e4 * eps * (1 + np.abs(other).max(initial=0.0))
            np.testing.assert_allclose(found.full(), other, atol=close)

    on(f"a={ranks}", main)


def test_what_least_squares_refuse():
    tall, wide = rough((6, 2), float), rough((2, 6), float)

    def main(mesh):
        x = split(tall, mesh, "S0")
        assert LINALG.pinv(x).layout.text == "a=S1"
        for a, b in ((x, tall[:4]), (x, tall[..., None]), (tall, x[:, 0, None, None]), (x[0], x)):
            with pytest.raises(np.linalg.LinAlgError, match=r"as many rows, got shapes"):
                LINALG.lstsq(a, b)
        with pytest.raises(TypeError, match="float16"):
            LINALG.lstsq(x.astype("f2"), tall.astype("f2"))
        with pytest.raises(NoRuleError, match=r"lstsq.*wide.*x\.T\.redistribute\('a=S0'\)"):
            LINALG.lstsq(split(wide, mesh, "S0"), np.ones(2))
        with pytest.raises(ShapeError, match="not both"):
            LINALG.pinv(x, 0.1, rtol=None)
        with pytest.raises(np.linalg.LinAlgError, match="hermitian"):
            LINALG.pinv(x, hermitian=True)
        with mm.allow_gather():
            found = LINALG.lstsq(split(wide, mesh, "S0"), np.ones(2))
        np.testing.assert_allclose(found[0].full(), LINALG.lstsq(wide, np.ones(2))[0], atol=CLOSE)

    on("a=2", main)


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
            with pytest.raises(AxisError, match=r"whole number, got 1\.5"):
                LINALG.norm(x, axis=1.5)
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
        "np.linalg.pinv(x0, rtol=None)",
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
