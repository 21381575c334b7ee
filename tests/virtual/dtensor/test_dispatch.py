"""Calls that are looked up: the first by its rule, those after it by what the rule has decided."""

from __future__ import annotations

import enum
import math
import warnings
from operator import getitem
from typing import Any

import numpy as np
import pytest

import mpimesh as mm
from mpimesh.core.dispatch import MOST_ENTRIES
from mpimesh.dtensor.dispatch import PLANNERS
from mpimesh.errors import ClosedError, MismatchError, NoRuleError
from tests.helpers.depth import deep
from tests.helpers.dtensor_check import split
from tests.helpers.ranks import on

LAYOUTS = {
    "a=1": ["S0", "R"],
    "a=2": ["S0", "S1", "R", "P", "S0(1,3)", "S0(0,4)"],
    "a=3": ["S0", "S1"],
    "a=2,b=2": ["S0, S1", "R, S0", "P, S1"],
}


class Number(enum.IntEnum):
    ONE = 1


class Float(float):
    pass


SCALARS: list[Any] = [
    *(True, 1, -1, 0, 2, 300, 2**40, 2**63, 2**70, 1.5, -0.0, math.nan, math.inf, 1e300, 1 + 2j),
    *(np.True_, np.int8(3), np.uint64(2**63), np.float16(2), np.float32(0.1), np.float64(0.1)),
    *(np.longdouble(3), np.complex64(1j), Number.ONE, Float(0.5), np.array(3, "i2")),
]
UFUNCS = [
    *(np.add, np.subtract, np.multiply, np.true_divide, np.floor_divide, np.power, np.maximum),
    *(np.less, np.equal, np.logical_and, np.bitwise_xor, np.hypot, np.copysign),
]
DTYPES = ["?", "i1", "u1", "i4", "u8", "f2", "f4", "f8", "g", "c16", ">f4"]


def outcome(call, *args):
    """Return what a call gives as a plain array, or the class of NumPy's error."""
    with np.errstate(all="ignore"):
        try:
            found = call(*args)
        except (TypeError, ValueError, OverflowError, ArithmeticError) as error:
            names = [one.__name__ for one in type(error).__mro__]
            return next(name for name in names if name in _ERRORS)
    return found.full() if isinstance(found, mm.DTensor) else np.asarray(found)


_ERRORS = ("OverflowError", "TypeError", "ValueError", "ZeroDivisionError")


def same(found, expected):
    if isinstance(expected, str) or isinstance(found, str):
        return isinstance(found, str) and found == expected
    return (
        found.dtype == expected.dtype
        and found.shape == expected.shape
        and np.array_equal(found, expected, equal_nan=expected.dtype.kind in "fc")
        and np.array_equal(np.signbit(found.real), np.signbit(expected.real))
        if expected.dtype.kind in "fc"
        else np.array_equal(found, expected) and found.dtype == expected.dtype
    )


