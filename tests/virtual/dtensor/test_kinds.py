"""Functions of dates, texts, records and other data that are no numbers, and odd numbers."""

from __future__ import annotations

import numpy as np
import pytest

import mpimesh as mm
from mpimesh.errors import DTypeError, NoRuleError, ShapeError
from tests.helpers.dtensor_check import agree, numbers, split
from tests.helpers.raises import raises
from tests.helpers.rule_fuzz import Case, Operand, problems

CASES = [
    ("x0 == x0", "i4,f8", ""),
    ("x0 != of_kind(np.arange(7), 'i4,f8')", "i4,f8", ""),
    ("x0 == of_kind(np.arange(7), 'V3')", "V3", ""),
    ("np.count_nonzero(x0)", "i4,f8", ""),
    ("np.trim_zeros(x0)", "i4,f8", ""),
    ("np.nanmin(x0)", "M8[D]", "nan"),
    ("np.nanmax(x0)", "m8[s]", "nan"),
    ("np.unique(x0, True, True, True)", "complex128", "nan"),
    ("np.unique(x0, True, True, True, equal_nan=False)", "complex64", "nan"),
    ("np.unique(x0, return_inverse=True, equal_nan=False)", "M8[D]", "nan"),
    ("np.unique_values(x0)", "m8[s]", "nan"),
    ("np.unique_all(x0)", "m8[s]", "nan"),
    ("np.zeros_like(x0)", "U3", ""),
    ("np.diagflat(x0, 1)", "S3", ""),
    ("np.diag(x0)", "V3", ""),
    ("x0.astype(str)", "int64", ""),
    ("x0.astype('S')", "float64", "nan"),
    ("np.astype(x0, str)", "M8[D]", "nan"),
    ("x0.astype(int)", "V3", ""),
    ("x0.conj()", "M8[D]", ""),
    ("np.linalg.norm(x0, np.inf)", "m8[s]", ""),
    ("np.trace(np.outer(np.ones(7, int), x0))", "m8[s]", ""),
    ("np.histogram(x0, 3)", "float16", ""),
    ("np.histogram(x0, 1, density=True)", "complex64", ""),
    ("np.triu(x0)", ">f8", ""),
    ("np.tril(x0, 1)", "i4,>f8", ""),
    ("np.partition(x0, 3).dtype", ">i4", ""),
    ("np.sort(np.argpartition(x0[:0], 1))", "float64", ""),
    ("np.take(x0, [True, False, True])", "int64", ""),
    ("then(x0, np.put(x0, [True] * 7, 9))", "int64", ""),
    ("then(x0, np.put(x0, x0 > 0, [8, 9], mode='wrap'))", "int64", ""),
    ("np.correlate(x0[0], [1, 2])", "int64", ""),
]


@pytest.mark.parametrize("place", ["R", "S0", "S0(3,0,4)", "S0(0,0,7)"])
def test_as_numpy_has_it(place):
    cases = [
        Case("a=3", text, (Operand(place, (7,), kind, number, flavour),), any_error=True)
        for number, (text, kind, flavour) in enumerate(CASES)
    ]
    assert not problems(cases)


def test_what_is_made_of_zeros_is_empty_text():
    def main():
        with mm.DeviceMesh("a=2") as mesh:
            for kind in ("U3", "S3", "i4,U2", "V3", "M8[D]"):
                found = mm.zeros((3,), mesh, "S0", dtype=np.dtype(kind)).full()
                np.testing.assert_array_equal(found, np.zeros(3, kind))

    mm.run_virtual(2, main)


def test_weights_of_several_axes():
    x, w = numbers((3, 4, 5), float), np.abs(numbers((5, 3), float)) + 1
    calls = [
        lambda x, w: np.average(x, (2, 0), w),
        lambda x, w: np.average(x, (0, 2), w.T, keepdims=True),
        lambda x, w: np.average(x, (2, 0), w, returned=True)[1],
        lambda x, w: np.average(x, (-1, 0), w),
    ]
    cases = [(f, [x, w], [p, q]) for f in calls for p in ("S0", "S2", "P") for q in ("R", "S1")]
    agree("a=3", cases, atol=1e-12)


def test_large_integers_of_python_are_numbers():
    def main():
        with mm.DeviceMesh("a=2") as mesh:
            x = mm.zeros((4,), mesh, "S0")
            x[0], x[1:3] = 2**64, [-(2**70), 1]
            assert x.full().tolist() == [2.0**64, -(2.0**70), 1.0, 0.0]
            with raises(DTypeError, "int64", "18446744073709551616"):
                mm.zeros((4,), mesh, "S0", dtype=int)[0] = 2**64

    mm.run_virtual(2, main)


def test_products_of_bfloat16():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    x = np.arange(4).astype(ml_dtypes.bfloat16)
    calls = [np.vdot, np.dot, np.inner, lambda a, b: np.tensordot(a, b, 1), np.matmul]
    agree("a=2", [(f, [x, x], [p, p]) for f in calls for p in ("S0", "R")])


@pytest.mark.parametrize("name", [">f8", "<f8", ">i2", "bfloat16", "float8_e4m3fn", "f2"])
@pytest.mark.parametrize("target", ["S0", "R"])
def test_sums_of_any_number(name, target):
    """Also of those that no kernel adds up."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    dtype = np.dtype(getattr(ml_dtypes, name, name))

    def main():
        with mm.DeviceMesh("a=3,b=2") as mesh:
            block = (np.arange(12) % 5 + mesh.rank % 2).astype(dtype)
            x = mm.DTensor.from_local(block, mesh, "a=P, b=R")
            moved = x.redistribute(f"a={target}, b=R")
            rows = mm.distribute(np.arange(12).astype(dtype), mesh, "a=S0, b=R")
            return moved.full().astype(int).tolist(), rows.redistribute("b=S0").full().tolist()

    counts = [sum(1 for a in range(3) if (2 * a + b) % 2) for b in range(2)]
    sums = [[3 * (i % 5) + count for i in range(12)] for count in counts]
    for rank, (got, moved) in enumerate(mm.run_virtual(6, main)):
        assert got in sums, rank
        assert moved == np.arange(12).astype(dtype).tolist()


def test_what_is_refused_says_how_to_go_on():
    def main():
        with mm.DeviceMesh("a=2") as mesh:
            spans = split(np.arange(4).astype("m8[s]"), mesh, "S0")
            with raises(NoRuleError, "timedelta64", "astype"):
                np.dot(spans, spans)
            with raises(DTypeError, "unit", "M8[s]"):
                split(np.array(["2020-01-01", "2020"]), mesh, "S0").astype("M8")
            x = split(numbers((4,), float), mesh, "S0")
            with pytest.raises(ValueError, match="not both"):
                np.var(x, ddof=1, correction=1)
            with raises(NoRuleError, "polyval", "2 axes"):
                np.polyval(x.reshape(2, 2), 2)
            with raises(ShapeError, "repeat", "too big"):  # NumPy's own ends the process
                np.repeat(x, 2**62)

    mm.run_virtual(2, main)