@pytest.mark.parametrize("dims", ["a=1", "a=2"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_beside_arrays_count_as_in_numpy(dims, dtype):
    """By their exact types, their values where NumPy looks at these, and on either side."""
    rng = np.random.default_rng(1)
    a = rng.integers(0, 3, (4, 3)).astype(dtype)

    def main(mesh):
        x, wrong = mm.distribute(a, mesh, "S0"), []
        for ufunc in UFUNCS:
            for scalar in SCALARS:
                for swapped in (False, True):
                    args = (scalar, a) if swapped else (a, scalar)
                    expected = outcome(ufunc, *args)
                    args = (scalar, x) if swapped else (x, scalar)
                    for _ in range(2):
                        found = outcome(ufunc, *args)
                        if not same(found, expected):
                            wrong.append((ufunc.__name__, repr(scalar), swapped, found))
        return wrong

    found = on(dims, main)
    assert found == [[]] * len(found)


def _keys(x: Any) -> list[Any]:
    last = x.shape[-1]
    return [
        *(np.s_[:, 1:3], np.s_[..., 0], np.s_[:, ::-1], np.s_[::2], np.s_[1:], np.s_[:, -1]),
        *(np.s_[None, :, None, 1:2], np.s_[0], np.s_[1, 1], np.s_[:0], np.s_[:, 5:2], ...),
        *(np.s_[:, last - 1 : 0 : -2], np.s_[2, :, None], np.s_[:, None, 1], ()),
    ]


CALLS: dict[str, Any] = {
    "x + y": lambda x, y: x + y,
    "x += y": lambda x, y: x.__iadd__(y),
    "x -= 2": lambda x, y: x.__isub__(2),
    "np.multiply out": lambda x, y: np.multiply(x, y, out=y),
    "out of another dtype": lambda x, y: np.add(x, y, out=y.astype("c16")),
    "x < y": lambda x, y: x < y,
    "x == y": lambda x, y: x == y,
    "x != None": lambda x, y: x != None,  # noqa: E711
    "-x": lambda x, y: -x,
    "abs(x)": lambda x, y: abs(x),
    "exp": lambda x, y: np.exp(x),
    "2.0 ** x": lambda x, y: 2.0**x,
    "x ** 2": lambda x, y: x**2,
    "x @ y.T": lambda x, y: x @ y.T,
    "x.T @ y": lambda x, y: x.T @ y,
    "x @ y[0]": lambda x, y: x @ y[0],
    "x + y[0]": lambda x, y: x + y[0],
    "mean(1)": lambda x, y: x.mean(1),
    "mean": lambda x, y: np.mean(x, keepdims=True),
    "x + a plain row": lambda x, y: x + np.arange(x.shape[1]),
    "a plain column * x": lambda x, y: np.arange(4.0)[:, None] * x,
    "x @ a plain matrix": lambda x, y: x @ np.ones((x.shape[1], 2), "f4"),
    "where of a plain mask": lambda x, y: np.where(np.arange(x.shape[1]) > 0, x, y),
    "x - x.mean(0)": lambda x, y: x - x.mean(0),
    "x / x.sum(1, keepdims)": lambda x, y: x / x.sum(1, keepdims=True),
    "sum": lambda x, y: x.sum(),
    "sum(0)": lambda x, y: x.sum(0),
    "sum(-1)": lambda x, y: np.sum(x, axis=-1),
    "sum as c16": lambda x, y: x.sum(1, dtype="c16"),
    "max(1)": lambda x, y: x.max(1),
    "min": lambda x, y: np.min(x, axis=(0, 1)),
    "any": lambda x, y: (x > 2).any(0),
    "all": lambda x, y: np.all(x > -9, keepdims=True),
    "prod": lambda x, y: x.prod(axis=0),
    "T": lambda x, y: x.T,
    "transpose": lambda x, y: np.transpose(x, (1, 0)),
    "transpose by name": lambda x, y: np.transpose(x, axes=(-1, 0)),
    "where": lambda x, y: np.where(x > y, x, y),
    "where with numbers": lambda x, y: np.where(x > y, 1.5, -0.0),
    "where with one number": lambda x, y: np.where(x > y, x, 0),
    "where of a row": lambda x, y: np.where((x > y)[0], x, y[:, :1]),
    "reshape": lambda x, y: x.reshape(2, -1),
    "reshape to a row": lambda x, y: np.reshape(x, -1),
    "reshape as it is": lambda x, y: x.reshape(x.shape),
    "reshape in order F": lambda x, y: x.reshape((3, 4), order="F"),
}


@pytest.mark.parametrize("dims", LAYOUTS)
@pytest.mark.parametrize("dtype", ["f8", *deep("i4", "c16")])
def test_what_comes_again_gives_what_numpy_gives(dims, dtype):
    """Whatever the layouts; with NaN, infinities, blocks without elements, and other values."""

    def values(seed, shape):
        rng = np.random.default_rng(seed)
        found = rng.integers(-4, 5, shape).astype(dtype)
        if dtype != "i4" and found.size > 4:
            found.flat[[0, 3]] = np.nan, np.inf
        return found

    def main(mesh):
        wrong = []
        for placement in LAYOUTS[dims]:
            for shape in ((4, 3), (4, 1)):
                for name, call in CALLS.items():
                    for seed in (0, 0, 2):
                        a, b = values(seed, shape), values(seed + 1, shape)
                        if "P" in placement:  # what is not finite would be no sum
                            a, b = (
                                np.where(np.isfinite(one), one, 1).astype(dtype) for one in (a, b)
                            )
                        x, y = split(a, mesh, placement), split(b, mesh, placement)
                        found, expected = outcome(call, x, y), outcome(call, a, b)
                        if not close(found, expected):
                            wrong.append((placement, shape, name, seed, found, expected))
        return wrong

    found = on(dims, main)
    assert found == [[]] * len(found)


@pytest.mark.parametrize("dims", LAYOUTS)
def test_what_is_looked_up_is_what_the_rules_make(dims, monkeypatch):
    """With checks on every call goes by its rule: the layouts and bits are the same."""
    rng = np.random.default_rng(3)
    a, b = rng.standard_normal((2, 4, 3))

    def main(mesh):
        made: list[Any] = []
        for placement in LAYOUTS[dims]:
            for name, call in CALLS.items():
                for _ in range(2):
                    x, y = split(a, mesh, placement), split(b, mesh, placement)
                    try:
                        found = call(x, y)
                    except (TypeError, ValueError) as error:
                        made.append((placement, name, type(error)))
                    else:
                        block = found.local
                        made.append((placement, name, found.layout.text, block.shape, bits(block)))
        return made

    def bits(block):
        return np.ascontiguousarray(block).tobytes()

    monkeypatch.setenv("MPIMESH_CHECKS", "0")
    looked_up = on(dims, main)
    monkeypatch.setenv("MPIMESH_CHECKS", "1")
    by_rules = on(dims, main)
    for rank, rows in enumerate(zip(looked_up, by_rules, strict=True)):
        assert [pair for pair in zip(*rows, strict=True) if pair[0] != pair[1]] == [], rank


def close(found, expected):
    """Tell whether two are the same, but for the order of sums."""
    if isinstance(expected, str) or isinstance(found, str):
        return isinstance(found, str) and found == expected
    with np.errstate(all="ignore"):
        near = np.allclose(found, expected, rtol=1e-6, atol=1e-6, equal_nan=True)
    return found.dtype == expected.dtype and found.shape == expected.shape and near


@pytest.mark.parametrize("dims", LAYOUTS)
def test_keys_that_come_again_give_what_numpy_gives(dims):
    def main(mesh):
        wrong = []
        for placement in LAYOUTS[dims]:
            for shape in ((4, 6), (4, 3)):
                for key in _keys(np.empty(shape)):
                    for seed in (0, 0, 1):
                        a = np.random.default_rng(seed).integers(-9, 10, shape).astype(float)
                        x = split(a, mesh, placement)
                        found = outcome(getitem, x, key)
                        if not close(found, outcome(getitem, a, key)):
                            wrong.append((placement, shape, key, seed))
        return wrong

    found = on(dims, main)
    assert found == [[]] * len(found)


def test_what_is_not_split_may_go_into_a_split_array():
    def main():
        with mm.DeviceMesh("a=2") as mesh:
            for placements in ("S0", "S1", "R"):
                x: Any = mm.zeros((4, 6), mesh, placements)
                a, b = np.arange(12.0).reshape(4, 3), np.arange(18.0).reshape(3, 6)
                for _ in range(2):
                    np.add(1.0, 2.0, out=x)
                    assert np.array_equal(x.full(), np.full((4, 6), 3.0))
                    np.negative(np.arange(6.0), out=x)
                    assert np.array_equal(x.full(), np.tile(-np.arange(6.0), (4, 1)))
                    np.matmul(a, b, out=x)
                    assert np.array_equal(x.full(), a @ b)

    mm.run_virtual(2, main)


def test_a_result_has_a_block_of_its_own():
    def main(mesh):
        x = mm.ones((4, 4), mesh, "S0")
        for make in (lambda: x[:, 1:], lambda: x.reshape(8, 2), lambda: x + 0, lambda: x[...]):
            for _ in range(2):
                make().local[...] = 7
        assert (x.local == 1).all()
        for _ in range(2):
            x.T.local[0] = 2  # a view, as NumPy's
        assert (x.local[:, 0] == 2).all()
        y = x
        y += 1
        assert y is x
        z = mm.ones((4, 4), mesh, "R")
        z[...] = np.arange(16.0).reshape(4, 4)
        for _ in range(2):
            whole = z.full()
            z += z.T
            assert np.array_equal(z.full(), whole + whole.T)
        return True

    assert all(on("a=2", main))


@pytest.fixture
def asked(monkeypatch):
    """The ufuncs of which it was asked what is to be done."""
    planner, count = PLANNERS[np.ufunc]
    names = []

    def counted(*args):
        names.append(args[0].__name__)
        return planner(*args)

    monkeypatch.setitem(PLANNERS, np.ufunc, (counted, count))
    return names


def test_a_rule_decides_once_for_each_kind_of_call(asked):
    def main(mesh):
        x, y = mm.ones((4, 4), mesh, "S0"), mm.ones((4, 4), mesh, "S0")
        made = []
        for call in (
            lambda: x + y,
            lambda: x + 1.0,
            lambda: x + 1,
            lambda: x + True,
            lambda: np.exp(x),
            lambda: x + mm.ones((4, 4), mesh, "S1"),  # which moves: its rule does it each time
        ):
            before = len(asked)
            for _ in range(3):
                call()
            made.append(len(asked) - before)
        return made

    assert on("a=1", main) == [[1] * 6]


def test_a_loop_over_columns_leaves_room_for_what_comes_again(asked):
    def main(mesh):
        x = mm.ones((1, 2 * MOST_ENTRIES), mesh, "R")
        known = mesh._core.dispatch
        x + x
        asked.clear()
        for i in range(2 * MOST_ENTRIES):
            assert x[:, i].local == 1
            x + x
        return len(known) <= MOST_ENTRIES, asked

    assert on("a=1", main) == [(True, [])]


def test_errors_of_floats_are_raised_together_also_of_known_calls():
    def main(mesh):
        whole = np.ones((4, 2))
        whole[3] = 0
        x = mm.distribute(whole, mesh, "S0")
        with np.errstate(all="ignore"):
            for _ in range(2):
                one = 1 / x
        assert np.array_equal(one.full()[3], [np.inf] * 2)
        with np.errstate(divide="raise"):
            with pytest.raises(FloatingPointError, match="on rank 1"):
                1 / x
            with pytest.raises(FloatingPointError, match="on rank 1"):
                np.reciprocal(x)
        met = []
        with np.errstate(divide="call", call=lambda kind, flag: met.append(kind)):
            1 / x
        assert met == (["divide by zero"] if mesh.rank else [])
        with np.errstate(all="ignore"):
            1 / x
        return True

    assert all(on("a=2", main))


def test_warnings_that_are_errors_are_raised_together_also_of_known_calls():
    whole = np.array([1.0, 1e308])

    def main(mesh):
        x = mm.distribute(whole, mesh, "S0")
        return outcome_of(lambda: x * 10)

    def outcome_of(call):
        try:
            return call().shape
        except RuntimeWarning as error:
            return str(error)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert on("a=2", main) == [(2,)] * 2

        def twice(mesh):
            x = mm.distribute(whole, mesh, "S0")
            made = [outcome_of(lambda: x * 10) for _ in range(2)]
            mesh.group().barrier()
            if mesh.rank == 0:
                warnings.simplefilter("error", RuntimeWarning)
            mesh.group().barrier()
            made.append(outcome_of(lambda: x * 10))
            mesh.group().barrier()
            if mesh.rank == 0:
                warnings.simplefilter("ignore", RuntimeWarning)
            mesh.group().barrier()
            return [*made, outcome_of(lambda: x * 10)]

        for made in on("a=2", twice):
            assert made[:2] == [(2,)] * 2
            assert "overflow" in made[2]
            assert made[3] == (2,)


def test_powers_below_zero_of_one_rank_are_raised_on_all_also_after_others():
    def main(mesh):
        x = mm.distribute(np.array([2, 3]), mesh, "S0")
        y = mm.distribute(np.array([1, -1]), mesh, "S0")
        assert (x**2).full().tolist() == [4, 9]
        assert (x**x).full().tolist() == [4, 27]
        for power in (-1, y):
            with pytest.raises(ValueError, match="negative"):
                x**power
        assert (x**2).full().tolist() == [4, 9]
        return True

    assert all(on("a=2", main))


def test_subclasses_and_strangers_have_their_say():
    class Mine(mm.DTensor):
        __slots__ = ()

    class Stranger:
        __array_ufunc__ = None

        def __radd__(self, other):
            return "mine"

    class Plain(np.ndarray):
        pass

    def main(mesh):
        x = mm.ones((4, 4), mesh, "S0")
        mine = Mine.from_local(np.ones((2, 4)), mesh, "S0", shape=(4, 4))
        plain = np.ones((4, 4)).view(Plain)
        for _ in range(2):
            assert x + Stranger() == "mine"
            for made in (mine + x, x + mine, mine + 1, x + plain, plain + x, np.ones((4, 4)) + x):
                assert type(made) is mm.DTensor
            assert ((mine + x).local == 2).all()
            with pytest.raises(TypeError):
                x + object()
            with pytest.raises(TypeError):
                pow(x, 2, 3)  # type: ignore[call-overload]
        return True

    assert all(on("a=2", main))


def test_options_of_equal_value_and_other_type_are_others():
    def main(mesh):
        x = mm.ones((4, 4), mesh, "S0")
        for _ in range(2):
            assert x.sum(1).shape == (4,)
            with pytest.raises(TypeError):
                x.sum(True)
            assert x[1].shape == (4,)
            with pytest.raises(NoRuleError):
                x[True, :]
            with pytest.raises((TypeError, IndexError)):
                x[1.0]
        return True

    assert all(on("a=2", main))


def test_a_closed_mesh_makes_no_new_arrays():
    def main():
        with mm.DeviceMesh("a=2") as mesh:
            x = mm.ones((4, 4), mesh, "S0")
            for _ in range(2):
                x + x
        with pytest.raises(ClosedError):
            x + x
        assert x.T.shape == (4, 4)
        return True

    assert all(mm.run_virtual(2, main))


def test_with_checks_known_calls_are_compared(monkeypatch):
    monkeypatch.setenv("MPIMESH_CHECKS", "1")

    def main(mesh):
        x = mm.ones((4, 4), mesh, "S0")
        for _ in range(2):
            x + 1.0
        assert not mesh._core.dispatch.active
        assert len(mesh._core.dispatch) == 0
        with pytest.raises(MismatchError):
            x + float(mesh.rank)
        return True

    assert all(on("a=2", main))


def test_arrays_of_two_meshes_are_refused_though_they_look_alike():
    def main():
        with mm.DeviceMesh("a=2") as one, mm.DeviceMesh("a=2") as other:
            x, y = mm.ones((4, 4), one, "S0"), mm.ones((4, 4), other, "S0")
            for _ in range(2):
                x + x, y + y
                with pytest.raises(mm.errors.LayoutError):
                    x + y
        return True

    assert all(mm.run_virtual(2, main))


def test_a_rank_without_a_block_goes_with_the_others():
    def main():
        with mm.DeviceMesh(mm.Mesh("a=2", [0, 1])) as mesh:
            x = mm.ones((4, 4), mesh, "S0")
            made = [x + x, x.sum(1), x[:, 1:], x.T, np.where(x > 0, x, 0), x.reshape(-1)]
            return [(one.shape, one.is_member) for one in made]

    shapes = [(4, 4), (4,), (4, 3), (4, 4), (4, 4), (16,)]
    assert mm.run_virtual(3, main) == [[(shape, rank < 2) for shape in shapes] for rank in range(3)]
